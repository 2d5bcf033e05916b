"""`make bench-engine`: the engine beside the bare tables it stands on, in one run.

A shared machine is noisy, by 20 to 30% from minute to minute, so ratios are what counts: the two sides of each are
measured in turns, round by round, and a ratio is the median of the rounds' ratios. Prints tables, keeps all figures in
`benchmarks/results/`, and ends with one line of JSON: the figures that have targets.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.bench import Bench, add_quick, keep, print_table, scratch, summary, tell_about

BATCHES = (1, 10, 100, 1_000)
CALLERS = (1, 64, 256)
BUSY_PRODUCERS = 4  # and twice as many consumers: the side "busy"; "engine" and "tokens" have one and two
LATENCY_CALLERS = (1, 10, 1_000)
KINDS = ("leased", "scheduled", "retrying", "keyed", "priority")
SMALL = 1_000  # items of the short queue that a lease on the backlog is compared with
MIB = 1 << 20


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything. `cycled_max` bounds a round on the backlog, so that no batch size is left with chunks
    that another one wrote."""

    seconds: float = 1.0
    rounds: int = 5
    backlog: int = 1_000_000
    cycled_max: int = 250_000
    prefill: int = 150_000
    lease_calls: int = 400
    lease_rounds: int = 5
    ready: int = 1_000_000
    kind_items: int = 100_000
    single_items: int = 20_000


FULL = Plan()
QUICK = Plan(
    seconds=0.1,
    rounds=1,
    backlog=40_000,
    cycled_max=5_000,
    prefill=5_000,
    lease_calls=20,
    lease_rounds=1,
    ready=20_000,
    kind_items=2_000,
    single_items=500,
)


class EngineBench(Bench):
    def __init__(self, directory: Path, plan: Plan) -> None:
        super().__init__(directory)
        self.plan = plan


# ---- the measurements -------------------------------------------------------------------------------------


def from_empty(bench: EngineBench, batch: int, side: str) -> dict[str, Any]:
    with bench.fresh() as path:
        seconds = bench.plan.seconds
        if side in ("raw", "floor"):
            name = "raw.cycle" if side == "raw" else "raw.floor"
            return bench.measure(name, path=path, batch=batch, seconds=seconds)
        where = ":memory:" if side == "memory" else path
        producers = BUSY_PRODUCERS if side == "busy" else 1
        return bench.measure(
            "engine.cycle", path=where, batch=batch, seconds=seconds, producers=producers, tokens=side == "tokens"
        )


def on_backlog(bench: EngineBench, batch: int, side: str) -> dict[str, Any]:
    plan = bench.plan
    name = "raw.cycle_backlog" if side == "raw" else "engine.cycle"
    path = str(bench.directory / f"backlog-{side}")
    return bench.measure(name, path=path, batch=batch, seconds=plan.seconds, items_max=plan.cycled_max)


def measure_rates(
    bench: EngineBench, sides: Sequence[str], measure: Callable[[EngineBench, int, str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row a batch size. The largest batch goes first: the chunks it leaves on the backlog are like those it found."""
    rows = []
    for batch in reversed(BATCHES):
        rounds = [{side: measure(bench, batch, side) for side in sides} for _ in range(bench.plan.rounds)]
        row: dict[str, Any] = {"batch": batch}
        for side in sides:
            row[side] = {
                **summary([one[side]["rate"] for one in rounds]),
                "cpu_us": round(median(one[side]["cpu_us"] for one in rounds), 2),
            }
        if "raw" in sides:
            row["ratio"] = summary([one["engine"]["rate"] / one["raw"]["rate"] for one in rounds], 3)
        if "busy" in sides:
            row["busy_ratio"] = summary([one["busy"]["rate"] / one["raw"]["rate"] for one in rounds], 3)
        rows.append(row)
    return rows[::-1]


def measure_callers(bench: EngineBench) -> dict[str, Any]:
    rounds = []
    for _ in range(bench.plan.rounds):
        rates = {}
        for callers in CALLERS:
            with bench.fresh() as path:
                found = bench.measure("engine.callers", path=path, callers=callers, seconds=bench.plan.seconds)
                rates[callers] = found["rate"]
        rounds.append(rates)
    rows = [{"callers": callers, **summary([one[callers] for one in rounds])} for callers in CALLERS]
    return {"rows": rows, "gain_64": summary([one[64] / one[1] for one in rounds])}


def measure_latency(bench: EngineBench) -> list[dict[str, Any]]:
    rows = []
    for callers in LATENCY_CALLERS:
        found = []
        for _ in range(bench.plan.rounds):
            with bench.fresh() as path:
                found.append(
                    bench.measure(
                        "engine.latency",
                        path=path,
                        callers=callers,
                        seconds=bench.plan.seconds,
                        prefill=bench.plan.prefill,
                    )
                )
        rows.append({"callers": callers, **{key: round(median(one[key] for one in found), 3) for key in found[0]}})
    return rows


def measure_lease_cost(bench: EngineBench) -> list[dict[str, Any]]:
    """A lease on the backlog against one on a queue of 1,000 of the same mix, whose 10 urgent items are soon gone.

    First with items in front whose priority puts them there, scattered over all chunks; then with them away.
    """
    small = str(bench.directory / "small")
    bench.measure("engine.fill", path=small, items=SMALL, kind="mixed")
    rows = []
    for head in ("urgent", "plain"):
        for batch in (1, 100):
            calls = max(2, bench.plan.lease_calls // (1 if batch == 1 else 40))
            rounds = []
            for _ in range(bench.plan.lease_rounds):
                cost = {
                    place: bench.measure(
                        "engine.lease_cost",
                        path=path,
                        batch=batch,
                        calls=calls,
                        plain=head == "plain" or place == "small",
                    )["mean_us"]
                    for place, path in (("small", small), ("backlog", str(bench.directory / "backlog-engine")))
                }
                rounds.append(cost)
            rows.append(
                {
                    "head": head,
                    "batch": batch,
                    "small_us": round(median(one["small"] for one in rounds), 1),
                    "backlog_us": round(median(one["backlog"] for one in rounds), 1),
                    "ratio": summary([one["backlog"] / one["small"] for one in rounds], 3),
                }
            )
    return rows


def measure_open(bench: EngineBench) -> list[dict[str, Any]]:
    path = str(bench.directory / "backlog-engine")
    clean, killed = [], []
    for _ in range(bench.plan.rounds):
        clean.append(bench.measure("engine.open_and_lease", path=path)["ms"])
        bench.measure("engine.cycle", path=path, batch=100, seconds=bench.plan.seconds, crash=True, killed=True)
        killed.append(bench.measure("engine.open_and_lease", path=path)["ms"])
    return [{"after": "a clean close", **summary(clean)}, {"after": "kill -9", **summary(killed)}]


def measure_memory(bench: EngineBench) -> list[dict[str, Any]]:
    """Bytes an item of each kind: of a process that opened a queue of them, against one that opened an empty queue.

    Ready items also while they come in, beyond what fills the cache of bodies. `single` are ready items of which each
    was produced in a turn of its own: the worst that a producer can do.
    """
    plan = bench.plan
    empty = reopened_bytes(bench, "ready", 0)
    rows = []
    for kind, items in (("ready", plan.ready), *((kind, plan.kind_items) for kind in KINDS)):
        rows.append(
            {"kind": kind, "items": items, "bytes": round((reopened_bytes(bench, kind, items) - empty) / items, 2)}
        )
    single = (reopened_bytes(bench, "single", plan.single_items) - empty) / plan.single_items
    rows.append({"kind": "ready, produced singly", "items": plan.single_items, "bytes": round(single, 2)})
    with bench.fresh() as path:
        live = bench.measure("engine.memory_live", path=path, before=plan.ready, more=plan.ready)
    rows.insert(1, {"kind": "ready, coming in", "items": plan.ready, "bytes": round(live["bytes_per_item"], 2)})
    return rows


def reopened_bytes(bench: EngineBench, kind: str, items: int) -> float:
    with bench.fresh() as path:
        bench.measure("engine.fill", path=path, items=items, kind=kind)
        found = [bench.measure("engine.memory_reopened", path=path) for _ in range(bench.plan.rounds)]
    return float(median(one["rss"] for one in found))


# ---- the run ----------------------------------------------------------------------------------------------


def run(bench: EngineBench) -> dict[str, Any]:
    plan = bench.plan
    found: dict[str, Any] = {}
    os.sync()  # else what others wrote before is written out while the first rounds wait for the disk
    sides: tuple[str, ...] = ("floor", "raw", "engine", "busy", "tokens")
    found["empty"] = measure_rates(bench, sides, from_empty)
    print_rates("From an empty queue, durable: items/s", found["empty"], sides)
    found["memory_store"] = measure_rates(bench, ("memory",), from_empty)
    print_rates("In memory: items/s", found["memory_store"], ("memory",))
    found["callers"] = measure_callers(bench)
    print_table(
        "Callers of one item each, durable: items/s",
        ("callers", "engine", "low", "high"),
        [(row["callers"], *cells(row)) for row in found["callers"]["rows"]],
    )
    found["latency"] = measure_latency(bench)
    print_table(
        "Lease of one item", ("callers", "leases", "p50 ms", "p99 ms"), [row.values() for row in found["latency"]]
    )
    bench.measure("raw.fill", path=str(bench.directory / "backlog-raw"), items=plan.backlog)
    backlog = str(bench.directory / "backlog-engine")
    found["backlog_counts"] = bench.measure("engine.fill", path=backlog, items=plan.backlog, kind="mixed")
    os.sync()  # else the kernel writes the backlogs out while the next rounds wait for the disk
    found["lease_cost"] = measure_lease_cost(bench)
    print_table(
        f"A lease by one caller on {plan.backlog:,} items against {SMALL:,}: µs",
        ("head", "batch", "short queue", "backlog", "ratio", "low", "high"),
        [
            (row["head"], row["batch"], row["small_us"], row["backlog_us"], *row["ratio"].values())
            for row in found["lease_cost"]
        ],
    )
    sides = ("raw", "engine")
    found["backlog"] = measure_rates(bench, sides, on_backlog)
    print_rates(f"On a backlog of {plan.backlog:,}, durable: items/s", found["backlog"], sides)
    found["open"] = measure_open(bench)
    print_table(
        "Open and lease on the backlog: ms",
        ("after", "median", "low", "high"),
        [(row["after"], *cells(row)) for row in found["open"]],
    )
    found["memory"] = measure_memory(bench)
    print_table("Memory: bytes an item", ("kind", "items", "bytes"), [row.values() for row in found["memory"]])
    found["headline"] = headline(found)
    return found


def headline(found: dict[str, Any]) -> dict[str, float]:
    """`engine_vs_raw`: from empty, one stream, so that a turn holds what raw's does; the busy ratio is in the table.
    `backlog_cost`: a lease of one item, with the worse head. Memory: the worse of the two ways to have the items.
    """
    ratios = {row["batch"]: row["ratio"]["median"] for row in found["empty"]}
    ready = max(row["bytes"] for row in found["memory"][:2])
    return {
        "engine_vs_raw_100": ratios[100],
        "engine_vs_raw_1000": ratios[1_000],
        "gain_64_callers": found["callers"]["gain_64"]["median"],
        "backlog_cost": max(row["ratio"]["median"] for row in found["lease_cost"] if row["batch"] == 1),
        "mib_per_million_ready": round(ready * 1_000_000 / MIB, 3),
    }


# ---- printing ---------------------------------------------------------------------------------------------


def print_rates(title: str, rows: list[dict[str, Any]], sides: Sequence[str]) -> None:
    """A block of columns a side, and how engine (and a busy one) compares with raw where both are there."""
    columns = ["batch"]
    for side in sides:
        columns += [side, "low", "high", "CPU µs"]
    if "raw" in sides:
        columns += ["engine/raw", "low", "high"]
    if "busy" in sides:
        columns += ["busy/raw"]
    lines = []
    for row in rows:
        line = [row["batch"]]
        for side in sides:
            line += [*cells(row[side]), row[side]["cpu_us"]]
        if "raw" in sides:
            line += cells(row["ratio"])
        if "busy" in sides:
            line += [row["busy_ratio"]["median"]]
        lines.append(line)
    print_table(title, columns, lines)


def cells(row: dict[str, Any]) -> tuple[float, float, float]:
    return row["median"], row["low"], row["high"]


# ---- the command ------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measure the engine.")
    add_quick(parser)
    quick = parser.parse_args().quick
    plan = QUICK if quick else FULL
    started = time.monotonic()
    with scratch() as directory:
        about = tell_about(directory, plan)
        found = {**about, **run(EngineBench(directory, plan))}
    found["seconds"] = round(time.monotonic() - started)
    if not quick:
        keep(found, "engine")
    print(f"\n{found['seconds']} s")
    print(msgspec.json.encode(found["headline"]).decode())


if __name__ == "__main__":
    main()
