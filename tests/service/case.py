"""A pond in which every call can be tried with arguments that are wrong, to see that nothing changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from millpond import MillpondError, NewItem, Pond, Retry, Verdict
from millpond.clock import ManualClock
from millpond.errors import NotBuilt
from tests.service.looks import picture


class Case:
    """A pond with something of everything in it, and for each call arguments that it would take."""

    def __init__(self, pond: Pond, clock: ManualClock) -> None:
        self.pond = pond
        pond.create_queue("letters")
        pond.create_queue("q", dead_queue="letters", completed_retention="1h", backoff={"base": 3, "cap": "10m"})
        kept = pond.create_queue("kept", max_attempts=1)
        assert kept.dead_queue is None
        pond.produce("q", ["leased", "completed", "ready", NewItem(payload="later", id="later", key="k", delay="1h")])
        self.leased, completed = pond.lease("q", batch=2)
        pond.complete([completed])
        pond.produce("kept", ["dead", "lost", "ready"])
        dead, self.lost = pond.lease("kept", batch=2, lease_timeout="1s")
        pond.retry([Retry(lease=dead, error="no", dead=True)])
        pond.create_queue("batches")
        pond.produce("batches", ["claimed", "ready"])
        pond.claim("batches", "mine", max_items=1)
        self.claimed = pond.read_claim("batches", "mine").items[0].id
        self.epoch = pond.open_consumer("batches", "reader").epoch
        pond.stage("batches", "open", "one", ["staged"])
        clock.advance(1_000)
        picture(pond)  # what was due is done by then

    def arguments(self, call: str) -> dict[str, Any]:
        settings = {
            "lease_timeout": "1s",
            "expire_timeout": "1h",
            "max_attempts": 2,
            "dead_queue": "letters",
            "dead": "delete",
            "backoff": {"base": 1},
            "dedup_window": "1m",
            "completed_retention": "1s",
            "reference": "mine",
        }
        lease = self.leased.lease
        right: dict[str, dict[str, Any]] = {
            "create_queue": {"name": "new", "partitions": 1, "durability": "full", **settings},
            "update_queue": {"name": "q", **settings},
            "queue_info": {"name": "q"},
            "list_queues": {"prefix": "", "after": "", "limit": 10},
            "delete_queue": {"name": "q", "force": True},
            "pause": {"queue": "q"},
            "resume": {"queue": "q"},
            "stats": {"queue": "q"},
            "rebalance": {"queue": "q", "partitions": 2, "dry_run": True},
            "audit": {"queue": "q", "after": "5", "limit": 10},
            "produce": {"queue": "q", "items": ["new"], "on_conflict": "ignore", "request_id": "r"},
            "lease": {"queue": "q", "batch": 1, "wait": 0, "lease_timeout": "1s", "client_id": "me"},
            "complete": {"leases": [lease], "queue": "q", "result": 1},
            "retry": {"items": [lease], "queue": "q"},
            "extend": {"leases": [lease], "queue": "q", "lease_timeout": "1s"},
            "write_state": {"lease": lease, "state_doc": {"a": 1}, "version": 0, "queue": "q"},
            "cancel": {"queue": "q", "ids": ["later"]},
            "clear": {"queue": "q", "states": ["ready"]},
            "redrive": {"queue": "kept", "ids": None, "filter": {}, "rate": 1e6, "dry_run": False},
            "make_ready": {"queue": "q", "ids": ["later"]},
            "get_item": {"queue": "q", "id": "later", "wait": 0},
            "list_items": {"queue": "q", "state": "ready", "partition": 0, "kind": "a", "after": "0:0", "limit": 10}
            | {"until": 5},
            "bury": {"queue": "q", "ids": ["later"], "reason": "rejected", "error": "why"},
            "read_journal": {"queue": "q", "partition": 0, "after": 0, "limit": 10},
            "open_consumer": {"queue": "batches", "consumer": "reader", "after": 0},
            "claim": {"queue": "batches", "claim_id": "reader:1", "max_items": 1, "max_bytes": 9, "parts": 1, "wait": 0}
            | {"epoch": self.epoch, "owner": "me"},
            "read_claim": {"queue": "batches", "claim_id": "mine", "part": 0, "after": "0", "limit": 1, "epoch": None},
            "give_verdicts": {"queue": "batches", "claim_id": "mine", "epoch": None}
            | {"verdicts": [Verdict(id=self.claimed, verdict="dead")]},
            "complete_claim": {"queue": "batches", "claim_id": "mine", "epoch": None},
            "release_claim": {"queue": "batches", "claim_id": "mine", "epoch": None},
            "list_claims": {"queue": "batches"},
            "stage": {"queue": "batches", "txn": "new", "chunk": "one", "items": ["new"]},
            "publish_stage": {"queue": "batches", "txn": "open", "chunks": ["one"]},
            "abort_stage": {"queue": "batches", "txn": "open"},
        }
        return right[call]

    def call(self, call: str, /, **changed: Any) -> Any:
        return getattr(self.pond, call)(**{**self.arguments(call), **changed})

    def refuses(self, call: Callable[[], Any], kind: type[MillpondError] = MillpondError) -> MillpondError:
        """Makes the call, which must be refused in good form and change nothing."""
        before = picture(self.pond)
        with pytest.raises(kind) as caught:
            call()
        assert picture(self.pond) == before
        assert_good_form(caught.value)
        return caught.value


def assert_good_form(error: MillpondError) -> None:
    assert 400 <= error.status < 500 or isinstance(error, NotBuilt)
    assert re.fullmatch(r"[^;]+; [^;]{3,}", error.message), error.message
    assert len(error.message) < 400, error.message
    error.message.encode()  # it can be logged and sent
