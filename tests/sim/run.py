"""Runs the simulator: `python -m tests.sim.run --ops 100000 --seed 1`.

Seeds are run one after the other, from `--seed` on, each with `--each` operations (submitted requests and applied
faults), until `--ops` are done or `--seeds` are used up, on all cores. A violation is printed with the command that
replays its seed. The last line is `N operations, S seeds, V violations`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from typing import NamedTuple

from tests.sim.faults import Pairs
from tests.sim.nouns import Violation
from tests.sim.world import World

OPS_EACH = 1_000  # operations of a seed: long enough for faults to meet, short enough to be read


class Outcome(NamedTuple):
    seed: int
    ops: int
    pairs: dict[tuple[str, str], int]
    violation: str | None


class Summary:
    def __init__(self) -> None:
        self.ops = 0
        self.seeds = 0
        self.violations: list[Outcome] = []
        self.pairs = Pairs()

    def add(self, outcome: Outcome) -> None:
        self.ops += outcome.ops
        self.seeds += 1
        self.pairs.add(outcome.pairs)
        if outcome.violation is not None:
            self.violations.append(outcome)

    def line(self) -> str:
        return f"{self.ops} operations, {self.seeds} seeds, {len(self.violations)} violations"


def run_seed(task: tuple[int, int]) -> Outcome:
    seed, ops = task
    world = World(seed, ops)
    violation = None
    try:
        world.run()
    except Violation as found:
        violation = str(found)
    return Outcome(seed, world.ops, world.pairs.counts, violation)


def replay_command(seed: int, each: int) -> str:
    return f"python -m tests.sim.run --seed {seed} --seeds 1 --each {each}"


def simulate(seed: int, seeds: int, each: int = OPS_EACH, jobs: int | None = None, step: int = 1) -> Summary:
    summary = Summary()
    tasks = [(one, each) for one in range(seed, seed + seeds * step, step)]
    for outcome in _outcomes(tasks, jobs or os.cpu_count() or 1):
        summary.add(outcome)
        if outcome.violation is not None:
            print(f"seed {outcome.seed}: {outcome.violation}\nreplay: {replay_command(outcome.seed, each)}", flush=True)
    return summary


def _outcomes(tasks: list[tuple[int, int]], jobs: int) -> Iterator[Outcome]:
    """In the order of the seeds, however many processes there are."""
    if jobs == 1 or len(tasks) == 1:
        yield from map(run_seed, tasks)
        return
    with get_context("spawn").Pool(jobs) as pool:
        outcomes: Iterable[Outcome] = pool.imap(run_seed, tasks, chunksize=4)
        yield from outcomes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, help="operations in all; default: one seed's")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, help="seeds; default: as many as the operations need")
    parser.add_argument("--step", type=int, default=1, help="from one seed to the next: 4 for those with rebalances")
    parser.add_argument("--each", type=int, default=OPS_EACH, help="operations of a seed")
    parser.add_argument("--pairs-min", type=int, default=0, help="fail if a request met a fault less often than this")
    parser.add_argument("--jobs", type=int, help="processes; default: as many as there are cores")
    options = parser.parse_args(arguments)
    seeds = options.seeds
    if seeds is None:
        seeds = max(1, -(-(options.ops or options.each) // options.each))
    summary = simulate(options.seed, seeds, options.each, options.jobs, options.step)
    print(summary.pairs.table())
    (kind, fault), count = summary.pairs.rarest()
    print(f"rarest pair: {kind} with {fault}, {count} times; at least {options.pairs_min} wanted")
    print(summary.line())
    return 1 if summary.violations or count < options.pairs_min else 0


if __name__ == "__main__":
    sys.exit(main())
