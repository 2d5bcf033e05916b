"""`millpond enqueue --file`: a job a line. All lines are read and checked before the first is enqueued."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from millpond.cli.flags import Arguments
from millpond.cli.output import DONE, FAILED, print_json, say
from millpond.cli.pond import on_pond
from millpond.cli.progress import Progress
from millpond.cli.text import counted

if TYPE_CHECKING:
    from millpond.api import Api
    from millpond.cli.job_json import Given
    from millpond.jobs.enqueue import NewJob
    from millpond.model import Produced

BATCH_JOBS = 1_000  # of one request: the model's PRODUCE_BATCH_MAX
BATCH_BYTES = 4 << 20  # after which a request is sent: well below what a server takes
TOLD = 10  # ids that were taken, of those that are named


class Line(NamedTuple):
    """A job, its queue, and the bytes of its item."""

    queue: str
    job: NewJob
    size: int


def enqueue_file(asked: Arguments, path: str, flags: Mapping[str, Any]) -> int:
    from millpond.errors import InvalidRequest

    if "id" in flags or "key" in flags:
        raise InvalidRequest("--id and --key name one job; say them in the lines")
    given = list(_jobs(path, flags))
    return on_pond(asked, lambda pond: _enqueue_all(pond, asked, given), create=True, listen=True)


def _jobs(path: str, flags: Mapping[str, Any]) -> Iterator[Line]:
    from millpond.cli.job_json import read_job
    from millpond.errors import InvalidRequest

    first: dict[tuple[str, str], int] = {}  # queue and id: the line that has them
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                given = read_job(line.decode(), flags)
                if given.job.id and (before := first.setdefault((given.queue, given.job.id), number)) != number:
                    raise InvalidRequest(f"id {given.job.id!r} is that of line {before} too")
                yield _checked(given)
            except UnicodeDecodeError:
                raise InvalidRequest(f"line {number}: is no UTF-8 text; nothing was enqueued") from None
            except InvalidRequest as error:
                wrong = error.message.removeprefix("items[0].")
                raise InvalidRequest(f"line {number}: {wrong}; nothing was enqueued") from None


def _checked(given: Given) -> Line:
    """As its queue will check it, which is too late for the lines before."""
    from millpond.clock import Clock
    from millpond.jobs.enqueue import new_item
    from millpond.service import validate

    validate.queue_name(given.queue)
    _, size, _ = validate.new_items([new_item(given.job, None)], Clock().now)
    return Line(given.queue, given.job, size)


def _lines(path: str) -> Iterable[bytes]:
    if path == "-":
        return sys.stdin.buffer
    return _of_file(path)


def _of_file(path: str) -> Iterator[bytes]:
    file: IO[bytes]
    with open(path, "rb") as file:
        yield from file


async def _enqueue_all(pond: Api, asked: Arguments, given: list[Line]) -> int:
    from millpond.jobs.enqueue import enqueue_many

    made: dict[int, Produced] = {}
    try:
        with Progress(len(given), "enqueued") as progress:
            for queue, places in _batches(given):
                produced = await enqueue_many(pond, queue, [given[place].job for place in places])
                made |= dict(zip(places, produced, strict=True))
                progress(len(made))
    except BaseException:
        new = sum(not one.duplicate for one in made.values())
        say(f"stopped after {new:,} of {len(given):,} jobs; give the file again: an id is taken once")
        raise
    ids = [made[place].id for place in range(len(given)) if not made[place].duplicate]
    taken = [made[place].id for place in range(len(given)) if made[place].duplicate]
    if asked.json:
        print_json({"enqueued": len(ids), "ids": ids, "taken": taken})
    else:
        for id in ids:
            print(id)
        say(f"enqueued {counted(len(ids), 'job')}")
    for id in taken[:TOLD]:
        say(f"millpond: id {id!r} is taken; nothing was added for it")
    if len(taken) > TOLD:
        say(f"millpond: {len(taken) - TOLD:,} more ids are taken")
    return FAILED if taken else DONE


def _batches(given: list[Line]) -> Iterator[tuple[str, list[int]]]:
    """A queue, and the places of jobs that are enqueued all or none: those that wait for others by themselves, after
    those around them that do not."""
    for queue, group in groupby(range(len(given)), key=lambda place: given[place].queue):
        for batch in _cut(given, group):
            if free := [place for place in batch if not given[place].job.spec.after]:
                yield queue, free
            yield from ((queue, [place]) for place in batch if given[place].job.spec.after)


def _cut(given: list[Line], places: Iterable[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for place in places:
        if batch and (len(batch) == BATCH_JOBS or size + given[place].size > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(place)
        size += given[place].size
    yield batch
