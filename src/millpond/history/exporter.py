"""Moves the journal into the lake: every turn once, also across crashes.

The position is in the lake itself. A pass reads each partition's journal from there on, a page at a time, and writes
data files; for each, in this order: the data under a name that nobody reads, the bookmark of its last turn, then the
data under its own name. Whatever the crash, the newest data file says where to go on, and its bookmark what was known.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from millpond.errors import MillpondError, NotFound
from millpond.history.durable import Watch, remove_files, unwatched
from millpond.history.known import Known
from millpond.history.lake import EVENTS, EXPORT_LOCK, ROW_GROUP_ROWS, STATE, Gap, Lake
from millpond.history.lane_export import LaneExport, QueueSync, Unreadable
from millpond.history.progress import Lane, Progress, floor_of, list_bookmarks, note_deleted, remove_bookmarks
from millpond.history.upkeep import compact, retain
from millpond.model import JournalPage, PartitionStats, QueueInfo, QueuePage

FILE_EVENTS = 2 * ROW_GROUP_ROWS  # about 100,000: what a crash may have to do again
PAGE_ROWS_FIRST, PAGE_ROWS_MAX = 100, 1_000  # rows asked for at a time: the most is the engine's own limit
PAGE_BYTES = 2 << 20  # what a page should have: two of them are in memory, and a row may be small or large
QUEUES_PAGE = 100
INTERVAL_S = 5.0  # between two passes that follow a queue: a file a pass, where there is something to write
QUIET_S, RESTING_S = 10.0, 600.0  # how soon, and how late, a queue is asked again that seems not to have changed
UPKEEP_INTERVAL_S = 600.0  # between two rounds of compaction and retention

log = logging.getLogger("millpond.history")

T = TypeVar("T")


class Journals(Protocol):
    """What the exporter needs of the operations: `api.Api` has it, and every client."""

    async def list_queues(self, *, prefix: str = "", after: str = "", limit: int = 100) -> QueuePage: ...

    async def queue_info(self, name: str) -> QueueInfo: ...

    async def read_journal(
        self, queue: str, *, partition: int = 0, after: int = 0, limit: int = 500
    ) -> JournalPage: ...


class SyncReport(msgspec.Struct, kw_only=True):
    """What a sync did. `problems` say what could not be exported, and why; they are also in the log."""

    events: int = 0
    files: int = 0
    bytes: int = 0
    gaps: list[Gap] = []
    problems: list[str] = []
    deleted: list[str] = []  # queues that are gone since the last sync; what they did after it is not in the lake
    queues: dict[str, QueueSync] = {}
    seconds: float = 0.0

    def add(self, queue: str, done: QueueSync) -> None:
        for total in (self, self.queues.setdefault(queue, QueueSync())):
            total.events += done.events
            total.files += done.files
            total.bytes += done.bytes
            total.gaps += done.gaps
            total.problems += done.problems

    def join(self, other: SyncReport) -> None:
        self.deleted += other.deleted
        for queue, done in other.queues.items():
            self.add(queue, done)


# ---- the calls ----------------------------------------------------------------------------------------------


async def sync(
    api: Journals,
    lake_path: str | Path,
    *,
    queues: Sequence[str] | None = None,
    follow: bool = False,
    interval: float = INTERVAL_S,
    retain_days: int | None = None,
    stop: asyncio.Event | None = None,
    on_pass: Callable[[SyncReport], None] | None = None,
) -> SyncReport:
    """Bring the lake up to date with the journals; with `follow` go on until `stop` is set, or the task is cancelled.

    Following also compacts now and then, and drops what is older than `retain_days`. `on_pass` is told the first pass,
    and each that wrote something. One process at a time exports to a lake: a second one is refused (`DirectoryInUse`).
    """
    lake, started = Lake(lake_path), time.monotonic()
    with lake.locked(EXPORT_LOCK, "exports to"):
        exporter = Exporter(api, lake, queues=queues)
        total = await exporter.run_once(time.monotonic())
        if on_pass is not None:
            on_pass(total)
        await _in_thread(_keep_up, lake, retain_days)
        if follow:
            await _follow(exporter, lake, total, interval, retain_days, stop or asyncio.Event(), on_pass)
    total.seconds = time.monotonic() - started
    return total


async def _follow(
    exporter: Exporter,
    lake: Lake,
    total: SyncReport,
    interval: float,
    retain_days: int | None,
    stop: asyncio.Event,
    on_pass: Callable[[SyncReport], None] | None,
) -> None:
    upkeep_at = time.monotonic() + UPKEEP_INTERVAL_S
    while not await _is_set_within(stop, interval):
        try:
            done = await exporter.run_once(time.monotonic())
        except MillpondError as error:
            if not error.retryable:
                raise
            log.warning("history is not exported for now", extra={"reason": error.message})
            continue
        total.join(done)
        if on_pass is not None and (done.events or done.gaps or done.problems or done.deleted):
            on_pass(done)
        if time.monotonic() >= upkeep_at:
            await _in_thread(_keep_up, lake, retain_days)
            upkeep_at = time.monotonic() + UPKEEP_INTERVAL_S


async def _is_set_within(stop: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _keep_up(lake: Lake, retain_days: int | None) -> None:
    try:
        compact(lake)
        if retain_days is not None:
            retain(lake, retain_days)
    except MillpondError as error:  # somebody else does it, or there is no room: the export goes on
        log.warning("history upkeep was left out", extra={"lake": str(lake.path), "reason": error.message})


class _Look:
    """When a partition was last asked, and what it looked like: whether to ask it again. Asking wakes a queue."""

    def __init__(self) -> None:
        self._seen: Any = None
        self._next_at = 0.0
        self._wait = 0.0

    def is_due(self, now: float, loaded: bool, stats: PartitionStats) -> bool:
        """A queue that sleeps shows no counts, and has none to show: it was exported when it last changed."""
        return now >= self._next_at or (loaded and self._seen != (stats.counts, stats.last_number))

    def looked(self, now: float, stats: PartitionStats, events: int) -> None:
        self._seen = stats.counts, stats.last_number
        self._wait = 0.0 if events else min(max(QUIET_S, 2 * self._wait), RESTING_S)
        self._next_at = now + self._wait


class Exporter:
    """Exports to a lake whose lock its caller holds. It remembers from pass to pass what it knows of live items."""

    def __init__(
        self,
        api: Journals,
        lake: Lake,
        *,
        queues: Sequence[str] | None = None,
        file_events: int = FILE_EVENTS,
        watch: Watch = unwatched,
    ) -> None:
        self._api = api
        self._lake = lake
        self._queues = queues
        self._file_events = file_events
        self._watch = watch
        self._lanes: dict[Lane, LaneExport] = {}
        self._looks: dict[Lane, _Look] = {}
        self._names: dict[str, str] = {}  # of queues, by incarnation: those that the lake has something of
        self._newest: dict[Lane, int] = {}  # the last turn that a data file of each had at the start
        self._bookmarks: dict[Lane, list[int]] = {}  # of those that were not opened yet
        self._reopen: set[Lane] = set()  # what the lake has of these must be looked up again
        self._begun = False

    async def run_once(self, now: float) -> SyncReport:
        """One pass over all queues: up to the turn that was each partition's newest when it was looked at."""
        started = time.monotonic()
        report = SyncReport()
        if not self._begun:
            await _in_thread(self._begin)
        queues = await self._find_queues()
        for info in queues:
            for stats in info.partitions:
                lane = info.incarnation, stats.partition
                look = self._looks.setdefault(lane, _Look())
                if look.is_due(now, info.loaded, stats):
                    done = await self._export(lane, info.name)
                    look.looked(now, stats, done.events)
                    report.add(info.name, done)
        if self._queues is None:
            there = {info.incarnation for info in queues}
            report.deleted = await _in_thread(self._find_deleted, there)
            self._forget_all_but(there)
        report.seconds = time.monotonic() - started
        return report

    def _begin(self) -> None:
        """What the lake has; and what a crash left behind goes."""
        for file in self._lake.files():
            self._newest[file.lane] = max(self._newest.get(file.lane, 0), file.span.to_turn)
            self._names[file.lane[0]] = file.queue
        remove_files([*(self._lake.path / EVENTS).glob("*/*/.export-*"), *(self._lake.path / STATE).glob(".*.known")])
        self._bookmarks = list_bookmarks(self._lake)
        self._begun = True

    def _find_deleted(self, incarnations: set[str]) -> list[str]:
        """Told once: a journal goes with its queue, and nobody can say any more what was in it."""
        found = []
        for incarnation in sorted(self._names.keys() - incarnations):
            queue = self._names.pop(incarnation)
            if note_deleted(self._lake, incarnation):
                log.info(
                    "a queue was deleted; what it did after the last sync is not in the history", extra={"queue": queue}
                )
                found.append(queue)
        return found

    def _forget_all_but(self, incarnations: set[str]) -> None:
        self._reopen |= {lane for lane in self._lanes if lane[0] not in incarnations}  # should they come again
        self._lanes = {lane: export for lane, export in self._lanes.items() if lane[0] in incarnations}
        self._looks = {lane: look for lane, look in self._looks.items() if lane[0] in incarnations}
        for lane in [lane for lane in self._bookmarks if lane[0] not in incarnations and lane not in self._newest]:
            remove_bookmarks(self._lake, lane, self._bookmarks.pop(lane))  # of a queue that left nothing else behind

    async def _find_queues(self) -> list[QueueInfo]:
        if self._queues is not None:
            return [await self._api.queue_info(name) for name in self._queues]
        found: list[QueueInfo] = []
        after = ""
        while True:
            page = await self._api.list_queues(after=after, limit=QUEUES_PAGE)
            found += page.queues
            if page.next is None:
                return found
            after = page.next

    async def _export(self, lane: Lane, queue: str) -> QueueSync:
        """A journal that cannot be read is told, and does not stop the others; a lake that cannot be written does."""
        if lane not in self._lanes:
            self._lanes[lane] = await _in_thread(self._open, lane, queue)
        export = self._lanes[lane]
        try:
            await self._read(lane, queue, export)
            await _in_thread(export.finish)
        except BaseException:
            del self._lanes[lane]  # what it knows is ahead of the lake
            self._reopen.add(lane)
            await _in_thread(export.abandon)
            raise
        done, export.done = export.done, QueueSync()
        if done.events:
            self._names[lane[0]] = queue
        for problem in done.problems:
            log.error("history was not exported", extra={"queue": queue, "partition": lane[1], "reason": problem})
        return done

    def _open(self, lane: Lane, queue: str) -> LaneExport:
        if lane in self._reopen:
            files = self._lake.files(lane=lane)
            self._newest[lane] = max((file.span.to_turn for file in files), default=0)
            self._bookmarks[lane] = list_bookmarks(self._lake).get(lane, [])
            self._reopen.discard(lane)
        progress = Progress(self._lake, lane, max(self._newest.get(lane, 0), floor_of(self._lake, lane)))
        progress.load(Known(), self._bookmarks.pop(lane, []))
        return LaneExport(self._lake, lane, queue, progress, self._file_events, self._watch)

    async def _read(self, lane: Lane, queue: str, export: LaneExport) -> None:
        """All there is, as far as it can be had. The next page is read while the last one is written."""
        pages = _Pages(self._api, queue, lane)
        try:
            page = await pages.next(export.read_after)
            export.check(page)
            while page.rows:
                pages.prepare(page)
                await _in_thread(export.take, page.rows)
                page = await pages.following()
        except NotFound:  # deleted, or made anew, since it was listed: the next pass finds what there is
            pass
        except Unreadable as error:
            export.done.problems.append(f"{queue} partition {lane[1]}: {error}")
        finally:
            pages.close()


class _Pages:
    """A journal's pages up to the turn that was the newest at first."""

    def __init__(self, api: Journals, queue: str, lane: Lane) -> None:
        self._api = api
        self._queue = queue
        self._lane = lane
        self._last_turn = 0
        self._rows = PAGE_ROWS_FIRST
        self._ahead: asyncio.Task[JournalPage] | None = None

    async def next(self, after: int) -> JournalPage:
        page = await self._get(after)
        self._last_turn = page.last_turn
        return page

    def prepare(self, page: JournalPage) -> None:
        """Begin to read the page after this one, if there is one."""
        after = page.rows[-1].turn
        if after < self._last_turn:
            self._ahead = asyncio.create_task(self._get(after))

    async def following(self) -> JournalPage:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return JournalPage(incarnation=self._lane[0], partition=self._lane[1], rows=[], last_turn=self._last_turn)
        return await ahead

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead.add_done_callback(lambda ahead: ahead.cancelled() or ahead.exception())

    async def _get(self, after: int) -> JournalPage:
        try:
            page = await self._api.read_journal(self._queue, partition=self._lane[1], after=after, limit=self._rows)
        except NotFound:
            raise
        except MillpondError as error:
            raise Unreadable(error.message) from error
        if page.incarnation != self._lane[0]:
            raise NotFound(f"{self._queue} was made anew")
        self._fit(page)
        return page

    def _fit(self, page: JournalPage) -> None:
        """The next page is to have about so many bytes."""
        size = sum([len(row.events) for row in page.rows]) + 1
        self._rows = max(2, min(PAGE_ROWS_MAX, 4 * self._rows, len(page.rows) * PAGE_BYTES // size))


async def _in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Aside from the event loop. A caller that is cancelled waits for the end of the work: it holds the lake's lock."""
    running = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError:
                continue
        raise
