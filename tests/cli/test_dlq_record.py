"""The record of a redrive: named before it is moved, whatever happens in between; and what an undo makes of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from millpond.blocking import Pond
from millpond.errors import Conflict, NotFound
from millpond.model import NewItem, RedriveFilter, Retry
from millpond.triage.choosing import by_filter
from millpond.triage.dead import Chosen, dead_in
from millpond.triage.pace import Pace, read_rate
from millpond.triage.record import Line, Record, Records, batches, groups_of, lines, members
from millpond.triage.redriving import Redrive
from millpond.triage.undoing import Undo
from tests.cli.dead import Place, counts, items, kill, python, settled

pytestmark = pytest.mark.slow  # some start processes of their own

EVERYTHING = RedriveFilter()
AT = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
DOOMED = """\
import os, sys
import millpond
from millpond.model import RedriveFilter
from millpond.triage import choosing, dead, pace, record, redriving, undoing
from datetime import UTC, datetime

now = lambda: datetime.now(UTC)
die = lambda: os.kill(os.getpid(), 9)
data, queue, verb, left = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
records = record.Records(__import__("pathlib").Path(data))
slow = pace.Pace(2.0, lambda: 0.0, lambda seconds: None)  # two items a batch, and no waiting

with millpond.open(data) as pond:
    class Doomed:
        def __getattr__(self, name):
            if name != verb:
                return getattr(pond, name)
            def call(*given, **named):
                global left
                if named.get("dry_run"):
                    return getattr(pond, name)(*given, **named)
                if left == 0:
                    die()
                left -= 1
                done = getattr(pond, name)(*given, **named)
                if left == 0 and sys.argv[5] == "after":
                    die()
                return done
            return call

"""
DOOMED_REDRIVE = (
    DOOMED
    + """\
    lying = dead.dead_in(pond, queue)
    chosen = (lying.chosen(item) for item in choosing.by_filter(pond, lying, RedriveFilter()))
    with records.begin(data, queue, pond.queue_info(queue).incarnation, now(), {"all": True}) as file:
        redriving.Redrive(Doomed(), queue, file, slow, now).run(chosen, lambda done: None)
"""
)
DOOMED_UNDO = (
    DOOMED
    + """\
    story = records.all()[0]
    with records.open(story.header.redrive) as file:
        undoing.Undo(Doomed(), file, story, slow, now, dry_run=False).run(lambda done: None)
"""
)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    data = tmp_path / "pond"
    return Place(tmp_path, data, ("--data", str(data)))


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "here")


@pytest.fixture
def record(records: Records) -> Iterator[Record]:
    with records.begin("/data", "orders", "abc", AT, {"where": "true"}) as begun:
        yield begun


def now() -> datetime:
    return AT


def unhurried() -> Pace:
    """Two items a batch, and no waiting."""
    return Pace(2.0, lambda: 0.0, lambda seconds: None)


# ---- the file -----------------------------------------------------------------------------------------------------


def test_what_was_written_is_read(records: Records, record: Record) -> None:
    chosen = [
        Chosen("a", "orders", "x", "expired"),
        Chosen("b", "orders", "y", "expired"),
        Chosen("c", "o", "z", "r", "e"),
    ]
    record.append(Line(at=AT, batch=groups_of(chosen), targets={"orders": "i1", "o": ""}))
    record.append(Line(done=2, errors={"c": "gone"}))
    record.append(Line(at=AT, ended={"moved": 2}))
    [groups] = batches(record.path)
    assert members(groups) == chosen
    story = records.read(record.redrive)
    assert (story.items, story.moved, story.failed, story.targets) == (3, 2, 1, {"orders": "i1", "o": ""})
    assert (story.header.queue, story.header.why, story.header.at) == ("orders", {"where": "true"}, AT)


def test_a_line_that_is_not_whole_is_not_there_and_is_cut_off_by_who_goes_on(records: Records, record: Record) -> None:
    record.append(Line(batch=groups_of([Chosen("a", "orders", "a", "expired")])))
    record.close()
    with record.path.open("ab") as file:
        file.write(b'{"batch":[{"to":"or')
    assert records.read(record.redrive).items == 1
    with records.open(record.redrive) as again:
        again.append(Line(undone={"buried": 1}))
    assert [line.undone for line in lines(record.path)] == [None, None, {"buried": 1}]


def test_a_record_of_which_nothing_is_whole_is_left_out(records: Records, record: Record) -> None:
    (records.folder / "20260301T120000-abcdef.jsonl").write_bytes(b'{"start":{')
    (records.folder / "notes.txt").write_text("not a record")
    assert [story.header.redrive for story in records.all()] == [record.redrive]
    with pytest.raises(NotFound, match="stopped before it began"):
        records.read("20260301T120000-abcdef")


def test_a_damaged_line_is_named(records: Records, record: Record) -> None:
    record.path.write_bytes(record.path.read_bytes() + b"nonsense\n")
    with pytest.raises(Conflict, match=r"jsonl:2 is damaged"):
        records.read(record.redrive)


def test_a_later_format_is_refused(records: Records, record: Record) -> None:
    record.path.write_bytes(record.path.read_bytes().replace(b'"incarnation"', b'"format":2,"incarnation"'))
    with pytest.raises(Conflict, match="has format 2"):
        records.read(record.redrive)


def test_only_one_works_on_a_record_at_a_time(records: Records, record: Record) -> None:
    assert records.read(record.redrive).status == "running"
    with pytest.raises(Conflict, match="still going on"):
        records.open(record.redrive)
    record.close()
    assert records.read(record.redrive).status == "stopped"
    records.open(record.redrive).close()


def test_a_record_is_for_its_owner_alone(records: Records, record: Record) -> None:
    assert record.path.stat().st_mode & 0o777 == 0o600
    assert records.folder.stat().st_mode & 0o777 == 0o700


# ---- pace ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "rate"), [("500/s", 500.0), ("500", 500.0), ("30/m", 0.5), ("3600/h", 1.0)])
def test_a_rate_is_read(text: str, rate: float) -> None:
    assert read_rate(text) == rate


def test_a_pace_waits_for_those_before() -> None:
    time = 0.0
    slept = []

    def sleep(seconds: float) -> None:
        nonlocal time
        slept.append(seconds)
        time += seconds

    pace = Pace(10.0, lambda: time, sleep)
    assert pace.batch == 10
    pace.step(10)
    pace.step(10)
    time += 0.75
    pace.step(5)
    time += 60.0  # what was not used is not made up for
    pace.step(10)
    pace.step(10)
    assert slept == [1.0, 0.25, 1.0]
    assert (Pace(1e6).batch, Pace(0.1).batch, Pace(None).batch) == (1_000, 1, 1_000)


# ---- crashes ------------------------------------------------------------------------------------------------------


def doomed(place: Place, program: str, queue: str, verb: str, left: int, when: str) -> None:
    ended = python(place, program, str(place.data), queue, verb, str(left), when)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("done", [1, 2])
def test_a_redrive_that_is_killed_leaves_a_record_of_all_that_it_moved(place: Place, done: int, when: str) -> None:
    """`before` the move of a batch that is in the record, or `after` it and before the record says so."""
    with place.open() as pond:
        pond.create_queue("orders")
        ids = kill(pond, "orders", [f"e{number}" for number in range(7)])
    doomed(place, DOOMED_REDRIVE, "orders", "redrive", done, when)
    records = Records(place.data)
    [story] = records.all()
    path = records.folder / f"{story.header.redrive}.jsonl"
    named = [one.id for groups in batches(path) for one in members(groups)]
    moved, tried = 2 * done, 2 * done + 2 * (when == "before")
    assert (story.status, named) == ("stopped", ids[:tried])
    with place.open() as pond:
        assert [item.id for item in items(pond, "orders") if item.state == "ready"] == ids[:moved]
    undone = place.value("undo", story.header.redrive)
    expected = {"buried": moved, "dead": tried - moved}
    assert undone["counts"] == {fate: number for fate, number in expected.items() if number}
    with place.open() as pond:
        assert [(item.state, item.last_error) for item in items(pond, "orders")] == [
            ("dead", f"e{n}") for n in range(7)
        ]


def test_an_undo_that_is_killed_is_gone_on_with(place: Place) -> None:
    with place.open() as pond:
        pond.create_queue("letters")
        pond.create_queue("orders", dead_queue="letters")
        ids = kill(pond, "orders", [f"e{number}" for number in range(6)])
        settled(pond, "letters", {"ready": 6})
    redrive = place.value("redrive", "letters", "--rate", "2000/s")["redrive"]
    with place.open() as pond:
        settled(pond, "orders", {"ready": 6})
    doomed(place, DOOMED_UNDO, "letters", "bury", 3, "after")
    undone = place.value("undo", redrive)["counts"]
    assert undone["buried"] + undone.get("gone", 0) == 6
    with place.open() as pond:
        letters = settled(pond, "letters", {"ready": 6})
    assert sorted((str(item.source_id), str(item.last_error)) for item in letters) == sorted(
        (id, f"e{n}") for n, id in enumerate(ids)
    )


# ---- undo ---------------------------------------------------------------------------------------------------------


def redriven(pond: Pond, records: Records, queue: str) -> str:
    dead = dead_in(pond, queue)
    chosen = (dead.chosen(item) for item in by_filter(pond, dead, EVERYTHING))
    with records.begin("/data", queue, pond.queue_info(queue).incarnation, AT, {"all": True}) as record:
        Redrive(pond, queue, record, unhurried(), now).run(chosen, lambda done: None)
    return record.redrive


def undone(pond: Any, records: Records, redrive: str, *, dry_run: bool = False) -> dict[str, int]:
    with records.open(redrive) as record:
        work = Undo(pond, record, records.read(redrive), unhurried(), now, dry_run=dry_run)
        work.run(lambda done: None)
    return dict(work.counts)


def test_what_still_waits_dies_again_of_what_it_had_died_of_and_the_rest_is_told_apart(
    place: Place, records: Records
) -> None:
    with place.open() as pond:
        pond.create_queue("orders", backoff={"base": 1_000}, completed_retention="1h")
        ids = kill(pond, "orders", ["e0", "e1", "e2", "e3", None, "e5"])
        redrive = redriven(pond, records, "orders")
        [worked_on, finished, failed] = pond.lease("orders", batch=3)
        assert [worked_on.id, finished.id, failed.id] == ids[:3]
        pond.complete([finished])
        pond.retry([Retry(lease=failed.lease, error="another error")])
        pond.cancel("orders", [ids[3]])
        expected = {"leased": 1, "completed": 1, "cancelled": 1}
        assert undone(pond, records, redrive, dry_run=True) == expected | {"waiting": 3}
        assert counts(pond, "orders") == expected | {"retrying": 1, "ready": 2}
        assert undone(pond, records, redrive) == expected | {"buried": 3}
        dead = {item.id: (item.dead_reason, item.last_error) for item in items(pond, "orders") if item.state == "dead"}
    assert dead == {ids[2]: ("rejected", "e2"), ids[4]: ("rejected", None), ids[5]: ("rejected", "e5")}


def test_each_dies_again_of_its_own_reason(place: Place, records: Records) -> None:
    with place.open() as pond:
        pond.create_queue("orders", max_attempts=1)
        [rejected] = kill(pond, "orders", ["no"])
        [made] = pond.produce("orders", [b"a"])
        pond.retry([Retry(lease=pond.lease("orders")[0].lease, error="failed")])
        [late] = pond.produce("orders", [NewItem(payload=b"b", expire_timeout="1ms")])
        settled(pond, "orders", {"dead": 3})
        redrive = redriven(pond, records, "orders")
        assert undone(pond, records, redrive) == {"buried": 3}
        reasons = {item.id: item.dead_reason for item in items(pond, "orders")}
    assert reasons == {rejected: "rejected", made.id: "max_attempts", late.id: "expired"}


def test_letters_go_back_to_the_dead_queue(place: Place, records: Records) -> None:
    with place.open() as pond:
        pond.create_queue("letters")
        pond.create_queue("orders", dead_queue="letters")
        ids = kill(pond, "orders", ["e0", "e1", "e2"])
        settled(pond, "letters", {"ready": 3})
        redrive = redriven(pond, records, "letters")  # and undone while some may still be on their way
        assert undone(pond, records, redrive) == {"buried": 3}
        letters = settled(pond, "letters", {"ready": 3})
        assert items(pond, "orders") == []
    assert [(one.source_id, one.last_error, one.dead_reason) for one in letters] == [
        (id, f"e{number}", "rejected") for number, id in enumerate(ids)
    ]


def test_one_that_lost_its_id_to_another_is_found_by_where_it_came_from(place: Place, records: Records) -> None:
    with place.open() as pond:
        pond.create_queue("letters")
        pond.create_queue("orders", dead_queue="letters", dedup_window="1ms")
        for number in range(2):
            [made] = pond.produce("orders", [NewItem(payload=b"%d" % number, id="x")])
            assert not made.duplicate
            pond.retry([Retry(lease=pond.lease("orders")[0].lease, dead=True, error=f"e{number}")])
            settled(pond, "letters", {"ready": number + 1})
        redrive = redriven(pond, records, "letters")
        settled(pond, "orders", {"ready": 2})
        assert undone(pond, records, redrive, dry_run=True) == {"waiting": 2}
        assert undone(pond, records, redrive) == {"buried": 2}
        letters = settled(pond, "letters", {"ready": 2})
    assert sorted((one.payload, str(one.last_error)) for one in letters) == [(b"0", "e0"), (b"1", "e1")]


def test_an_undo_is_done_once(place: Place) -> None:
    with place.open() as pond:
        pond.create_queue("orders")
        kill(pond, "orders", ["e0", "e1"])
    redrive = place.value("redrive", "orders")["redrive"]
    first = place.value("undo", redrive)
    assert (first["again"], first["counts"]) == (False, {"buried": 2})
    assert place.value("redrive", "orders")["moved"] == 2
    again = place.value("undo", redrive)
    assert (again["again"], again["counts"]) == (True, {"buried": 2})
    with place.open() as pond:
        assert counts(pond, "orders") == {"ready": 2}
    assert [story["status"] for story in place.value("redrives")] == ["done", "undone"]


def test_a_queue_that_deletes_its_dead_by_now_is_not_touched(place: Place, records: Records) -> None:
    with place.open() as pond:
        pond.create_queue("orders")
        kill(pond, "orders", ["e0"])
        redrive = redriven(pond, records, "orders")
        pond.update_queue("orders", dead="delete")
        with pytest.raises(Conflict, match="an undo would delete them"):
            undone(pond, records, redrive)
        assert counts(pond, "orders") == {"ready": 1}


def test_a_redrive_of_another_pond_is_refused(place: Place, records: Records, tmp_path: Path) -> None:
    with place.open() as pond:
        pond.create_queue("orders")
        kill(pond, "orders", ["e0"], id="mine")
        redrive = redriven(pond, records, "orders")
        pond.delete_queue("orders", force=True)
        pond.create_queue("orders")
        pond.produce("orders", [NewItem(payload=b"another", id="mine")])
        with pytest.raises(NotFound, match=r"was made in /data, and its queues are not here"):
            undone(pond, records, redrive)
        assert counts(pond, "orders") == {"ready": 1}


def test_a_letter_that_somebody_has_leased_is_told_and_left(place: Place, records: Records) -> None:
    with place.open() as pond:
        pond.create_queue("letters")
        pond.create_queue("orders", dead_queue="letters")
        kill(pond, "orders", ["e0", "e1"])
        letters = settled(pond, "letters", {"ready": 2})
        dead = dead_in(pond, "letters")
        with records.begin("/data", "letters", pond.queue_info("letters").incarnation, AT, {}) as record:
            chosen = [dead.chosen(item) for item in letters]
            targets = {"orders": pond.queue_info("orders").incarnation}
            record.append(Line(at=AT, batch=groups_of(chosen), targets=targets))  # and no further
        [held] = pond.lease("letters")
        assert undone(pond, records, record.redrive) == {"leased": 1, "dead": 1}
        held.complete()


def test_a_letter_whose_queue_was_gone_never_left(place: Place, records: Records) -> None:
    with place.open() as pond:
        pond.create_queue("letters")
        pond.create_queue("orders", dead_queue="letters")
        kill(pond, "orders", ["e0"])
        settled(pond, "letters", {"ready": 1})
        pond.delete_queue("orders", force=True)
        redrive = redriven(pond, records, "letters")
        assert undone(pond, records, redrive) == {"dead": 1}
