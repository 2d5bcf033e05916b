"""`make bench-stores`: partitions in PostgreSQL beside what others do there, a snapshot that is held, and rebalances.

One PostgreSQL, started here, for all sides, with a durable commit for each. Beside millpond stand a table of items that
are found with SKIP LOCKED, updated and deleted, and procrastinate, all with 64 clients. Peers are measured
with each of the settings named here, and the best one counts. Sides are measured in turns, each in a new database.

A snapshot keeps vacuum from its work in its own database only: one without it, measured in turns before and
after, tells what the machine did meanwhile.

Prints tables, keeps all figures in `benchmarks/results/`, and ends with one line of JSON: the figures with targets.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import IO, Any

import msgspec
import psycopg

from benchmarks.bench import Bench, add_quick, keep, print_table, scratch, summary, tell_about
from benchmarks.children import ROOT, process, python
from benchmarks.jobs import PEERS_PYTHON, ran
from tests.postgres.server import Server


class Way(msgspec.Struct, frozen=True):
    """What the clients of SKIP LOCKED are, how many connections they share, and whether the table is pgmq's or lean."""

    clients: str
    connections: int
    lean: bool = False

    @property
    def name(self) -> str:
        return f"{self.clients}, {self.connections} connections{', lean' if self.lean else ''}"


PEERS = ROOT / "benchmarks" / "peers" / "stores"
CLIENTS = 64
BATCHES = (100, 1_000)
BATCH = 100  # where only one is measured
PARTITIONS = (1, 2)  # of ours; 1 is what a queue has by default, and what is compared
WAYS = (  # of SKIP LOCKED; more connections than this were slower
    Way("async", 16),
    Way("threads", 16),
    Way("async", 8, lean=True),
    Way("threads", 16, lean=True),
)
CONNECTIONS = (16, 64)  # of procrastinate
GIB = 1 << 30
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_connections": "200",
    "shared_buffers": "512MB",
    "min_wal_size": "2GB",
    "max_wal_size": "4GB",
    "log_min_messages": "fatal",
}

_numbers = count(1)
Rates = dict[str, dict[str, list[float]]]  # by side and setting
Measure = Callable[[], float]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything. A held snapshot is the dearest: `held_gib` bounds the disk that it takes, as nothing is
    vacuumed meanwhile; when so much is used, the snapshot is held without load. `log_mib` is what the server has
    written before anything is measured."""

    log_mib: int = 1_024
    seconds: float = 4.0
    rounds: int = 3
    jobs: int = 2_000
    held_seconds: float = 600.0
    held_gib: float = 24.0
    held_step: float = 18.0
    peer_step: float = 2.0
    pairs: int = 8
    rebalance_rounds: int = 5
    rebalance_seconds: float = 4.0
    rebalance_ready: int = 50_000
    rebalance_carried: int = 5_000


FULL = Plan()
QUICK = Plan(
    log_mib=0,
    seconds=0.3,
    rounds=1,
    jobs=150,
    held_seconds=1.0,
    held_step=0.5,
    peer_step=0.3,
    pairs=1,
    rebalance_rounds=1,
    rebalance_seconds=0.3,
    rebalance_ready=1_000,
    rebalance_carried=300,
)


class Stage:
    """Where all of it happens: the server, and a directory for the rest."""

    def __init__(self, directory: Path, server: Server, plan: Plan) -> None:
        self.bench = Bench(directory)
        self.server = server
        self.plan = plan

    @contextmanager
    def database(self) -> Iterator[str]:
        """The address of a new one, on a server that has written out what it had to."""
        name = f"bench_{next(_numbers)}"
        self.server.ask(f"CREATE DATABASE {name} STRATEGY file_copy")  # which begins and ends with a checkpoint
        try:
            yield self.server.url(database=name)
        finally:
            self.server.ask(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def stage(plan: Plan) -> Iterator[Stage]:
    with scratch() as directory:
        directory.chmod(0o711)  # the server may be another user
        server = Server(SETTINGS, directory)
        try:
            server.start()
            age(server, plan.log_mib)
            yield Stage(directory, server, plan)
        finally:
            server.remove()


def age(server: Server, mib: int) -> None:
    """A server that has been at work for a while has log files to write over; a new one makes each of them first."""
    with server.connect() as connection:
        for _ in range(mib):
            connection.execute("SELECT pg_logical_emit_message(false, 'bench', repeat('x', 1048576))")
        connection.execute("CHECKPOINT")


def peer(program: str, url: str, **asked: Any) -> float:
    words = (PEERS_PYTHON, PEERS / program, url, msgspec.json.encode(asked).decode())
    told = ran(*words, environment={"PYTHONPATH": str(ROOT)})
    return float(msgspec.json.decode(told.splitlines()[-1])["rate"])


def skip_locked(url: str, batch: int, seconds: float, way: Way) -> float:
    asked = {"batch": batch, "clients": CLIENTS, "seconds": seconds}
    return peer("skip_locked.py", url, way=way.clients, connections=way.connections, lean=way.lean, **asked)


# ---- cycles -------------------------------------------------------------------------------------------------


def cycle_sides(here: Stage, batch: int) -> dict[str, dict[str, Measure]]:
    plan = here.plan

    def ours(partitions: int) -> float:
        with here.database() as url, here.bench.fresh() as path:
            asked: dict[str, Any] = {"batch": batch, "clients": CLIENTS, "seconds": plan.seconds}
            found = here.bench.measure("postgres.cycle", path=path, url=url, partitions=partitions, **asked)
            return float(found["rate"])

    def table(way: Way) -> float:
        with here.database() as url:
            return skip_locked(url, batch, plan.seconds, way)

    def procrastinate(connections: int) -> float:
        with here.database() as url:
            asked = {"batch": batch, "jobs": plan.jobs, "concurrency": CLIENTS, "connections": connections}
            return peer("procrastinate_cycle.py", url, **asked)

    return {
        "millpond": {partitions_named(many): partial(ours, many) for many in PARTITIONS},
        "skip locked": {way.name: partial(table, way) for way in WAYS},
        "procrastinate": {f"{many} connections": partial(procrastinate, many) for many in CONNECTIONS},
    }


def partitions_named(many: int) -> str:
    return f"{many} partition{'s' if many > 1 else ''}"


def measure_cycles(here: Stage, batch: int) -> dict[str, Any]:
    sides = cycle_sides(here, batch)
    found: Rates = {side: {name: [] for name in settings} for side, settings in sides.items()}
    for _ in range(here.plan.rounds):
        for side, settings in sides.items():
            for name, measure in settings.items():
                found[side][name].append(measure())
    ours = found["millpond"][partitions_named(PARTITIONS[0])]
    return {
        "batch": batch,
        "rates": {side: {name: summary(rates) for name, rates in one.items()} for side, one in found.items()},
        "ratios": {side: ratio(ours, found[side]) for side in found if side != "millpond"},
    }


def ratio(ours: list[float], settings: Mapping[str, list[float]]) -> dict[str, float]:
    """Round by round, against the setting with the best median."""
    best = max(settings.values(), key=median)
    return summary([one / other for one, other in zip(ours, best, strict=True)], 2)


# ---- a snapshot that is held --------------------------------------------------------------------------------


class Held:
    """Two databases with a queue of ours and a table of the peer's in each. In one of them a snapshot will be held."""

    def __init__(self, here: Stage, urls: Mapping[str, str], asks: IO[str], answers: IO[str]) -> None:
        self._plan = here.plan
        self._urls = urls
        self._asks = asks
        self._answers = answers

    def ours(self, where: str, seconds: float) -> float:
        asked = {"pond": where, "batch": BATCH, "clients": CLIENTS, "seconds": seconds}
        print(msgspec.json.encode(asked).decode(), file=self._asks, flush=True)
        return float(msgspec.json.decode(self._answers.readline())["rate"])

    def table(self, where: str, seconds: float) -> float:
        return skip_locked(self._urls[where], BATCH, seconds, WAYS[0])

    def pairs(self) -> dict[str, dict[str, list[float]]]:
        """Each side in both databases, in turns."""
        found: Rates = {"millpond": {"held": [], "free": []}, "skip locked": {"held": [], "free": []}}
        for number in range(self._plan.pairs):
            for where in ("held", "free") if number % 2 == 0 else ("free", "held"):
                found["millpond"][where].append(self.ours(where, self._plan.peer_step))
                found["skip locked"][where].append(self.table(where, self._plan.peer_step))
        return found

    def hold(self) -> dict[str, Any]:
        """Load in the database whose snapshot is held, mostly ours. What it does by the way is told as it comes."""
        plan, steps, loaded = self._plan, [], 0.0
        with psycopg.connect(self._urls["held"]) as holder:
            holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            holder.execute("SELECT count(*) FROM pg_class")
            started = time.monotonic()
            while loaded < plan.held_seconds:
                gib = self._gib()
                if gib < plan.held_gib:
                    ours, others = self.ours("held", plan.held_step), self.table("held", plan.peer_step)
                    steps.append({"at": round(time.monotonic() - started), "ours": ours, "peer": others, "gib": gib})
                    print(".", end="", flush=True)
                else:
                    time.sleep(plan.held_step)
                loaded += plan.held_step
            gib = self._gib()
            after = self.pairs()
            seconds = time.monotonic() - started
        return {"steps": steps, "after": after, "gib": round(gib, 2), "seconds": round(seconds)}

    def _gib(self) -> float:
        with psycopg.connect(self._urls["held"]) as connection:
            row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
            assert row is not None
            return float(row[0]) / GIB


def measure_held(here: Stage) -> dict[str, Any]:
    with here.database() as held_url, here.database() as free_url, here.bench.fresh() as path:
        urls = {"held": held_url, "free": free_url}
        places = {name: {"path": f"{path}-{name}", "url": url} for name, url in urls.items()}
        with process(*python("on_postgres", msgspec.json.encode(places).decode())) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            held = Held(here, urls, child.stdin, child.stdout)
            held.pairs()  # warms both up
            before = held.pairs()
            found = held.hold()
    sides = {side: cost(before[side], found["after"][side]) for side in before}
    return {**found, "before": before, "sides": sides, "load_seconds": len(found["steps"]) * here.plan.held_step}


def cost(before: Mapping[str, list[float]], after: Mapping[str, list[float]]) -> dict[str, float]:
    """How much slower the held database is than the free one in the same seconds, which began alike."""
    shares = [one / other for one, other in zip(after["held"], after["free"], strict=True)]
    return {
        "before": round(median(before["held"]), 1),
        "after": round(median(after["held"]), 1),
        "free_before": round(median(before["free"]), 1),
        "free_after": round(median(after["free"]), 1),
        "cost": round(1 - median(shares), 3),
    }


# ---- rebalances ---------------------------------------------------------------------------------------------


def measure_rebalances(here: Stage) -> dict[str, Any]:
    kinds = {"directories": in_directories, "PostgreSQL": in_databases}
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(here.plan.rebalance_rounds):
        for kind, places in kinds.items():
            with here.bench.fresh() as path, places(here, path) as stores:
                found[kind].append(rebalance(here, path, stores))
    return {kind: summed(rounds) for kind, rounds in found.items()}


@contextmanager
def in_directories(here: Stage, path: str) -> Iterator[list[dict[str, str]]]:
    yield [{"name": name, "driver": "sqlite", "path": f"{path}-{name}"} for name in ("old", "new")]


@contextmanager
def in_databases(here: Stage, path: str) -> Iterator[list[dict[str, str]]]:
    with here.database() as old, here.database() as new:
        yield [{"name": name, "driver": "postgres", "url": url} for name, url in (("old", old), ("new", new))]


def rebalance(here: Stage, path: str, stores: list[dict[str, str]]) -> dict[str, Any]:
    plan = here.plan
    return here.bench.measure(
        "rebalancing.rebalanced",
        path=path,
        stores=stores,
        batch=BATCH,
        clients=CLIENTS,
        seconds=plan.rebalance_seconds,
        ready=plan.rebalance_ready,
        carried=plan.rebalance_carried,
    )


def summed(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    totals = {name: sum(one[name] for one in rounds) for name in ("items", "lost", "doubled")}
    by_round = [one["phases"] for one in rounds]
    phases = [
        {
            "phase": phase,
            **summary([one[phase]["rate"] for one in by_round]),
            "seconds": round(median(one[phase]["seconds"] for one in by_round), 1),
            "ratio": summary([one[phase]["rate"] / one["before"]["rate"] for one in by_round], 3),
        }
        for phase in by_round[0]
    ]
    return {**totals, "phases": phases}


# ---- the run ------------------------------------------------------------------------------------------------


def run(here: Stage) -> dict[str, Any]:
    os.sync()  # else what others wrote before is written out while the first rounds wait for the disk
    cycles = [measure_cycles(here, batch) for batch in BATCHES]
    print_cycles(cycles)
    rebalanced = measure_rebalances(here)
    print_rebalances(rebalanced)
    held = measure_held(here)
    print_held(held)
    found = {"cycles": cycles, "rebalances": rebalanced, "held": held}
    return {**found, "headline": headline(found)}


def headline(found: dict[str, Any]) -> dict[str, float | int]:
    """`postgres_vs_…_64`: the worse of the batches. `rebalance_throughput`: of the worst phase, and nothing may be lost
    or doubled in any."""
    ratios = {row["batch"]: row["ratios"] for row in found["cycles"]}
    rates = {row["batch"]: row["rates"] for row in found["cycles"]}
    figures: dict[str, float | int] = {}
    for side in ("skip locked", "procrastinate"):
        name = f"postgres_vs_{side.replace(' ', '_')}_64"
        by_batch = {f"{name}_{batch}": one[side]["median"] for batch, one in ratios.items()}
        figures |= {name: min(by_batch.values()), **by_batch}
    for batch, sides in rates.items():
        figures[f"postgres_items_{batch}"] = sides["millpond"][partitions_named(1)]["median"]
        figures[f"skip_locked_items_{batch}"] = max(one["median"] for one in sides["skip locked"].values())
        figures[f"procrastinate_items_{batch}"] = max(one["median"] for one in sides["procrastinate"].values())
    held, rebalanced = found["held"], found["rebalances"].values()
    return {
        **figures,
        "held_snapshot_cost": held["sides"]["millpond"]["cost"],
        "held_snapshot_cost_skip_locked": held["sides"]["skip locked"]["cost"],
        "held_snapshot_seconds": held["seconds"],
        "rebalance_throughput": min(phase["ratio"]["median"] for one in rebalanced for phase in one["phases"]),
        "rebalance_lost": sum(one["lost"] for one in rebalanced),
        "rebalance_doubled": sum(one["doubled"] for one in rebalanced),
    }


# ---- printing -----------------------------------------------------------------------------------------------


def print_cycles(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print_table(
            f"Produce, lease, complete in batches of {row['batch']:,}, {CLIENTS} clients, durable: items/s",
            ("side", "with", "median", "low", "high"),
            [(side, name, *one.values()) for side, of in row["rates"].items() for name, one in of.items()],
        )
        print_table(
            f"millpond, {partitions_named(PARTITIONS[0])}, against the best of",
            ("side", "ratio", "low", "high"),
            [(side, *one.values()) for side, one in row["ratios"].items()],
        )


def print_rebalances(found: dict[str, Any]) -> None:
    for kind, one in found.items():
        print_table(
            f"A queue in {kind} while it is rebalanced: {one['items']:,} items, {one['lost']} lost, "
            f"{one['doubled']} doubled; items/s",
            ("phase", "median", "low", "high", "seconds", "/before", "low", "high"),
            [
                (row["phase"], row["median"], row["low"], row["high"], row["seconds"], *row["ratio"].values())
                for row in one["phases"]
            ],
        )


def print_held(found: dict[str, Any]) -> None:
    print_table(
        "\nWith a snapshot held: items/s by the way",
        ("s", "millpond", "skip locked", "GiB"),
        [step.values() for step in found["steps"]],
    )
    print_table(
        f"A snapshot held for {found['seconds']} s, {found['load_seconds']:g} s of them with our load: items/s",
        ("side", "before", "after", "free before", "free after", "cost"),
        [(side, *one.values()) for side, one in found["sides"].items()],
    )


# ---- the command --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores", description="Measure stores and rebalances.")
    add_quick(parser)
    parser.add_argument(
        "--held-seconds", type=float, help=f"how long a snapshot is held, {FULL.held_seconds:g} if not said"
    )
    given = parser.parse_args()
    plan = QUICK if given.quick else FULL
    if given.held_seconds is not None:
        plan = msgspec.structs.replace(plan, held_seconds=given.held_seconds)
    started = time.monotonic()
    with stage(plan) as here:
        about = tell_about(here.bench.directory, plan)
        about["postgres"] = {"version": here.server.ask("SHOW server_version")[0][0], **SETTINGS}
        found = {**about, **run(here)}
    found["seconds"] = round(time.monotonic() - started)
    if plan == FULL:
        keep(found, "stores")
    print(f"\n{found['seconds']} s")
    print(msgspec.json.encode(found["headline"]).decode())


if __name__ == "__main__":
    main()
