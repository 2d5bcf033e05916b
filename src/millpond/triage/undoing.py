"""Undoes a redrive by its record: what still waits where it was brought dies again, of what it had died of.

An item is looked for where it was dead first: one that lies there never left, or is dead again already. Of the others,
those that wait are buried, and the rest are told apart. One whose id was taken when it came back has another there:
such are looked for at the end, by where they came from.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import msgspec

from millpond.errors import Conflict, NotFound, Unavailable
from millpond.model import State
from millpond.triage.dead import WAITING, Calls, Chosen, items_in
from millpond.triage.pace import Pace
from millpond.triage.record import Group, Line, Record, Story, batches, groups_of, members, missing
from millpond.triage.redriving import Now, Tell, in_batches

T = TypeVar("T")

AT_ONCE = 16  # calls: they share commits, so that items that died each of something else do not wait for one each
MOVE_WAIT_S = 30.0  # a letter is on its way for milliseconds, unless a partition is away
MOVE_LOOK_S = 0.05  # between looks at whether it has come

# What became of an item; others are told by their states.
BURIED = "buried"
STAYED = "dead"  # never left, or dead again already
GONE = "gone"  # completed and removed, most likely
WAITS = "waiting"  # in a dry run: would be buried

_DEAD_HERE = (State.DEAD, *WAITING)  # what a dead item's state is where it was dead


class Undo:
    """One undo of one record. `counts` is what became of the items so far. A dry run changes and writes nothing."""

    def __init__(self, pond: Calls, record: Record, story: Story, pace: Pace, now: Now, *, dry_run: bool) -> None:
        self._pond = pond
        self._record = record
        self._story = story
        self._queue = story.header.queue
        self._pace = pace
        self._now = now
        self._dry_run = dry_run
        self._known: dict[str, bool] = {}
        self._renamed: dict[str, dict[str, str]] = {}
        self._threads = ThreadPoolExecutor(AT_ONCE, "millpond-undo")
        self.counts = Counter(story.undone)

    def run(self, tell: Tell) -> None:
        """`tell` is told of how many it is known what became of them."""
        self._check()
        with self._threads:
            for groups in islice(batches(self._record.path), self._story.undone_batches, None):
                counts, lost = self._undo(members(groups))
                if self._dry_run:
                    counts += self._undo_renamed(lost)
                else:
                    self._record.append(Line(at=self._now(), undone=counts, missing=groups_of(lost)))
                self.counts += counts
                tell(self.counts.total())
            if not self._dry_run:
                self._end()

    def _end(self) -> None:
        counts: Counter[str] = Counter()
        for groups in missing(self._record.path):
            counts += self._undo_renamed(members(groups))
        self._record.append(Line(at=self._now(), undo_ended=counts))
        self.counts += counts

    # ---- a batch ----------------------------------------------------------------------------------------------

    def _undo(self, batch: Sequence[Chosen]) -> tuple[Counter[str], list[Chosen]]:
        """What became of them, save for those that are not found under the id that they should have: these come too."""
        counts, left = self._look_where_they_were(batch)
        there, lost = self._first_of_each([one for one in left if self._is_there(one.to)])
        counts.update(self._without_target([one for one in left if not self._is_there(one.to)]))
        for one, fate in zip(there, self._fates(there), strict=True):
            if fate == GONE and one.to != self._queue:
                lost.append(one)
            else:
                counts[fate] += 1
        return counts, lost

    def _first_of_each(self, chosen: Sequence[Chosen]) -> tuple[list[Chosen], list[Chosen]]:
        """Two letters may have had one id: the first to come back has it, and the other a new one."""
        first = {(one.to, one.to_id): one for one in reversed(chosen)}
        others = [one for one in chosen if first[one.to, one.to_id] is not one]
        return list(reversed(first.values())), others

    def _look_where_they_were(self, batch: Sequence[Chosen]) -> tuple[Counter[str], list[Chosen]]:
        """What became of those that are there still; and the others, which have left."""
        give_up_at = time.monotonic() + MOVE_WAIT_S
        while True:
            refused = self._refused([one.id for one in batch])
            left = [one for one in batch if one.id in refused]
            held = [one for one in left if one.to != self._queue and refused[one.id] == Conflict.code]
            states = self._each(lambda one: self._state(self._queue, one.id), held)
            moving = sum(state in (*_DEAD_HERE, GONE) for state in states)  # GONE since the look before
            if not moving:
                break
            if time.monotonic() > give_up_at:
                raise Unavailable(
                    f"{moving} items have been on their way to queue {held[0].to!r} for {MOVE_WAIT_S:g} s, which may"
                    " have a partition that is away; undo again later, it goes on from here"
                )
            time.sleep(MOVE_LOOK_S)
        here = {one.id for one in held}
        counts = Counter(states) + Counter({STAYED: len(batch) - len(left)})
        return counts, [one for one in left if one.id not in here]

    def _refused(self, ids: Sequence[str]) -> dict[str, str]:
        """Why they could not be redriven now: a code, by id."""
        if not self._is_there(self._queue):
            return dict.fromkeys(ids, NotFound.code)
        seen = self._pond.redrive(self._queue, ids=ids, dry_run=True)
        refused = {id: error.code for id, error in seen.errors.items()}
        silent = [id for id in ids if id not in refused]  # they can be redriven, or are not there any more
        if seen.matched == len(ids):
            return refused
        states = (
            [GONE] * len(silent) if not seen.matched else self._each(lambda id: self._state(self._queue, id), silent)
        )
        return refused | {id: NotFound.code for id, state in zip(silent, states, strict=True) if state == GONE}

    def _without_target(self, chosen: Sequence[Chosen]) -> list[str]:
        """Their queue is gone, or is not the one it was: it took them with it, unless they never left."""
        states = self._each(lambda one: self._state(self._queue, one.id), chosen if self._is_there(self._queue) else [])
        stayed = sum(state in _DEAD_HERE for state in states)
        return [STAYED] * stayed + [GONE] * (len(chosen) - stayed)

    def _fates(self, chosen: Sequence[Chosen]) -> list[str]:
        """Of each, in order; in a dry run of what it would be."""
        if self._dry_run:
            states = self._each(lambda one: self._state(one.to, one.to_id), chosen)
            return [WAITS if state in WAITING else state for state in states]
        calls = []
        for group in groups_of(chosen):
            for pairs in in_batches(group.ids, self._pace.batch):
                self._pace.step(len(pairs))
                calls.append((pairs, self._threads.submit(self._bury, group, [to_id for _, to_id in pairs])))
        fates = {pair: fate for pairs, call in calls for pair, fate in zip(pairs, call.result(), strict=True)}
        return [fates[one.id, one.to_id] for one in chosen]

    def _bury(self, group: Group, ids: Sequence[str]) -> list[str]:
        results = self._pond.bury(group.to, ids, reason=group.reason, error=group.error)
        return [BURIED if result.ok else self._state(group.to, id) for id, result in zip(ids, results, strict=True)]

    # ---- under another id -------------------------------------------------------------------------------------

    def _undo_renamed(self, lost: Sequence[Chosen]) -> Counter[str]:
        found = [
            msgspec.structs.replace(one, to_id=id)
            for one in lost
            if (id := self._renamed_in(one.to).pop(one.to_id, None)) is not None
        ]
        return Counter(self._fates(found)) + Counter({GONE: len(lost) - len(found)})

    def _renamed_in(self, queue: str) -> dict[str, str]:
        """Items that wait there and came from here, but had to give up their id: the one they have, by the old one."""
        if queue not in self._renamed:
            counts = self._pond.stats(queue).counts
            items = (item for state in WAITING if counts.get(state) for item in items_in(self._pond, queue, state))
            self._renamed[queue] = {str(item.source_id): item.id for item in items if item.source_queue == self._queue}
        return self._renamed[queue]

    # ---- looking ----------------------------------------------------------------------------------------------

    def _each(self, look: Callable[[T], str], things: Sequence[T]) -> list[str]:
        return list(self._threads.map(look, things))

    def _state(self, queue: str, id: str) -> str:
        try:
            return self._pond.get_item(queue, id).state
        except NotFound:
            return GONE

    def _is_there(self, queue: str) -> bool:
        """Whether it is the one that it was. Another one of the same name may have other items under the same ids."""
        if queue not in self._known:
            try:
                incarnation = self._pond.queue_info(queue).incarnation
            except NotFound:
                incarnation = ""
            here = self._story.header.incarnation if queue == self._queue else self._story.targets[queue]
            self._known[queue] = incarnation == here != ""
        return self._known[queue]

    def _check(self) -> None:
        """Before the first item is touched."""
        header, targets = self._story.header, list(self._story.targets)
        there = [target for target in targets if self._is_there(target)]
        if targets and not there and not self._is_there(self._queue):
            raise NotFound(
                f"redrive {header.redrive} was made in {header.place}, and its queues are not here; name that place"
                " with --data or --server (if they were deleted, there is nothing left to undo)"
            )
        for target in there:
            info = self._pond.queue_info(target)
            if info.dead == "delete" and info.dead_queue is None:
                raise Conflict(
                    f"queue {target!r} deletes its dead items by now, so that an undo would delete them; set its dead"
                    " to keep, or give it a dead_queue, and undo again"
                )
