"""`millpond dlq` as a process, on a data directory and on a server: looking, redriving, purging."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from millpond.cli.dlq import REASONS
from millpond.model import DeadReason
from tests.cli.dead import Place, counts, items, kill, python, run, settled
from tests.server.process import serve

pytestmark = pytest.mark.slow  # each starts processes of its own

ERRORS = ("timeout after 3 s", "timeout after 5 s", "bad amount '7'", None)


@pytest.fixture(params=["directory", "server"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    data = tmp_path / "pond"
    if request.param == "directory":
        yield Place(tmp_path, data, ("--data", str(data)))
        return
    with serve(data) as server:
        yield Place(tmp_path, data, ("--server", server.url))


@pytest.fixture
def alone(tmp_path: Path) -> Place:
    """For what is the same wherever the pond is."""
    data = tmp_path / "pond"
    return Place(tmp_path, data, ("--data", str(data)))


def with_dead_in_place(place: Place) -> list[str]:
    with place.open() as pond:
        pond.create_queue("orders")
        return kill(pond, "orders", ERRORS, kind="mail")


def with_letters(place: Place) -> list[str]:
    """Their ids in the dead queue, in order; one item that is no letter waits there too."""
    with place.open() as pond:
        pond.create_queue("letters")
        pond.create_queue("orders", dead_queue="letters")
        pond.produce("letters", [b"no letter"])
        kill(pond, "orders", ERRORS)
        return [item.id for item in settled(pond, "letters", {"ready": 5}) if item.source_queue]


# ---- looking ------------------------------------------------------------------------------------------------------


def test_the_queues_with_dead_items_are_listed(place: Place) -> None:
    with place.open() as pond:
        pond.create_queue("healthy")
        pond.produce("healthy", [b"a"])
    with_letters(place)
    with place.open() as pond:
        pond.create_queue("other")
        kill(pond, "other", ["boom"])
    found = {one["queue"]: (one["dead"], one["letters"]) for one in place.value("list", "--queues")}
    assert found == {"other": (1, False), "letters": (5, True)}
    shown = place.run("list", "--queues")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["QUEUE", "letters", "other"]
    told = place.run("list")
    assert (told.returncode, told.stdout) == (0, "")
    assert "no job is dead" in told.stderr
    assert "1 dead item in other: `millpond dlq list other`" in told.stderr


def test_dead_items_are_listed_with_what_they_died_of(place: Place) -> None:
    ids = with_dead_in_place(place)
    listed = place.value("list", "orders")
    assert [(one["id"], one["dead_reason"], one.get("last_error")) for one in listed] == [
        (id, "rejected", error) for id, error in zip(ids, ERRORS, strict=True)
    ]
    some = place.run("list", "orders", "--limit", "2")
    assert [line.split()[0] for line in some.stdout.splitlines()] == ["ID", *ids[:2]]
    assert "there are more; see them with --limit 4" in some.stderr


def test_letters_are_listed_without_what_else_waits_beside_them(place: Place) -> None:
    ids = with_letters(place)
    listed = place.value("list", "letters")
    assert [one["id"] for one in listed] == ids
    assert {one["source_queue"] for one in listed} == {"orders"}


def test_a_dead_item_is_shown_with_its_payload(alone: Place) -> None:
    with alone.open() as pond:
        pond.create_queue("orders")
        [text] = kill(pond, "orders", ["first line\nsecond line"])
        pond.produce("orders", [b"\xff\x00"])
        [item] = pond.lease("orders")
        item.retry("boom", dead=True)
        pond.produce("orders", [b"alive"])
        [alive] = [one for one in items(pond, "orders") if one.state == "ready"]
    shown = alone.value("show", "orders", text)
    assert (shown["text"], shown["last_error"]) == ('{"n": 0}', "first line\nsecond line")
    assert alone.value("show", "orders", item.id)["bytes"] == "/wA="
    assert ["id", text] in [line.split() for line in alone.run("show", "orders", text).stdout.splitlines()]
    refused = alone.run("show", "orders", alive.id)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "is ready, not dead" in refused.stderr
    assert alone.run("show", "orders", "unknown").returncode == 3


def test_nothing_dead_is_no_error(alone: Place) -> None:
    with alone.open() as pond:
        pond.create_queue("orders")
    for arguments in (["list"], ["list", "orders"], ["redrive", "orders"], ["redrive", "orders", "--where", "true"]):
        ended = alone.run(*arguments)
        assert (ended.returncode, ended.stdout) == (0, ""), ended
    assert alone.value("redrive", "orders")["redrive"] is None
    assert not (alone.data / "redrives").exists()


# ---- redrive ------------------------------------------------------------------------------------------------------


def test_all_that_is_dead_comes_back(place: Place) -> None:
    ids = with_dead_in_place(place)
    done = place.value("redrive", "orders")
    assert (done["matched"], done["moved"], done["failed"]) == (4, 4, 0)
    with place.open() as pond:
        assert [(item.id, item.state) for item in items(pond, "orders")] == [(id, "ready") for id in ids]
    [story] = place.value("redrives")
    assert (story["redrive"], story["status"], story["moved"]) == (done["redrive"], "done", 4)


def test_letters_come_back_to_their_queue_and_leave_what_is_no_letter(place: Place) -> None:
    with_letters(place)
    assert place.value("redrive", "letters")["moved"] == 4
    with place.open() as pond:
        settled(pond, "orders", {"ready": 4})
        assert [item.payload for item in items(pond, "letters")] == [b"no letter"]


def test_items_are_chosen_by_id(alone: Place) -> None:
    ids = with_dead_in_place(alone)
    done = alone.value("redrive", "orders", ids[2], ids[2], "unknown", code=1)
    assert (done["moved"], done["failed"], done["errors"]["unknown"]["code"]) == (1, 1, "not_found")
    with alone.open() as pond:
        assert [item.id for item in items(pond, "orders") if item.state == "ready"] == [ids[2]]
    alive = alone.run("redrive", "orders", ids[2])
    assert (alive.returncode, "is ready, not dead" in alive.stderr) == (1, True)
    assert alone.run("redrive", "orders", "unknown").returncode == 3


@pytest.mark.parametrize(
    ("flags", "errors"),
    [
        (["--error-contains", "timeout"], ERRORS[:2]),
        (["--kind", "mail", "--reason", "rejected"], ERRORS),
        (["--reason", "expired"], ()),
        (["--from", "orders"], ()),
    ],
)
def test_items_are_chosen_by_what_the_engine_can_filter(
    alone: Place, flags: list[str], errors: tuple[str | None, ...]
) -> None:
    with_dead_in_place(alone)
    assert alone.value("redrive", "orders", *flags)["moved"] == len(errors)
    with alone.open() as pond:
        assert [item.last_error for item in items(pond, "orders") if item.state == "ready"] == list(errors)


def test_letters_are_chosen_by_their_queue(alone: Place) -> None:
    with_letters(alone)
    with alone.open() as pond:
        pond.create_queue("invoices", dead_queue="letters")
        kill(pond, "invoices", ["late"])
        settled(pond, "letters", {"ready": 6})
    assert alone.value("redrive", "letters", "--from", "invoices")["moved"] == 1


def test_a_dry_run_tells_of_what_they_died_and_changes_nothing(place: Place) -> None:
    with_dead_in_place(place)
    seen = place.value("redrive", "orders", "--dry-run")
    assert (seen["matched"], seen["dead"], seen["redrive"]) == (4, 4, None)
    told = [(one["items"], one["reason"], one["signature"]) for one in seen["signatures"]]
    assert told[0] == (2, "rejected", "timeout after <n> s")
    assert set(told[1:]) == {(1, "rejected", "bad amount <text>"), (1, "rejected", None)}
    assert [one["error"] for one in seen["sample"]] == list(ERRORS)
    with place.open() as pond:
        assert counts(pond, "orders") == {"dead": 4}
    assert place.value("redrives") == []


def test_a_letter_whose_queue_is_gone_stays_and_is_told(alone: Place) -> None:
    with_letters(alone)
    with alone.open() as pond:
        pond.delete_queue("orders", force=True)
    failed = alone.run("redrive", "letters")
    assert failed.returncode == 3
    assert "queue 'orders' is gone; create it to take the item back" in failed.stderr
    with alone.open() as pond:
        assert counts(pond, "letters") == {"ready": 5}


def test_a_redrive_keeps_to_its_rate(alone: Place) -> None:
    with_dead_in_place(alone)
    begun = monotonic()
    assert alone.value("redrive", "orders", "--rate", "2/s")["moved"] == 4
    assert monotonic() - begun > 1.0  # two at once, and two a second later


def test_a_redrive_is_undone(place: Place) -> None:
    ids = with_dead_in_place(place)
    redrive = place.value("redrive", "orders")["redrive"]
    with place.open() as pond:
        [leased] = pond.lease("orders")
        assert place.value("undo", redrive, "--dry-run")["counts"] == {"leased": 1, "waiting": 3}
        assert place.value("undo", redrive, "--rate", "1000/s")["counts"] == {"leased": 1, "buried": 3}
        dead = [item for item in items(pond, "orders") if item.state == "dead"]
        leased.complete()
    assert [(item.id, item.last_error) for item in dead] == list(zip(ids[1:], ERRORS[1:], strict=True))
    again = place.run("undo", redrive)
    assert (again.returncode, "was undone at" in again.stderr) == (0, True)
    shown = [line.split(maxsplit=1) for line in again.stdout.splitlines()[1:]]
    assert shown == [["3", "dead again"], ["1", "leased: somebody works on them"]]


def test_a_directory_that_a_server_owns_is_worked_on_through_it(alone: Place) -> None:
    with serve(alone.data):
        with_dead_in_place(alone)
        redrive = alone.value("redrive", "orders")["redrive"]
        assert alone.value("undo", redrive)["counts"] == {"buried": 4}


# ---- purge --------------------------------------------------------------------------------------------------------


def test_a_purge_removes_the_dead_for_good(place: Place) -> None:
    with_dead_in_place(place)
    with place.open() as pond:
        pond.produce("orders", [b"alive"])
    assert place.value("purge", "orders", "--yes") == {"queue": "orders", "removed": 4}
    with place.open() as pond:
        assert [item.payload for item in items(pond, "orders")] == [b"alive"]


def test_a_purge_of_letters_leaves_what_is_no_letter(alone: Place) -> None:
    with_letters(alone)
    with alone.open() as pond:
        [letter] = [item for item in pond.lease("letters", batch=2) if item.source_queue]
        letter.retry("hopeless", dead=True)
    with alone.open() as pond:
        settled(pond, "letters", {"dead": 1, "ready": 3, "leased": 1})
    assert alone.value("purge", "letters", "--yes")["removed"] == 4
    with alone.open() as pond:
        assert [item.payload for item in items(pond, "letters")] == [b"no letter"]


def test_a_purge_that_nobody_agreed_to_removes_nothing(alone: Place) -> None:
    with_dead_in_place(alone)
    refused = alone.run("purge", "orders")
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    with alone.open() as pond:
        assert counts(pond, "orders") == {"dead": 4}


# ---- what is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["list", "nope"], 3, "there is no queue 'nope'"),
        (["show", "nope", "x"], 3, "there is no queue 'nope'"),
        (["redrive", "nope"], 3, "there is no queue 'nope'"),
        (["redrive", "nope", "--where", "true"], 3, "there is no queue 'nope'"),
        (["purge", "nope", "--yes"], 3, "there is no queue 'nope'"),
        (["undo", "20260101T000000-000000"], 3, "there is no redrive '20260101T000000-000000'"),
        (["undo", "../../etc/passwd"], 3, "there is no redrive"),
        (["list", "orders", "--limit", "0"], 2, "--limit is 0"),
        (["redrive", "orders", "--rate", "fast"], 2, "--rate is 'fast'; give items a second above 0, such as 500/s"),
        (["redrive", "orders", "--rate", "0"], 2, "--rate is '0'"),
        (["redrive", "orders", "--reason", "boredom"], 2, "max_attempts"),
        (["redrive", "orders", "x", "--where", "true"], 2, "ids and --where do not go together"),
        (["redrive", "orders", "--kind", "a", "--where", "true"], 2, "--where and --kind do not go together"),
        (["redrive", "orders", "x", "--from", "a", "--kind", "b"], 2, "ids and --kind, --from do not go together"),
        (["bury"], 2, "redrive"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(alone: Place, arguments: list[str], code: int, words: str) -> None:
    with alone.open() as pond:
        pond.create_queue("orders")
    ended = alone.run(*arguments)
    assert (ended.returncode, ended.stdout) == (code, ""), ended
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_place_that_is_not_there_is_told(tmp_path: Path) -> None:
    for flags, code in ((["--data", "nope"], 3), (["--server", "http://127.0.0.1:9"], 4)):
        for arguments in (["list"], ["redrive", "orders"], ["redrive", "orders", "--where", "true"]):
            ended = run(tmp_path, "dlq", *arguments, *flags)
            assert (ended.returncode, ended.stdout) == (code, ""), ended
            assert len(ended.stderr.splitlines()) == 1


def test_a_predicate_without_spark_says_what_to_install(alone: Place) -> None:
    with_dead_in_place(alone)
    program = "import sys; sys.modules['pyspark'] = None; from millpond.cli.main import main; sys.exit(main())"
    ended = python(alone, program, "dlq", "redrive", "orders", "--where", "true", *alone.flags)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "install millpond[spark], or choose with --reason" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_reasons_are_those_of_the_model() -> None:
    assert set(REASONS) == {str(reason) for reason in DeadReason}
