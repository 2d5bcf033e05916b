"""`millpond dlq redrive`, `redrives` and `undo`: many items at a time, each named in a record before it is moved."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments
from millpond.cli.output import DONE, FAILED, NOT_FOUND, print_json, print_table, say
from millpond.cli.pond import data_of, open_for_spark, open_pond, server_of
from millpond.cli.progress import Progress
from millpond.cli.text import first_line

if TYPE_CHECKING:
    from millpond.blocking import Pond
    from millpond.client import Client
    from millpond.model import ErrorInfo, Item
    from millpond.spark.triage import Match
    from millpond.triage.choosing import Look
    from millpond.triage.dead import Chosen, Dead
    from millpond.triage.record import Story
    from millpond.triage.redriving import Outcome

ALIKE_SHOWN = 20  # of what most of them died
SAMPLE_SHOWN = 10
ERRORS_SHOWN = 10  # of the items that could not go back
SOURCE_RETRY = "30s"  # how long Spark's tasks wait for a server that is away
SPARK = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}  # in a minute nothing better pays its compiling
NO_SPARK = (
    "--where needs Spark ({}); install millpond[spark], or choose with --reason, --kind, --from, --error-contains"
)

FATES = {
    "buried": "dead again",
    "dead": "were dead: they never left, or have died again",
    "waiting": "wait, and would die again",
    "leased": "leased: somebody works on them",
    "gone": "gone: completed, most likely",
}


def _now() -> datetime:
    return datetime.now(UTC)


# ---- redrive ------------------------------------------------------------------------------------------------------


def redrive(asked: Arguments) -> int:
    _check(asked)
    if asked.where is not None:
        return _redrive_where(asked)
    from millpond.model import RedriveFilter
    from millpond.triage.choosing import by_filter, by_ids, look
    from millpond.triage.dead import dead_in

    with open_pond(asked, listen=True) as pond:
        dead = dead_in(pond, asked.queue)
        errors: dict[str, ErrorInfo] = {}
        items: Iterator[Item]
        total: int | None  # None: that takes a look at them all
        if asked.ids:
            found, errors = by_ids(pond, dead, asked.ids)
            items, total = iter(found), len(found)
        else:
            chosen = RedriveFilter(
                source_queue=asked.source, dead_reason=asked.reason, kind=asked.kind, error_contains=asked.error
            )
            items, total = by_filter(pond, dead, chosen), None if _filters(asked) else dead.count
        found_chosen = (dead.chosen(item) for item in items)
        if asked.dry_run:
            return _show_look(asked, dead, look(found_chosen, alike=ALIKE_SHOWN, sample=SAMPLE_SHOWN), errors)
        return _move(asked, pond, found_chosen, total, errors)


def _check(asked: Arguments) -> None:
    """A choice that would not count is refused."""
    from millpond.errors import InvalidRequest
    from millpond.triage.pace import read_rate

    ways = ["ids"] * bool(asked.ids) + ["--where"] * (asked.where is not None) + [", ".join(_filters(asked))]
    if len(list(filter(None, ways))) > 1:
        raise InvalidRequest(
            f"{' and '.join(filter(None, ways))} do not go together; choose by one, or say it in --where"
        )
    if asked.rate is not None:
        read_rate(asked.rate)


def _filters(asked: Arguments) -> dict[str, str]:
    given = {"--reason": asked.reason, "--kind": asked.kind, "--from": asked.source, "--error-contains": asked.error}
    return {name: value for name, value in given.items() if value is not None}


def _why(asked: Arguments) -> dict[str, Any]:
    if asked.where is not None:
        return {"where": asked.where}
    if asked.ids:
        return {"ids": len(asked.ids)}
    return {name.removeprefix("--"): value for name, value in _filters(asked).items()} or {"all": True}


def _move(
    asked: Arguments, pond: Pond | Client, chosen: Iterator[Chosen], total: int | None, errors: Mapping[str, ErrorInfo]
) -> int:
    from millpond.triage.pace import Pace, read_rate
    from millpond.triage.record import Records
    from millpond.triage.redriving import Outcome, Redrive

    outcome, name = Outcome(), None
    first = next(chosen, None)
    if first is not None:
        incarnation = pond.queue_info(asked.queue).incarnation
        pace = Pace(None if asked.rate is None else read_rate(asked.rate))
        with Records(data_of(asked)).begin(_place(asked), asked.queue, incarnation, _now(), _why(asked)) as record:
            name = record.redrive
            work = Redrive(pond, asked.queue, record, pace, _now)
            try:
                with Progress(total, "redriven") as progress:
                    work.run(chain([first], chosen), progress)
            except BaseException:
                say(f"stopped after {work.outcome.moved:,} items; `millpond dlq undo {name}` takes them back")
                raise
            outcome = work.outcome
    return _show_outcome(asked, name, outcome, errors)


def _place(asked: Arguments) -> str:
    return server_of(asked) or str(data_of(asked))


def _show_outcome(asked: Arguments, name: str | None, outcome: Outcome, errors: Mapping[str, ErrorInfo]) -> int:
    failed = outcome.failed.total() + len(errors)
    errors = {**errors, **outcome.errors}
    if asked.json:
        print_json(
            {
                "queue": asked.queue,
                "redrive": name,
                "dry_run": False,
                "matched": outcome.chosen,
                "moved": outcome.moved,
                "failed": failed,
                "errors": errors,
            }
        )
    elif name is not None:
        counts = map(str, (outcome.chosen, outcome.moved, failed))
        print_table(["REDRIVE", "MATCHED", "MOVED", "FAILED"], [[name, *counts]])
    elif not failed:
        say(f"nothing that is dead in {asked.queue} is meant by that")
    _say_errors(errors, failed)
    if name is not None and not asked.json:
        say(f"undo it with `millpond dlq undo {name}{_flags(asked)}`")
    return _code(outcome.moved, failed, errors)


def _flags(asked: Arguments) -> str:
    """The flags that say where, as they were given."""
    given = (("--server", asked.server), ("--config", asked.config), ("--data", asked.data))
    return "".join(f" {flag} {shlex.quote(str(value))}" for flag, value in given if value is not None)


def _say_errors(errors: Mapping[str, ErrorInfo], failed: int) -> None:
    shown = list(errors.values())[:ERRORS_SHOWN]
    for error in shown:
        say(f"millpond: {error.message}")
    if failed > len(shown):
        say(f"millpond: {failed - len(shown):,} more could not go back: gone since they were chosen, or as above")


def _code(moved: int, failed: int, errors: Mapping[str, ErrorInfo]) -> int:
    if not failed:
        return DONE
    return NOT_FOUND if not moved and all(error.code == "not_found" for error in errors.values()) else FAILED


def _show_look(asked: Arguments, dead: Dead, seen: Look, errors: Mapping[str, ErrorInfo] | None = None) -> int:
    errors = errors or {}
    if asked.json:
        print_json(
            {
                "queue": asked.queue,
                "redrive": None,
                "dry_run": True,
                "matched": seen.matched,
                "dead": dead.count,
                "signatures": seen.alike,
                "sample": seen.sample,
                "errors": errors,
            }
        )
    else:
        print(f"{seen.matched:,} of the {dead.count:,} dead items of {asked.queue} would be redriven")
        if seen.matched:
            print()
            rows = [[str(one.items), one.reason, first_line(one.signature)] for one in seen.alike]
            print_table(["ITEMS", "REASON", "SIGNATURE"], rows)
            print()
            rows = [[one.id, one.to, one.reason, first_line(one.error)] for one in seen.sample]
            print_table(["FOR EXAMPLE", "TO", "REASON", "ERROR"], rows)
    _say_errors(errors, len(errors))
    return _code(seen.matched, len(errors), errors)


# ---- by SQL -------------------------------------------------------------------------------------------------------


def _redrive_where(asked: Arguments) -> int:
    from millpond.errors import InvalidRequest
    from millpond.triage.choosing import Alike, Look
    from millpond.triage.dead import dead_in

    try:
        from millpond.spark.triage import Matches, dead_table, quiet_session
    except ModuleNotFoundError as error:
        raise InvalidRequest(NO_SPARK.format(error)) from error
    with open_for_spark(asked) as (pond, options):
        dead = dead_in(pond, asked.queue)
        if not dead.count:
            return _show_look(asked, dead, Look(0, [], [])) if asked.dry_run else _move(asked, pond, iter(()), 0, {})
        say(f"looking at {dead.count:,} dead items with Spark")
        with quiet_session("millpond dlq redrive", **SPARK) as spark:
            reading = options | {"queue": dead.queue, "retryFor": SOURCE_RETRY}
            table = dead_table(spark, reading, letters=dead.letters)
            with Matches(table, asked.where, letters=dead.letters) as matches:
                if not asked.dry_run:
                    return _move(asked, pond, _chosen(matches, dead), matches.count, {})
                alike = [Alike(*one) for one in matches.signatures(ALIKE_SHOWN)]
                sample = list(_chosen(matches.sample(SAMPLE_SHOWN), dead))
                return _show_look(asked, dead, Look(matches.count, alike, sample))


def _chosen(matches: Iterable[Match], dead: Dead) -> Iterator[Chosen]:
    from millpond.triage.dead import Chosen

    for one in matches:
        yield Chosen(one.id, one.to or dead.queue, one.to_id or one.id, one.reason, one.error)


# ---- records ------------------------------------------------------------------------------------------------------


def redrives(asked: Arguments) -> int:
    from millpond.triage.record import Records

    records = Records(data_of(asked))
    stories = records.all()
    if asked.json:
        print_json([_story(one) for one in stories])
    elif stories:
        rows = [
            [one.header.redrive, one.header.queue, str(one.items), str(one.moved), one.status, _reasons(one)]
            for one in stories
        ]
        print_table(["REDRIVE", "QUEUE", "ITEMS", "MOVED", "STATUS", "WHY"], rows)
    else:
        say(f"there are no redrives in {records.folder}")
    return DONE


def _reasons(story: Story) -> str:
    return first_line(", ".join(f"{name}: {value}" for name, value in story.header.why.items()))


def _story(story: Story) -> dict[str, Any]:
    header = story.header
    return {
        "redrive": header.redrive,
        "queue": header.queue,
        "place": header.place,
        "at": header.at,
        "why": header.why,
        "items": story.items,
        "moved": story.moved,
        "failed": story.failed,
        "status": story.status,
        "undone": dict(story.undone),
    }


def undo(asked: Arguments) -> int:
    from millpond.triage.pace import Pace, read_rate
    from millpond.triage.record import Records
    from millpond.triage.undoing import Undo

    pace = Pace(None if asked.rate is None else read_rate(asked.rate))
    records = Records(data_of(asked))
    story = records.read(asked.redrive)
    if story.undo_ended_at is None:
        with records.open(asked.redrive) as record, open_pond(asked, listen=True) as pond:
            work = Undo(pond, record, story, pace, _now, dry_run=asked.dry_run)
            try:
                with Progress(story.items, "looked at" if asked.dry_run else "undone") as progress:
                    work.run(progress)
            except KeyboardInterrupt:
                say(f"stopped; `millpond dlq undo {asked.redrive}` goes on from here")
                raise
            counts = work.counts
    else:
        say(f"redrive {asked.redrive} was undone at {story.undo_ended_at:%Y-%m-%d %H:%M:%S} UTC; this is what it did")
        counts = story.undone
    if asked.json:
        again = story.undo_ended_at is not None
        undone = {"redrive": asked.redrive, "queue": story.header.queue, "items": story.items}
        print_json(undone | {"dry_run": asked.dry_run, "again": again, "counts": dict(counts)})
    else:
        rows = [[str(count), FATES.get(fate, fate)] for fate, count in counts.most_common()]
        print_table(["ITEMS", "WHAT BECAME OF THEM"], rows)
    return DONE
