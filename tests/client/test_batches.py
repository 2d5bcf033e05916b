"""Claims, stages and the journal by both clients, by a pond and by a pond's guest: the same calls, the same answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import NewItem
from millpond.errors import BatchTooLarge, ClaimFinished, Fenced, InvalidRequest, NotFound
from millpond.model import Claim, ClaimEnded, ClaimPart, JournalPage, Published, Staged, State, Verdict
from tests.client.conftest import Blocked
from tests.client.scripted import Step, cut, refusal, reply, reset, scripted
from tests.client.served import Served

Make = Callable[..., Any]


@pytest.fixture(params=["client", "client in JSON", "async client", "async client in JSON", "pond", "guest"])
def api(request: pytest.FixtureRequest, server: Served, tmp_path: Path) -> Iterator[Any]:
    """Whoever has the operations."""
    with ExitStack() as opened:
        kind: str = request.param
        if "client" in kind:
            make: Any = Blocked if "async" in kind else millpond.Client
            yield opened.enter_context(make(server.url, encoding="json" if "JSON" in kind else "msgpack"))
        else:
            owner = opened.enter_context(millpond.open(tmp_path))
            yield owner if kind == "pond" else opened.enter_context(millpond.open(tmp_path))


@pytest.fixture
def name(api: Any, queue: str) -> str:
    if not api.list_queues(prefix=queue).queues:  # a pond's own
        api.create_queue(queue)
    return queue


def read(api: Any, queue: str, claim_id: str, **options: Any) -> list[Any]:
    """All pages of a part."""
    page = api.read_claim(queue, claim_id, **options)
    items = list(page.items)
    while page.next is not None:
        page = api.read_claim(queue, claim_id, after=page.next, **options)
        items += page.items
    return items


def test_a_claims_life(api: Any, name: str) -> None:
    produced = api.produce(name, [b"\x00\xff", "tëxt", NewItem(payload=b"own", id="mine", kind="k"), b"last"])
    claim = api.claim(name, "c", max_items=3, owner="me")
    assert (claim.items, claim.parts, claim.owner, claim.status) == (3, [ClaimPart(0, 3)], "me", "open")
    assert api.claim(name, "c", wait=timedelta(seconds=1)) == claim
    assert list(api.list_claims(name)) == [claim]
    items = read(api, name, "c", limit=2)
    assert [item.payload for item in items] == [b"\x00\xff", "tëxt".encode(), b"own"]
    assert [item.id for item in items] == [one.id for one in produced[:3]]
    assert {item.state for item in items} == {State.CLAIMED}
    assert (items[2].kind, items[0].created_at.tzinfo is not None) == ("k", True)
    verdicts = [
        Verdict(id="mine", verdict="retry", error="busy", delay=timedelta(hours=1)),
        Verdict(id="x", verdict="dead"),
    ]
    assert [result.ok for result in api.give_verdicts(name, "c", verdicts)] == [True, False]
    assert api.complete_claim(name, "c") == ClaimEnded("c", 2, retried=1)
    assert api.complete_claim(name, "c").items == 0
    assert api.get_item(name, "mine").last_error == "busy"
    with pytest.raises(ClaimFinished):
        api.claim(name, "c")


def test_a_released_claim(api: Any, name: str) -> None:
    api.produce(name, [b"x", b"y"])
    api.claim(name, "c")
    assert api.release_claim(name, "c") == ClaimEnded("c", 2)
    for call in (api.read_claim, api.release_claim):
        with pytest.raises(NotFound):
            call(name, "c")
    assert api.stats(name).counts[State.READY] == 2


def test_a_claim_of_nothing(api: Any, name: str) -> None:
    assert api.claim(name, "c", wait="1ms").items == 0
    assert list(api.list_claims(name)) == []


def test_a_consumer_is_fenced_off_by_the_next(api: Any, name: str) -> None:
    api.produce(name, [b"x", b"y"])
    old, new = api.open_consumer(name, "nightly"), api.open_consumer(name, "nightly")
    assert (new.consumer, new.last_completed) == ("nightly", 0)
    with pytest.raises(Fenced):
        api.claim(name, "nightly:1", epoch=old.epoch)
    api.claim(name, "nightly:1", epoch=new.epoch, parts=2)
    assert [len(read(api, name, "nightly:1", part=part, epoch=new.epoch)) for part in (0, 1)] == [1, 1]
    assert api.complete_claim(name, "nightly:1", epoch=new.epoch).items == 2


def test_a_transactions_life(api: Any, name: str) -> None:
    assert api.stage(name, "import:1", "a", [b"\xff", "two"]) == Staged(2)
    assert api.stage(name, "import:1", "b", [NewItem(payload=b"three", kind="k")]) == Staged(1)
    assert api.stats(name).counts[State.READY] == 0
    assert api.publish_stage(name, "import:1", ["a", "b"]) == Published("import:1", 3)
    assert api.publish_stage(name, "import:1", ["a", "b"]) == Published("import:1", 0, again=True)
    assert [item.payload for item in api.list_items(name).items] == [b"\xff", b"two", b"three"]
    assert api.stage(name, "import:2", "a", [b"x"]) == Staged(1)
    assert api.abort_stage(name, "import:2") == Staged(1)
    assert api.publish_stage(name, "import:3", []) == Published("import:3", 0)


def test_the_journal_is_read_as_bytes(api: Any, name: str) -> None:
    api.produce(name, [b"x"])
    api.produce(name, [b"y"])
    page = api.read_journal(name, limit=1)
    assert isinstance(page, JournalPage)
    assert isinstance(page.rows[0].events, bytes)
    rest = api.read_journal(name, partition=0, after=page.rows[0].turn, limit=1_000)
    assert rest.rows[-1].turn == rest.last_turn
    assert rest.incarnation == api.queue_info(name).incarnation


def test_a_list_stops_at_a_number(api: Any, name: str) -> None:
    api.produce(name, [b"x", b"y"])
    last = api.stats(name).partitions[0].last_number
    api.produce(name, [b"z"])
    assert len(api.list_items(name, partition=0, until=last).items) == 2


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "stage a bare payload": (("t", "c", b"x"), {}),
    "stage nothing": (("t", "c", []), {}),
    "stage a number": (("t", "c", [5]), {}),
    "stage with no name": (("", "c", [b"x"]), {}),
    "publish_stage a bare name": (("t", "c"), {}),
    "give_verdicts of a bare one": (("c", Verdict(id="x", verdict="dead")), {}),
    "give_verdicts of none": (("c", []), {}),
    "give_verdicts of a string": (("c", ["dead"]), {}),
    "claim for a vague time": (("c",), {"wait": "soon"}),
    "claim nothing": (("c",), {"max_items": 0}),
    "read_claim from no cursor": (("c",), {"after": "there"}),
    "read_journal of less than nothing": ((), {"after": -1}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(api: Any, name: str, case: str) -> None:
    args, options = WRONG[case]
    with pytest.raises(InvalidRequest):
        getattr(api, case.split()[0])(name, *args, **options)


def test_too_large_a_chunk_is_refused(api: Any, name: str) -> None:
    with pytest.raises(BatchTooLarge):
        api.stage(name, "t", "c", [b""] * 10_001)


# ---- lost replies -----------------------------------------------------------------------------------------

ENDED = reply({"claim_id": "c", "items": 0})


@pytest.mark.parametrize(
    ("call", "args", "answer"),
    [
        ("open_consumer", ("q", "c"), reply({"consumer": "c", "epoch": 2, "last_completed": 0})),
        ("claim", ("q", "c"), ENDED),
        ("read_claim", ("q", "c"), reply({"items": []})),
        ("give_verdicts", ("q", "c", [Verdict(id="i", verdict="dead")]), reply({"results": [{"ok": True}]})),
        ("complete_claim", ("q", "c"), ENDED),
        ("release_claim", ("q", "c"), ENDED),
        ("list_claims", ("q",), reply({"claims": []})),
        ("stage", ("q", "t", "c", [b"x"]), reply({"items": 1})),
        ("publish_stage", ("q", "t", ["c"]), reply({"txn": "t", "items": 1})),
        ("abort_stage", ("q", "t"), reply({"items": 1})),
    ],
)
def test_what_has_a_name_is_sent_again(make: Make, call: str, args: tuple[Any, ...], answer: Step) -> None:
    with scripted(reset, answer) as server, make(server.url) as client:
        getattr(client, call)(*args)
        [first, second] = server.requests
        assert first == second


def test_a_claim_whose_reply_was_lost_waits_for_the_rest_of_its_wait(make: Make) -> None:
    with scripted(cut(), ENDED) as server, make(server.url) as client:
        assert client.claim("q", "c", wait="1m") == Claim(claim_id="c", items=0)
        [(_, first), (_, second)] = server.requests
        assert first["wait"] == "1m"
        assert 59 < second["wait"] < 60


def test_a_release_whose_reply_was_lost_is_done_when_the_claim_is_gone(make: Make) -> None:
    with scripted(reset, refusal("not_found", 404)) as server, make(server.url) as client:
        assert client.release_claim("q", "c") == ClaimEnded("c", 0)
        assert len(server.requests) == 2
    with scripted(refusal("not_found", 404)) as server, make(server.url) as client, pytest.raises(NotFound):
        client.release_claim("q", "c")
