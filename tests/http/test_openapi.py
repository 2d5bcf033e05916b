"""The schema says what api.md says, and what the server does."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.http import openapi
from millpond.http.answers import ANSWERS
from millpond.wire import CALLS
from tests.http.served import Served


@pytest.fixture(scope="module", autouse=True)
def way() -> str:
    """Once is enough: nothing here depends on which way a call goes."""
    return "lean"


ARROW = "application/vnd.apache.arrow.stream"

# api.md's table: each call, and the fields of its request.
EXPECTED = {
    "queues.create": "name partitions lease_timeout expire_timeout max_attempts dead_queue dead backoff dedup_window"
    " completed_retention durability reference",
    "queues.update": "name lease_timeout expire_timeout max_attempts dead_queue dead backoff dedup_window"
    " completed_retention reference",
    "queues.info": "name",
    "queues.delete": "name force",
    "queues.list": "prefix after limit",
    "queue.produce": "queue items on_conflict request_id",
    "queue.lease": "queue batch wait lease_timeout client_id",
    "queue.subscribe": "queue batch wait lease_timeout client_id prefetch",
    "queue.complete": "queue leases result",
    "queue.retry": "queue items",
    "queue.extend": "queue leases lease_timeout",
    "queue.state": "queue lease version state_doc",
    "queue.cancel": "queue ids",
    "queue.bury": "queue ids reason error",
    "queue.ready": "queue ids",
    "queue.stats": "queue",
    "queue.pause": "queue",
    "queue.resume": "queue",
    "queue.clear": "queue states",
    "queue.redrive": "queue ids filter rate dry_run",
    "queue.rebalance": "queue partitions dry_run",
    "queue.audit": "queue after limit",
    "consumer.open": "queue consumer after",
    "queue.claim": "queue claim_id max_items max_bytes parts wait epoch owner",
    "claim.read": "queue claim_id part after limit epoch",
    "claim.verdict": "queue claim_id verdicts epoch",
    "claim.complete": "queue claim_id epoch",
    "claim.release": "queue claim_id epoch",
    "claims.list": "queue",
    "queue.stage": "queue txn chunk items",
    "stage.publish": "queue txn chunks",
    "stage.abort": "queue txn",
    "journal.read": "queue partition after limit",
    "items.get": "queue id wait",
    "items.list": "queue state partition kind after until limit",
}
PARTS = {
    "ProduceItem": "text bytes json id key kind encoding reference priority group enqueue_at delay max_attempts"
    " expire_timeout correlation_id",
    "RetryItem": "lease intent delay retry_at error dead",
    "BackoffFields": "base cap jitter",
    "RedriveFields": "source_queue dead_reason kind error_contains",
    "Produced": "id duplicate correlation_id",
    "LeaseItem": "id lease lease_deadline attempts deliveries fencing_token text bytes kind encoding reference priority"
    " group correlation_id state_doc state_version last_error created_at",
    "Result": "ok correlation_id error lease_deadline cancelled",
    "StateWritten": "version",
    "QueueStats": "counts waiters oldest_ready_age rates partitions",
    "PartitionStats": "partition store status counts last_number",
    "AuditPage": "entries next",
    "AuditEntry": "at who action queue detail error",
    "Redriven": "matched moved",
    "LookPage": "items next",
    "QueuePage": "queues next",
    "VerdictItem": "id verdict error delay",
    "Consumer": "consumer epoch last_completed",
    "Claim": "claim_id items parts owner epoch created_at status",
    "ClaimPart": "part items",
    "ClaimEnded": "claim_id items retried dead",
    "ClaimList": "claims",
    "Staged": "items",
    "Published": "txn items duplicates again",
    "JournalPage": "incarnation partition rows last_turn",
    "JournalTurn": "turn at events",
    "ErrorBody": "code message details",
}


@pytest.fixture(scope="module")
def schema(server: Served) -> Any:
    return server.ask("GET", "/openapi.json").value


def properties(schema: Any, reference: str) -> set[str]:
    found: dict[str, Any] = schema["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    return set(found)


def test_the_schema_is_served_as_it_is_made(schema: Any) -> None:
    assert schema["openapi"] == "3.1.0"
    assert schema == openapi.schema()


def test_the_schema_has_every_call_and_no_other(schema: Any) -> None:
    assert {path.removeprefix("/v1/") for path in schema["paths"] if path.startswith("/v1/")} == set(EXPECTED)
    assert set(CALLS) == set(EXPECTED)


@pytest.mark.parametrize("call", EXPECTED)
def test_a_call_takes_the_fields_of_the_table(schema: Any, call: str) -> None:
    body = schema["paths"][f"/v1/{call}"]["post"]["requestBody"]["content"]
    assert set(body) - {ARROW} == {"application/json", "application/msgpack"}
    assert properties(schema, body["application/json"]["schema"]["$ref"]) == set(EXPECTED[call].split())


def test_arrow_is_taken_by_stage_and_answered_by_what_has_items(schema: Any) -> None:
    posts = {path.removeprefix("/v1/"): said["post"] for path, said in schema["paths"].items() if "post" in said}
    assert [call for call, post in posts.items() if ARROW in post["requestBody"]["content"]] == ["queue.stage"]
    assert [one["name"] for one in posts["queue.stage"]["parameters"]] == ["queue", "txn", "chunk"]
    answers = {call: post["responses"]["200"] for call, post in posts.items() if "200" in post["responses"]}
    with_arrow = {call: answer for call, answer in answers.items() if ARROW in answer["content"]}
    assert set(with_arrow) == {"items.list", "claim.read"}
    assert all("X-Millpond-Next" in answer["headers"] for answer in with_arrow.values())


@pytest.mark.parametrize("part", PARTS)
def test_parts_have_the_fields_of_the_table(schema: Any, part: str) -> None:
    """Fields may be added, but for what callers send: there an unknown one is an error."""
    found, wanted = properties(schema, part), set(PARTS[part].split())
    closed = schema["components"]["schemas"][part].get("additionalProperties") is False
    assert found == wanted if closed else found >= wanted


def test_every_reference_leads_somewhere(schema: Any) -> None:
    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                found = schema
                for step in value["$ref"].removeprefix("#/").split("/"):
                    found = found[step]
            for one in value.values():
                walk(one)
        elif isinstance(value, list):
            for one in value:
                walk(one)

    walk(schema)


def test_every_built_call_is_answered() -> None:
    assert {name for name, call in CALLS.items() if call.built} == {*ANSWERS, "queue.subscribe"}


def test_the_page_names_every_call(server: Served) -> None:
    page = server.ask("GET", "/docs").body.decode()
    assert [name for name in CALLS if f"/v1/{name}<" not in page] == []
