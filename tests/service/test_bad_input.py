"""Whatever is handed in, the answer is a clear error from `errors.py`, and nothing has changed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import millpond
from millpond import MillpondError, NewItem, RedriveFilter, Retry
from millpond.api import Api
from millpond.errors import BatchTooLarge, InvalidRequest, NotBuilt, NotFound
from millpond.model import (
    LEASE_BATCH_MAX,
    PAYLOAD_BYTES_MAX,
    PRODUCE_BATCH_MAX,
    PRODUCE_BYTES_MAX,
    STATE_DOC_BYTES_MAX,
    STATE_DOC_DEPTH_MAX,
    TOKEN_BATCH_MAX,
)
from tests.service.case import Case, assert_good_form
from tests.service.looks import OPERATIONS, picture

# ---- wrong values -----------------------------------------------------------------------------------------

ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


WRONG: dict[str, Any] = {
    "none": None,
    "false": False,
    "true": True,
    "minus one": -1,
    "minus a half": -0.5,
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "huge": 10**400,
    "minus huge": -(10**400),
    "immense": 10**5000,  # more digits than Python will print
    "bytes": b"q",
    "bytearray": bytearray(b"q"),
    "empty": "",
    "words": "some words",
    "surrogate": "a\ud800b",
    "null": "a\0b",
    "list": [],
    "list of none": [None],
    "list of ints": [1, 2],
    "list of lists": [["q"]],
    "list of immense": [10**5000],
    "deep": nested(5000),
    "endless": ENDLESS,
    "tuple": (1,),
    "set": {1},
    "dict": {"a": 1},
    "dict of odd keys": {1: 2, None: 3},
    "object": object(),
    "class": int,
    "complex": 1j,
}

STRINGS = {"empty", "words", "null"}
PLAIN_DOCUMENTS = {*WRONG} - {
    *("nan", "infinity", "minus infinity", "huge", "minus huge", "immense", "surrogate", "list of immense", "deep"),
    *("endless", "bytearray", "set", "dict of odd keys", "object", "class", "complex"),
}

# ---- every parameter of every call ------------------------------------------------------------------------

PARAMETERS = [
    (call, parameter) for call in OPERATIONS for parameter in inspect.signature(getattr(Api, call)).parameters
    if parameter != "self"
]  # fmt: skip

# Values of WRONG that are right, or that name something which is not there, for a parameter of any call:
TAKEN_BY_NAME: Mapping[str, set[str]] = {
    "reference": STRINGS,
    "prefix": STRINGS,
    "client_id": STRINGS,
    "state_doc": PLAIN_DOCUMENTS,
    "result": PLAIN_DOCUMENTS,
    "force": {"true", "false"},
    "dry_run": {"true", "false"},
    "limit": {"huge", "immense"},
}
TAKEN: Mapping[tuple[str, str], set[str]] = {
    ("create_queue", "dead_queue"): {"none"},
    ("update_queue", "dead_queue"): {"none"},
    ("create_queue", "backoff"): {"none"},
    ("list_queues", "after"): STRINGS,
    ("produce", "request_id"): {"none", "words", "null"},
    ("lease", "lease_timeout"): {"none"},
    ("extend", "lease_timeout"): {"none"},
    **{(call, "queue"): {"none"} for call in ("complete", "retry", "extend", "write_state")},
    ("redrive", "ids"): {"none"},
    ("redrive", "filter"): {"none"},
    ("redrive", "rate"): {"none"},
    **{("list_items", parameter): {"none"} for parameter in ("state", "partition", "after", "until")},
    ("bury", "error"): {"none", *STRINGS},
    ("open_consumer", "after"): {"none"},
    ("claim", "max_bytes"): {"none"},
    ("claim", "owner"): STRINGS,
    ("read_claim", "after"): {"none"},
    ("rebalance", "partitions"): {"none"},  # as many as there are
    ("audit", "after"): {"none"},
    **{(call, "epoch"): {"none"} for call in ("read_claim", "give_verdicts", "complete_claim", "release_claim")},
    ("publish_stage", "chunks"): {"list"},  # a transaction of nothing
    ("list_items", "kind"): {"none", *STRINGS},
}


def test_the_walk_knows_every_call_and_parameter(case: Case) -> None:
    assert {(call, parameter) for call in OPERATIONS for parameter in case.arguments(call)} == set(PARAMETERS)


@pytest.mark.parametrize("call", OPERATIONS)
def test_the_arguments_that_are_called_right_are(call: str, case: Case) -> None:
    case.call(call)


@pytest.mark.parametrize(("call", "parameter"), PARAMETERS)
def test_wrong_types_and_values_are_refused(call: str, parameter: str, case: Case) -> None:
    taken = TAKEN_BY_NAME.get(parameter, set()) | TAKEN.get((call, parameter), set())
    before = picture(case.pond)
    for name, value in WRONG.items():
        if name in taken:
            continue
        try:
            answer = case.call(call, **{parameter: value})
        except MillpondError as error:
            assert_good_form(error)
        else:
            pytest.fail(f"{call}({parameter}={name}) was taken: {answer!r:.100}")
    assert picture(case.pond) == before


# ---- what is inside an item, a retry, a filter, a policy --------------------------------------------------

FIELDS: list[tuple[str, Callable[[Case, str, Any], Any], str, set[str]]] = [
    *(
        ("item", lambda case, field, value: case.call("produce", items=["x", NewItem(**{field: value})]), field, taken)
        for field, taken in {
            "payload": {"bytes", "bytearray", *STRINGS},
            "id": {"none"},
            "key": {"none", "words", "null"},
            "kind": STRINGS,
            "encoding": STRINGS,
            "reference": STRINGS,
            "priority": {"minus one"},
            "enqueue_at": {"none"},
            "delay": {"none"},
            "max_attempts": {"none"},
            "expire_timeout": {"none"},
            "correlation_id": {"none", "words"},
        }.items()
    ),
    *(
        (
            "retry",
            lambda case, field, value: case.call("retry", items=[Retry(**{"lease": case.leased, field: value})]),
            field,
            taken,
        )
        for field, taken in {
            "lease": STRINGS | {"surrogate"},  # answered as a token that is none
            "intent": cast("set[str]", set()),
            "delay": {"none"},
            "retry_at": {"none"},
            "error": {"none", *STRINGS},
            "dead": {"true", "false"},
        }.items()
    ),
    *(
        ("filter", lambda case, field, value: case.call("redrive", filter={field: value}), field, STRINGS)
        for field in RedriveFilter.__struct_fields__
    ),
    *(
        (
            "filter struct",
            lambda case, field, value: case.call("redrive", filter=RedriveFilter(**{field: value})),
            field,
            {"none", *STRINGS},
        )
        for field in RedriveFilter.__struct_fields__
    ),
    *(
        ("backoff", lambda case, field, value: case.call("update_queue", backoff={field: value}), field, set[str]())
        for field in ("base", "cap", "jitter")
    ),
]


@pytest.mark.parametrize(
    ("call", "field", "taken"), [one[1:] for one in FIELDS], ids=[f"{n} {f}" for n, _, f, _ in FIELDS]
)
def test_wrong_types_and_values_inside_are_refused(
    call: Callable[[Case, str, Any], Any], field: str, taken: set[str], case: Case
) -> None:
    before = picture(case.pond)
    for name, value in WRONG.items():
        if name in taken:
            continue
        try:
            answer = call(case, field, value)
        except MillpondError as error:
            assert_good_form(error)
        else:
            pytest.fail(f"{field}={name} was taken: {answer!r:.100}")
    assert picture(case.pond) == before


def test_groups_are_not_built(case: Case) -> None:
    error = case.refuses(lambda: case.call("produce", items=["x", NewItem(payload="y", group="g")]), NotBuilt)
    assert error.status == 501


@pytest.mark.parametrize(
    ("wrong", "right"), [("bse", "base"), ("caps", "cap"), ("jiter", "jitter"), ("max", None), ("x" * 5_000, None)]
)
@pytest.mark.parametrize("call", ["create_queue", "update_queue"])
def test_an_unknown_field_of_backoff_names_the_nearest(call: str, wrong: str, right: str | None, case: Case) -> None:
    error = case.refuses(lambda: case.call(call, backoff={wrong: 1}), InvalidRequest)
    assert f"did you mean {right!r}?" in error.message if right else "base, cap, jitter" in error.message


def test_other_misspelt_words_name_the_nearest_too(case: Case) -> None:
    misspelt: list[tuple[Callable[[], Any], str]] = [
        (lambda: case.call("redrive", filter={"source_quue": "q"}), "source_queue"),
        (lambda: case.call("produce", on_conflict="ignor"), "ignore"),
        (lambda: case.call("create_queue", durability="ful"), "full"),
        (lambda: case.call("create_queue", dead="deleted"), "delete"),
        (lambda: case.call("clear", states=["redy"]), "ready"),
        (lambda: case.call("list_items", state="sheduled"), "scheduled"),
        (lambda: case.call("retry", items=[Retry(lease=case.leased, intent=cast(Any, "failed"))]), "failure"),
    ]
    for call, right in misspelt:
        assert f"did you mean {right!r}?" in case.refuses(call, InvalidRequest).message


# ---- names ------------------------------------------------------------------------------------------------

BAD_NAMES = [
    *("../x", "a b", "", "x" * 10_000, "x" * 201, "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\\b", "ä", "a\n"),
    *("a\0", "a\ud800", " a", "a?", "a*", "a:b", "%2e%2e"),
]
NAMED = [(call, name) for call, name in PARAMETERS if name in ("name", "queue", "dead_queue")]


@pytest.mark.parametrize(("call", "parameter"), NAMED)
def test_bad_names_are_refused(call: str, parameter: str, case: Case) -> None:
    before = picture(case.pond)
    for name in BAD_NAMES:
        with pytest.raises(InvalidRequest) as caught:
            case.call(call, **{parameter: name})
        assert_good_form(caught.value)
    assert picture(case.pond) == before


@pytest.mark.parametrize("name", ["a", "a/b/c", "A-z_0.9", "...", "x" * 200, "-", "a/.b"])
def test_good_names_are_taken(name: str, case: Case) -> None:
    assert case.pond.create_queue(name).name == name
    assert case.pond.queue_info(name).name == name


@pytest.mark.parametrize("call", [call for call, name in NAMED if name != "dead_queue" and call != "create_queue"])
def test_an_unknown_queue_is_not_found(call: str, case: Case) -> None:
    parameter = "name" if "name" in case.arguments(call) else "queue"
    error = case.refuses(lambda: case.call(call, **{parameter: "nowhere"}), NotFound)
    assert error.status == 404
    assert "'nowhere'" in error.message


# ---- durations and instants -------------------------------------------------------------------------------

BAD_DURATIONS: list[Any] = [
    *(-1, -0.001, "-1s", "1", "s", "1x", "1s 2", "1m-1s", "", " ", "P", "PT", "1e3s", "∞", "NaN", "9" * 200 + "s"),
    *("１s", "PT１S", ".3s"),
    *("99999w", "P99999W", 10**12, 1e300, timedelta(days=-1), timedelta.max, timedelta(days=3651), datetime.now(UTC)),
]
DURATIONS = [(call, name) for call, name in PARAMETERS if name.endswith(("timeout", "_window", "_retention", "wait"))]


@pytest.mark.parametrize(("call", "parameter"), DURATIONS)
def test_bad_durations_are_refused(call: str, parameter: str, case: Case) -> None:
    before = picture(case.pond)
    for value in BAD_DURATIONS:
        with pytest.raises(InvalidRequest) as caught:
            case.call(call, **{parameter: value})
        assert_good_form(caught.value)
    assert picture(case.pond) == before


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((90, 90), (0.5, 0.5), ("90s", 90), ("1m30s", 90), ("500ms", 0.5), ("1.5h", 5400), ("PT1M30S", 90)),
        *(("P1DT1H", 90_000), ("P2W", 1_209_600), (" 1s ", 1), (timedelta(minutes=2), 120), ("10d", 864_000)),
    ],
)
def test_durations_in_all_their_forms_are_taken(value: Any, seconds: float, case: Case) -> None:
    assert case.pond.update_queue("q", lease_timeout=value).lease_timeout == seconds


@pytest.mark.parametrize("parameter", ["lease_timeout", "expire_timeout"])
def test_a_queue_that_gives_no_time_is_refused(parameter: str, case: Case) -> None:
    case.refuses(lambda: case.call("create_queue", **{parameter: 0}), InvalidRequest)


def test_a_lease_of_no_time_is_refused(case: Case) -> None:
    case.refuses(lambda: case.call("lease", lease_timeout=0), InvalidRequest)


def test_a_wait_over_the_limit_is_refused(case: Case) -> None:
    case.refuses(lambda: case.call("lease", wait="15m1ms"), InvalidRequest)


@pytest.mark.parametrize(
    ("call", "parameter", "value", "told"),
    [
        ("lease", "batch", 0, "batch is 0; use 1 to 1000"),
        ("lease", "batch", "1", "batch is str; give a whole number from 1 to 1000"),
        ("list_items", "limit", 0, "limit is 0; use 1 to 1000"),
        ("list_queues", "limit", None, "limit is nothing; give a whole number from 1 to 1000"),
        ("lease", "wait", "16m", "wait is 960 s; use 0 to 900 s"),
        ("update_queue", "lease_timeout", 0, "lease_timeout is 0 s; use 0.001 to 315360000 s"),
    ],
)
def test_a_number_out_of_range_is_told_the_range(call: str, parameter: str, value: Any, told: str, case: Case) -> None:
    assert case.refuses(lambda: case.call(call, **{parameter: value}), InvalidRequest).message == told


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_any_kind_of_bytes_is_a_payload(kind: Callable[[bytes], Any], case: Case) -> None:
    case.pond.produce("letters", [kind(b"bare"), NewItem(payload=kind(b"within"))])
    assert [item.payload for item in case.pond.lease("letters", batch=2)] == [b"bare", b"within"]


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "not what it is"


class Whole(int):
    pass


class Raw(bytes):
    pass


def test_kinds_of_strings_numbers_and_bytes_are_taken_for_what_they_are(case: Case) -> None:
    """As members of an enum or NumPy's values: the journal and the registry take none of these by themselves."""
    pond, text = case.pond, Text("text")
    pond.create_queue(text, reference=text, max_attempts=Whole(3), dead=Text("keep"), durability=Text("full"))
    pond.update_queue(text, reference=text, dead_queue=Text("letters"))
    item = NewItem(payload=Raw(b"raw"), id=text, key=text, kind=text, encoding=text, reference=text)
    item.priority, item.max_attempts, item.correlation_id = Whole(2), Whole(4), text
    [produced] = pond.produce(text, [item], request_id=text)
    assert type(produced.id) is str
    [leased] = pond.lease(text, client_id=text, batch=Whole(1))
    assert (leased.payload, leased.id, leased.key, leased.kind, leased.correlation_id) == (b"raw", *["text"] * 4)
    assert (leased.encoding, leased.reference, leased.priority) == ("text", "text", 2)
    assert pond.retry([Retry(lease=Text(leased.lease), error=text, intent=cast(Any, Text("defer")))])[0].ok
    assert pond.bury(text, [text], reason=Text("rejected"), error=text)[0].ok
    pond.redrive("letters", filter={"kind": text})
    assert pond.claim("batches", text, owner=text).items == 1
    assert pond.stage("batches", text, text, [Raw(b"raw")]).items == 1


def test_a_kind_of_string_names_a_queue_in_the_registry_too(tmp_path: Path) -> None:
    with millpond.open(tmp_path) as pond:
        name = Text("text")
        pond.create_queue(name, reference=Text("mine"))
        assert pond.clear(name, [Text("ready")]) == {"ready": 0}
        assert pond.redrive(name, filter={Text("kind"): Text("a")}).moved == 0
        assert pond.audit(name).entries[0].action == "redrive done"
    with millpond.open(tmp_path) as pond:
        assert pond.queue_info(name).reference == "mine"


@pytest.mark.parametrize("inside", [False, True])
def test_a_payload_whose_memory_was_released_is_refused(inside: bool, case: Case) -> None:
    view = memoryview(b"gone")
    view.release()
    case.refuses(lambda: case.call("produce", items=[NewItem(payload=view) if inside else view]), InvalidRequest)


EAST = timezone(timedelta(hours=14))
BAD_INSTANTS = [
    *(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=EAST)),
    *(datetime(1969, 12, 31, tzinfo=UTC), datetime(2300, 1, 1, tzinfo=EAST)),
]


@pytest.mark.parametrize("instant", BAD_INSTANTS, ids=str)
def test_instants_out_of_range_are_refused(instant: datetime, case: Case) -> None:
    case.refuses(lambda: case.call("produce", items=[NewItem(payload="x", enqueue_at=instant)]), InvalidRequest)
    case.refuses(lambda: case.call("retry", items=[Retry(lease=case.leased, retry_at=instant)]), InvalidRequest)


def test_delay_and_instant_exclude_each_other(case: Case) -> None:
    at = datetime.now(UTC)
    case.refuses(lambda: case.call("produce", items=[NewItem(payload="x", enqueue_at=at, delay=1)]), InvalidRequest)
    case.refuses(lambda: case.call("retry", items=[Retry(lease=case.leased, retry_at=at, delay=1)]), InvalidRequest)


# ---- batches and sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("produce", {"items": [b"x"] * (PRODUCE_BATCH_MAX + 1)}),
        ("produce", {"items": ["x"] * (PRODUCE_BATCH_MAX + 1)}),
        ("produce", {"items": [b"x" * (PAYLOAD_BYTES_MAX + 1)]}),
        ("produce", {"items": ["ok", "é" * (PAYLOAD_BYTES_MAX // 2) + "x"]}),
        ("produce", {"items": [NewItem(payload=b"x" * (PAYLOAD_BYTES_MAX + 1))]}),
        ("produce", {"items": [b"x" * PAYLOAD_BYTES_MAX] * (PRODUCE_BYTES_MAX // PAYLOAD_BYTES_MAX) + [b"x"]}),
        ("lease", {"batch": LEASE_BATCH_MAX + 1}),
        ("lease", {"batch": 1 << 60}),
        ("complete", {"leases": ["x"] * (TOKEN_BATCH_MAX + 1), "result": None}),
        ("retry", {"items": ["x"] * (TOKEN_BATCH_MAX + 1)}),
        ("extend", {"leases": ["x"] * (TOKEN_BATCH_MAX + 1)}),
        ("cancel", {"ids": ["x"] * (TOKEN_BATCH_MAX + 1)}),
        ("redrive", {"ids": ["x"] * (TOKEN_BATCH_MAX + 1)}),
        ("write_state", {"state_doc": "x" * STATE_DOC_BYTES_MAX}),
        ("complete", {"result": "x" * STATE_DOC_BYTES_MAX}),
    ],
)
def test_what_is_over_a_limit_is_too_large(call: str, arguments: dict[str, Any], case: Case) -> None:
    error = case.refuses(lambda: case.call(call, **arguments), BatchTooLarge)
    assert error.status == 413
    assert re.search(r"\d", error.message), "it names the limit"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("produce", {"items": [b"x"] * PRODUCE_BATCH_MAX}),
        ("produce", {"items": [b"x" * PAYLOAD_BYTES_MAX]}),
        ("produce", {"items": ["é" * (PAYLOAD_BYTES_MAX // 2)]}),
        ("lease", {"batch": LEASE_BATCH_MAX}),
        ("complete", {"leases": ["x"] * TOKEN_BATCH_MAX, "result": None}),
        ("cancel", {"ids": ["x"] * TOKEN_BATCH_MAX}),
        ("list_items", {"limit": 1 << 60}),
        ("list_queues", {"limit": 1 << 60}),
        ("write_state", {"state_doc": nested(STATE_DOC_DEPTH_MAX - 1)}),
        ("create_queue", {"partitions": 1000}),
    ],
)
def test_what_is_just_at_a_limit_is_taken(call: str, arguments: dict[str, Any], case: Case) -> None:
    case.call(call, **arguments)


@pytest.mark.parametrize(
    ("call", "parameter"), [("produce", "items"), ("complete", "leases"), ("retry", "items"), ("cancel", "ids")]
)
@pytest.mark.parametrize("value", [[], (), "x", b"x", {"x"}, {"x": 1}], ids=repr)
def test_batches_that_are_empty_or_no_lists_are_refused(call: str, parameter: str, value: Any, case: Case) -> None:
    case.refuses(lambda: case.call(call, **{parameter: value}), InvalidRequest)


def test_an_id_twice_in_a_batch_is_refused(case: Case) -> None:
    twice = [NewItem(payload="1", id="a"), NewItem(payload="2", id="b"), NewItem(payload="3", id="a")]
    error = case.refuses(lambda: case.pond.produce("q", twice), InvalidRequest)
    assert "items[0] and items[2]" in error.message


def test_a_result_for_many_is_refused(case: Case) -> None:
    lease = case.leased.lease
    case.refuses(lambda: case.pond.complete([lease, lease], result=1), InvalidRequest)


def test_documents_that_would_come_back_changed_are_refused(case: Case) -> None:
    documents: list[Any] = [
        *({1: 2}, {"a": {None: 1}}, [float("nan")], {"a": [float("inf")]}, {1, 2}, datetime.now(UTC), [timedelta(1)]),
        *(nested(STATE_DOC_DEPTH_MAX), nested(500), ENDLESS, 1 << 64, [b"x", "\ud800"], {"\ud800": 1}, NewItem()),
    ]
    for document in documents:
        case.refuses(partial(case.call, "write_state", state_doc=document), InvalidRequest)
        case.refuses(partial(case.call, "complete", result=document), InvalidRequest)


@pytest.mark.parametrize(
    "document",
    [
        None,
        True,
        0,
        -1.5,
        "é",
        b"\xff",
        [],
        {},
        {"a": [1, {"b": None}]},
        (1 << 63) - 1,
        nested(STATE_DOC_DEPTH_MAX - 1),
    ],
)
def test_json_values_and_bytes_come_back_as_they_were(document: Any, case: Case) -> None:
    case.call("write_state", state_doc=document)
    assert case.pond.get_item("q", case.leased.id).state_doc == document


# ---- opening ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [None, 1, b"x", "", [], object(), "a\0b", "x" * 5_000, "\ud800"],
    ids=lambda path: f"{type(path).__name__} {len(str(path))}",
)
def test_what_is_no_path_is_refused(path: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest) as caught:
        millpond.open(path)
    assert "; " in caught.value.message
    assert list(tmp_path.iterdir()) == []
