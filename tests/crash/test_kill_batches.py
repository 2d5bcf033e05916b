"""kill -9 in a loop under claims and transactions: every item published is read and completed exactly once.

A failure names its seed: `pytest tests/crash/test_kill_batches.py -k seed-2-` draws the same moments again, as far as
the scheduling of threads allows.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

import millpond
from millpond import Pond
from tests.crash.doomed_batches import QUEUE, READER, all_payloads, prepare, publish, read_and_complete, verdict_of
from tests.crash.test_kill import STEPS_MAX, items_of, live_and_die

LIVES = 10  # kills a seed


class Heard:
    """What the lives so far have said."""

    def __init__(self) -> None:
        self.asked: set[int] = set()
        self.published: set[int] = set()
        self.read: dict[int, list[str]] = {}  # by the claim's number
        self.completed: set[int] = set()

    def hear(self, line: str) -> None:
        word, *subjects = line.split()
        if word in ("publish", "published"):
            (self.asked if word == "publish" else self.published).add(int(subjects[0]))
        if word in ("read", "completed"):
            number = int(subjects[0].partition(":")[2])
            if word == "completed":
                self.completed.add(number)
            else:
                assert self.read.setdefault(number, subjects[1:]) == subjects[1:], "a claim was read differently"

    @property
    def next_number(self) -> int:
        """The transaction that was not answered, or the one after the last."""
        return min(self.asked - self.published, default=max(self.asked, default=0) + 1)

    def ended(self, last_completed: int) -> tuple[Counter[str], Counter[str]]:
        """What the claims so far have completed, and what they left dead."""
        done: Counter[str] = Counter()
        dead: Counter[str] = Counter()
        tried: Counter[str] = Counter()
        for number in range(1, last_completed + 1):
            for payload in self.read[number]:
                verdict = verdict_of("", payload, tried[payload])
                tried[payload] += 1
                if verdict is None:
                    done[payload] += 1
                elif verdict.verdict == "dead":
                    dead[payload] += 1
        return done, dead


def check(pond: Pond, heard: Heard) -> None:
    last = pond.open_consumer(QUEUE, READER).last_completed
    assert heard.completed <= set(range(1, last + 1)), "a claim that was completed is not"
    done, dead = heard.ended(last)
    items = items_of(pond, QUEUE)
    left = Counter(item.payload.decode() for item in items)
    assert Counter(item.payload.decode() for item in items if item.state == "dead") == dead
    assert not set(done) & set(left), "something completed has returned"
    there = done + left
    assert max(there.values(), default=0) <= 1, "something exists twice"
    for number in heard.asked:
        found = [payload in there for payload in all_payloads(number)]
        if number in heard.published:
            assert all(found), f"something of transaction {number} is lost"
        assert all(found) or not any(found), f"a part of transaction {number} was published"
    assert set(there) <= {payload for number in heard.asked for payload in all_payloads(number)}


def drain(pond: Pond, heard: Heard) -> None:
    """Publish what was not answered, and read until nothing is left."""
    for number in heard.asked - heard.published:
        publish(pond, number)
        heard.published.add(number)
    opened = pond.open_consumer(QUEUE, READER)
    number = opened.last_completed
    while True:
        number += 1
        name = f"{READER}:{number}"
        claim = pond.claim(QUEUE, name, max_items=1_000, parts=2, epoch=opened.epoch)
        if not claim.items:
            break
        pages = [pond.read_claim(QUEUE, name, part=part.part, epoch=opened.epoch) for part in claim.parts]
        heard.hear(" ".join(["read", name, *(item.payload.decode() for page in pages for item in page.items)]))
        read_and_complete(pond, name, opened.epoch)
    done, dead = heard.ended(number - 1)
    everything = Counter(payload for one in heard.published for payload in all_payloads(one))
    assert done + dead == everything
    assert {item.state for item in items_of(pond, QUEUE)} <= {"dead"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"seed-{seed}-")
def test_kill_leaves_no_claim_and_no_transaction_half_done(seed: int, tmp_path: Path) -> None:
    random, heard = Random(seed), Heard()
    directory = tmp_path / "data"
    with millpond.open(directory) as pond:
        prepare(pond)
    for _ in range(LIVES):
        steps = random.choice([random.randrange(8), random.randrange(STEPS_MAX // 2)])
        live_and_die(directory, str(heard.next_number), steps, heard, "tests.crash.doomed_batches")
        with millpond.open(directory) as pond:
            check(pond, heard)
    assert heard.published
    assert heard.completed
    with millpond.open(directory) as pond:
        drain(pond, heard)
        check(pond, heard)
