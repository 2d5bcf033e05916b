"""Power cuts on a store that has been through more: processes that end and are killed, durability that is changed in
between, and syncs that fail.

A failure names its seed: `pytest tests/crash/test_powercut_lives.py -k seed-17-` plays it again.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from millpond.store import bulk, sqlite, turnlog
from millpond.store.base import Store, StoreFailed, Stores
from tests.crash.powercut import PowerCutDisk
from tests.crash.test_powercut import Work, find, last_turn, stores_on
from tests.seeds import seeds

SEEDS = 100
LIVES = 8


class Partition:
    """One that is used until the power is cut, again and again; and which turns it must hold, and may."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.work = Work(random)
        self.sure = self.known = 0
        self.store: Store
        self.durability: str

    def live(self, stores: Stores, disk: PowerCutDisk) -> None:
        try:
            self._open(stores)
            while True:
                if self.random.random() < 0.06:
                    if self.random.random() < 0.5:
                        self.store.close()
                    else:
                        disk.kill(self.store.close)
                    self._open(stores)
                self._commit(disk)
        except StoreFailed:
            self.store.close()
            if not disk.dead:
                raise

    def found(self, turn: int) -> None:
        assert self.sure <= turn <= self.known + 1
        self.sure = self.known = turn

    def _open(self, stores: Stores) -> None:
        self.durability = self.random.choice(["full", "full", "relaxed"])
        self.store = stores.open("incarnation", 0, self.durability)
        self._recover({self.known})

    def _recover(self, expected: set[int]) -> None:
        found = last_turn(self.store.recover())
        assert found in expected
        self.sure = self.known = found  # whatever the durability, what it finds is durable
        self.work.forget_after(found)

    def _commit(self, disk: PowerCutDisk) -> None:
        if self.durability == "full" and self.random.random() < 0.04:
            disk.fail_syncs = self.random.choice([1, 2, 3])
        turn = self.work.next()
        try:
            self.store.commit(turn)
        except StoreFailed:
            disk.fail_syncs = 0
            if disk.dead:
                raise
            self._recover({self.known, turn.number})
        else:
            self.known = turn.number
            if self.durability == "full":
                self.sure = turn.number


@pytest.fixture
def random(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Random:
    """By seed, and what a store does rarely is done often."""
    made = Random(request.param)
    monkeypatch.setattr(sqlite, "CHECKPOINT_PAGES", made.choice([20, 60, 300]))
    monkeypatch.setattr(bulk, "FILE_BYTES_MAX", made.choice([1, 50_000, 500_000]))
    monkeypatch.setattr(turnlog, "FILE_BYTES", made.choice([10_000, 150_000]))
    monkeypatch.setattr(turnlog, "TURNS_MAX", made.choice([2, 10, 128]))
    return made


@pytest.mark.parametrize("random", seeds(SEEDS, fast=4), ids=lambda seed: f"seed-{seed}-", indirect=True)
def test_whatever_a_store_has_been_through_a_power_cut_loses_nothing_that_was_durable(
    random: Random, tmp_path: Path
) -> None:
    ways = {
        "bulk_bytes_min": random.choice([1, 10_000, bulk.BULK_BYTES_MIN]),
        "turns_before": random.choice([0, 3, turnlog.TURNS_BEFORE]),
    }
    partition, root = Partition(random), tmp_path / "life-0"
    root.mkdir()
    for number in range(1, LIVES + 1):
        disk = PowerCutDisk(root)
        disk.failed_syncs_drop = random.random() < 0.5
        disk.operations_left = random.choice([random.randrange(1, 30), random.randrange(1, 400)])
        with stores_on(disk, **ways) as stores:
            partition.live(stores, disk)
        root = tmp_path / f"life-{number}"
        root.mkdir()
        disk.cut(root, random)
        partition.found(find(root, partition.work, random.choice(["full", "relaxed"])))
