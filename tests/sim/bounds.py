"""Bounds of the engine, made so small that a short run meets them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from random import Random
from types import ModuleType

from millpond.queue import claims, decisions, draining, lane, leases, operations, pace, settling, stages, transfer

SINGLY = 100  # fewer at a time than that, a partition takes many ticks to drain


class Bounds:
    """`dice` are for those of rebalances, `speed` for how fast they may be, `rng` for the others."""

    def __init__(self, rng: Random, dice: Random, speed: Random) -> None:
        self._chosen = {
            (lane, "SNAPSHOT_ROWS"): rng.choice((1, 7, 40, 20_000)),
            (lane, "CHUNK_ITEMS_MAX"): rng.choice((2, 4, 1_000)),
            (lane, "TRIM_INTERVAL_MS"): rng.choice((1_000, 60_000)),
            (operations, "SCAN_BATCH"): rng.choice((2, 5, 500)),
            (transfer, "TRANSFER_BATCH"): rng.choice((1, 3, 500)),
            (leases, "SPAN_MIN"): rng.choice((1, 3, 16)),
            (claims, "CHUNKS_MIN"): rng.choice((1, 2, 8)),
            (claims, "CLAIM_PAGE_BYTES"): rng.choice((20, 8 << 20)),
            (stages, "TURN_BYTES_MAX"): rng.choice((60, 16 << 20)),
            (settling, "PUBLISH_NAMED_MAX"): rng.choice((1, 20_000)),
            (settling, "STAGE_TIMEOUT_MS"): rng.choice((4_000, 60_000, 86_400_000)),
            (decisions, "CLAIM_MEMORY_MS"): rng.choice((30_000, 7 * 86_400_000)),
            (draining, "CARRY_BATCH"): dice.choice((1, 3, 200)),
            (draining, "NAMES_BATCH"): dice.choice((1, 3, 5_000)),
            (pace, "CARRIED_A_SECOND"): speed.choice((20, 300, 1_000)),
        }

    @property
    def stage_timeout(self) -> int:
        return self._chosen[settling, "STAGE_TIMEOUT_MS"]

    @property
    def claim_memory(self) -> int:
        return self._chosen[decisions, "CLAIM_MEMORY_MS"]

    @property
    def singly(self) -> bool:
        """Whether what leaves a partition may have to go in small steps."""
        steps = ((draining, "CARRY_BATCH"), (draining, "NAMES_BATCH"), (transfer, "TRANSFER_BATCH"))
        return any(self._chosen[step] < SINGLY for step in steps)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        usual = {(module, name): getattr(module, name) for module, name in self._chosen}
        try:
            _set(self._chosen)
            yield
        finally:
            _set(usual)


def _set(bounds: Mapping[tuple[ModuleType, str], int]) -> None:
    for (module, name), bound in bounds.items():
        setattr(module, name, bound)
