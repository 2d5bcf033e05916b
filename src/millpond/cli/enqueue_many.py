"""`millpond enqueue --file`: a job a line. All lines are read and checked before the first is enqueued."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any

from millpond.cli.flags import Arguments
from millpond.cli.output import DONE, FAILED, print_json, say
from millpond.cli.pond import on_pond
from millpond.cli.progress import Progress
from millpond.cli.text import counted

if TYPE_CHECKING:
    from millpond.api import Api
    from millpond.cli.job_json import Given
    from millpond.jobs.enqueue import NewJob

BATCH = 1_000  # jobs of one request: the model's PRODUCE_BATCH_MAX
TOLD = 10  # ids that were taken, of those that are named


def enqueue_file(asked: Arguments, path: str, flags: Mapping[str, Any]) -> int:
    from millpond.errors import InvalidRequest

    if "id" in flags or "key" in flags:
        raise InvalidRequest("--id and --key name one job; say them in the lines")
    given = list(_jobs(path, flags))
    return on_pond(asked, lambda pond: _enqueue_all(pond, asked, given), create=True, listen=True)


def _jobs(path: str, flags: Mapping[str, Any]) -> Iterator[Given]:
    from millpond.cli.job_json import read_job
    from millpond.errors import InvalidRequest

    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                yield read_job(line.decode(), flags)
            except UnicodeDecodeError:
                raise InvalidRequest(f"line {number}: is no UTF-8 text; nothing was enqueued") from None
            except InvalidRequest as error:
                raise InvalidRequest(f"line {number}: {error.message}; nothing was enqueued") from None


def _lines(path: str) -> Iterable[bytes]:
    if path == "-":
        return sys.stdin.buffer
    return _of_file(path)


def _of_file(path: str) -> Iterator[bytes]:
    file: IO[bytes]
    with open(path, "rb") as file:
        yield from file


async def _enqueue_all(pond: Api, asked: Arguments, given: list[Given]) -> int:
    from millpond.jobs.enqueue import enqueue_many

    ids: list[str] = []
    taken: list[str] = []
    try:
        with Progress(len(given), "enqueued") as progress:
            for queue, jobs in _batches(given):
                for made in await enqueue_many(pond, queue, jobs):
                    (taken if made.duplicate else ids).append(made.id)
                progress(len(ids) + len(taken))
    except BaseException:
        say(f"stopped after {len(ids):,} of {len(given):,} jobs; give the file again: an id is taken once")
        raise
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


def _batches(given: list[Given]) -> Iterator[tuple[str, list[NewJob]]]:
    """In order; a request is of one queue."""
    for queue, group in groupby(given, key=lambda one: one.queue):
        jobs = [one.job for one in group]
        for first in range(0, len(jobs), BATCH):
            yield queue, jobs[first : first + BATCH]
