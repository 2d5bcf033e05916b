"""schemathesis against the schema that a real server serves: what it makes up must be answered as the schema says.

Cases are made up from the schema: right ones, and ones that are wrong in every place. Nearly all of them name a queue
that is not there, so each call is also made in a way that makes sense, to see its reply in the shape of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

from millpond.http import openapi
from millpond.wire import CALLS
from tests.http.streams import ARROW
from tests.server.process import TIMEOUT_S, Server, serve

pytestmark = pytest.mark.slow

EXAMPLES = 50  # a call, besides those that walk through the schema one place at a time
NOT_CHECKED: list[schemathesis.CheckFunction] = [
    positive_data_acceptance,  # a schema cannot say all: a right queue may not exist, a lease be over
    not_a_server_error,  # here, with 501 for what is not built
]
LEASE = "the lease of an item"  # stands for one
SENSIBLE: dict[str, dict[str, Any]] = {
    "queues.create": {"name": "new", "dead_queue": "dead", "backoff": {"base": 1.5, "cap": "1m"}, "dedup_window": 60},
    "queues.update": {"name": "q", "max_attempts": 9, "backoff": {"jitter": 0.5}, "completed_retention": "1h"},
    "queues.info": {"name": "q"},
    "queues.delete": {"name": "q", "force": True},
    "queues.list": {"prefix": "", "limit": 1},
    "queue.produce": {"queue": "q", "items": [{"text": "x", "key": "k", "delay": "1s"}, {"json": {"a": [1]}}]},
    "queue.lease": {"queue": "q", "batch": 10, "wait": 0, "lease_timeout": "10s", "client_id": "c"},
    "queue.complete": {"queue": "q", "leases": [LEASE, "none"]},
    "queue.retry": {"items": [{"lease": LEASE, "error": "e", "delay": 1}, {"lease": "none", "dead": True}]},
    "queue.extend": {"queue": "q", "leases": [LEASE], "lease_timeout": "1m"},
    "queue.state": {"lease": LEASE, "version": 0, "state_doc": {"a": [1, None, "b"]}},
    "queue.cancel": {"queue": "q", "ids": ["none"]},
    "queue.bury": {"queue": "q", "ids": ["mine", "none"], "error": "e"},
    "queue.ready": {"queue": "q", "ids": ["mine", "none"]},
    "queue.stats": {"queue": "q"},
    "queue.rebalance": {"queue": "q", "partitions": 2, "dry_run": False},
    "queue.audit": {"queue": "q", "limit": 2},
    "queue.pause": {"queue": "q"},
    "queue.resume": {"queue": "q"},
    "queue.clear": {"queue": "q", "states": ["ready"]},
    "queue.redrive": {"queue": "q", "filter": {"kind": "k"}, "rate": 5, "dry_run": True},
    "items.get": {"queue": "q", "id": "mine", "wait": 0},
    "items.list": {"queue": "q", "state": "ready", "partition": 0, "until": 100, "limit": 5},
    "consumer.open": {"queue": "q", "consumer": "c"},
    "queue.claim": {
        "queue": "q",
        "claim_id": "c",
        "max_items": 9,
        "max_bytes": 99,
        "parts": 2,
        "wait": 0,
        "owner": "o",
    },
    "claim.read": {"queue": "q", "claim_id": "made", "part": 0, "limit": 5},
    "claim.verdict": {"queue": "q", "claim_id": "made", "verdicts": [{"id": "x", "verdict": "retry", "delay": "1s"}]},
    "claim.complete": {"queue": "q", "claim_id": "made"},
    "claim.release": {"queue": "q", "claim_id": "made"},
    "claims.list": {"queue": "q"},
    "queue.stage": {"queue": "q", "txn": "t:1", "chunk": "b", "items": [{"text": "x", "key": "k", "delay": "1s"}]},
    "stage.publish": {"queue": "q", "txn": "t:1", "chunks": ["a"]},
    "stage.abort": {"queue": "q", "txn": "t:1"},
    "journal.read": {"queue": "q", "partition": 0, "after": 0, "limit": 10},
}


@schemathesis.serializer("application/msgpack")
def packed(_: schemathesis.SerializationContext, value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeError):  # of numbers that MessagePack does not have
        return msgspec.msgpack.encode(repr(value))


@schemathesis.serializer(ARROW)
def streamed(_: schemathesis.SerializationContext, value: Any) -> bytes:
    """Whatever it is: hardly ever a stream."""
    return value if isinstance(value, bytes) else repr(value).encode()


@schemathesis.deserializer("application/msgpack")
def unpacked(_: schemathesis.DeserializationContext, response: schemathesis.Response) -> Any:
    return msgspec.to_builtins(msgspec.msgpack.decode(response.content))  # instants and bytes as JSON has them


@pytest.fixture(scope="module")
def served(data: Path) -> Iterator[Server]:
    with serve(data) as server:
        for name in ("q", "dead"):
            server.must("queues.create", name=name)
        yield server
        assert [one for one in server.process.log if one["level"] in ("warning", "error")] == []


api = schemathesis.openapi.from_dict(openapi.schema())


def checked(case: schemathesis.Case[Any], served: Server) -> schemathesis.Response:
    response = case.call_and_validate(base_url=served.url, excluded_checks=NOT_CHECKED, timeout=TIMEOUT_S)
    assert response.status_code < 500 or response.status_code == 501, response.content
    return response


def test_the_schema_is_the_one_that_is_served(served: Server) -> None:
    assert served.ask("GET", "/openapi.json").value == openapi.schema()


@api.parametrize()
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
def test_whatever_the_schema_allows_or_forbids_is_answered_as_it_says(
    case: schemathesis.Case[Any], served: Server
) -> None:
    checked(case, served)


def filled(value: Any, lease: str) -> Any:
    if isinstance(value, dict):
        return {name: filled(inner, lease) for name, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, lease) for inner in value]
    return lease if value == LEASE else value


@pytest.mark.parametrize("media_type", ["application/json", "application/msgpack"])
@pytest.mark.parametrize("name", SENSIBLE)
def test_what_makes_sense_is_answered_in_the_shape_of_the_schema(served: Server, name: str, media_type: str) -> None:
    for queue in ("q", "new"):
        served.call("queues.delete", name=queue, force=True)
    served.must("queues.create", name="q")
    items = [{"text": "x", "kind": "k", "reference": "r"}, {"bytes": "/w=="}, {"text": "y", "id": "mine"}]
    served.must("queue.produce", queue="q", items=items)
    [item] = served.must("queue.lease", queue="q")["items"]
    served.must("queue.claim", queue="q", claim_id="made", max_items=1)
    served.must("queue.stage", queue="q", txn="t:1", chunk="a", items=[{"text": "staged"}])
    case = api[f"/v1/{name}"]["POST"].Case(body=filled(SENSIBLE[name], item["lease"]), media_type=media_type)
    response = checked(case, served)
    assert response.status_code == 200, response.content
    assert response.headers["content-type"] == [media_type]


def test_every_call_that_is_built_is_tried_so() -> None:
    assert {name for name, call in CALLS.items() if call.built} == {*SENSIBLE, "queue.subscribe"}
