"""`make bench-server`: the server beside bare servers, Go's, and the engine without a server, in one run.

Load comes from a process of its own, on loopback. A shared machine is noisy, so ratios are what counts: the sides of
each are measured in turns, round by round, and a ratio is the median of the rounds' ratios. Beside each rate stands
what a request cost the server and what it cost the load, in CPU time: where a server's share of a core is well below 1
something else was the bottleneck, the load or the neighbours, and its rate says little of the server. Neighbours slow
the fast sides more than the slow ones, for those need both cores: rounds that they disturbed are measured again, and
the quietest count.

Prints tables, keeps all figures in `benchmarks/results/`, and ends with one line of JSON: the figures with targets.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.bench import CHILD_TIMEOUT_S, Bench, add_quick, keep, print_table, scratch, summary, tell_about
from benchmarks.children import ROOT, Child, process, python, running
from benchmarks.engine import LEASE_TIMEOUT
from benchmarks.load import IDLE_QUEUE, QUEUE

CONNECTIONS = 64
BATCH = 100
CALLERS = (8, 64)
HEADLINE_CALLERS = 64  # as many as there are connections with single items; the harder one: commits cost less there
OTHERS_MAX = 0.2  # cores that others used in a quiet round; the kernel, which writes to disk, is one of them
GO_BUILD_TIMEOUT_S = 120  # the standard library is built first where that was never done
PARKED_TIMEOUT_S = 30
KIB = 1 << 10

Measure = Callable[[], dict[str, Any]]
Found = dict[str, dict[str, Any]]  # by side


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything."""

    seconds: float = 1.0
    rounds: int = 7
    batch_rounds: int = 5
    idle_polls: int = 5_000
    idle_rounds: int = 5
    rounds_again: int = 2  # more of each, if so many were disturbed


FULL = Plan()
QUICK = Plan(seconds=0.1, rounds=1, batch_rounds=1, idle_polls=50, idle_rounds=1, rounds_again=0)


# ---- sides ------------------------------------------------------------------------------------------------


@contextmanager
def pond(path: str) -> Iterator[Child]:
    """The server, with the queues that the load uses."""
    with running(*python("pond", path)) as child:
        for queue in (QUEUE, IDLE_QUEUE):
            child.call("queues.create", {"name": queue, "lease_timeout": LEASE_TIMEOUT})
        yield child


def built_go(directory: Path) -> Path | None:
    """The Go server, if there is a Go to build it with. Nothing is downloaded."""
    go = shutil.which("go")
    if go is None:
        return None
    program = directory / "go-server"
    command = [go, "build", "-o", str(program), str(ROOT / "benchmarks" / "peers" / "go" / "main.go")]
    alone = {"GO111MODULE": "off", "GOTOOLCHAIN": "local", "GOPROXY": "off", "GOFLAGS": ""}
    done = subprocess.run(command, env={**os.environ, **alone}, timeout=GO_BUILD_TIMEOUT_S, check=False)
    return program if done.returncode == 0 else None


def drive(child: Child, connections: int, seconds: float, **arguments: Any) -> dict[str, Any]:
    asked = {"port": child.port, "pid": child.pid, "connections": connections, "seconds": seconds, **arguments}
    command = python("load", "drive", msgspec.json.encode(asked).decode())
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=CHILD_TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"the load {asked} ended with {done.returncode}; see its output above")
    return msgspec.json.decode(done.stdout, type=dict[str, Any])


# ---- rounds -----------------------------------------------------------------------------------------------


def in_turns(sides: dict[str, Measure], rounds: int, again: int) -> list[Found]:
    """Each side once a round, and every other round backwards, so that none always has the same neighbour.

    Rounds are judged by what others did meanwhile, never by what was found.
    """
    found: list[Found] = []
    while len(found) < rounds + again and sum(disturbance(one) <= OTHERS_MAX for one in found) < rounds:
        names = list(sides) if len(found) % 2 == 0 else list(reversed(sides))
        one = {name: sides[name]() for name in names}
        found.append({name: one[name] for name in sides})
    return sorted(found, key=disturbance)[:rounds]


def disturbance(found: Found) -> float:
    return max(float(one["others_share"]) for one in found.values())


def summed(rounds: list[Found], side: str, figure: str) -> dict[str, Any]:
    """The spread of the figure that the side is judged by, and the medians of the others."""
    others = {name: round(median(one[side][name] for one in rounds), 3) for name in rounds[0][side] if name != figure}
    return {"side": side, **summary([one[side][figure] for one in rounds]), **others}


def ratio(rounds: list[Found], side: str, other: str, figure: str) -> dict[str, float]:
    return summary([one[side][figure] / one[other][figure] for one in rounds], 3)


# ---- one item a request, in memory --------------------------------------------------------------------------


def measure_singles(bench: Bench, plan: Plan) -> dict[str, Any]:
    """All servers are there all the time: one that is not asked costs nothing."""
    with ExitStack() as stack:
        children = {
            "millpond": stack.enter_context(pond(":memory:")),
            "bare": stack.enter_context(running(*python("bare", "lean"))),
            "floor": stack.enter_context(running(*python("bare", "floor"))),
        }
        go = built_go(bench.directory)
        if go is not None:
            children["go, 1 core"] = stack.enter_context(running(str(go), environment={"GOMAXPROCS": "1"}))
            children["go"] = stack.enter_context(running(str(go)))
        sides: dict[str, Measure] = {
            name: lambda child=child: drive(child, CONNECTIONS, plan.seconds)  # type: ignore[misc]
            for name, child in children.items()
        }
        rounds = in_turns(sides, plan.rounds, plan.rounds_again)
    return {
        "rows": [summed(rounds, side, "requests") for side in sides],
        "ratios": [
            {
                "against": side,
                **ratio(rounds, "millpond", side, "requests"),
                "cpu": round(1 / ratio(rounds, "millpond", side, "server_us")["median"], 3),
            }
            for side in sides
            if side != "millpond"
        ],
    }


# ---- batches on disk ----------------------------------------------------------------------------------------


def measure_batches(bench: Bench, plan: Plan) -> list[dict[str, Any]]:
    """The same callers with a server between and without, each from an empty directory.

    The clients' produce carries a request id, which the engine remembers; so "served" does. "embedded" does not, for
    there nobody needs one. An embedded caller works in the engine's own process, on asyncio's own loop, and reads its
    items there; the load has the other core, and reads of its items only the tokens. (Neither request ids nor uvloop
    changed the embedded rates by more than 5%.)
    """
    found = []
    for callers in CALLERS:
        sides = batch_sides(bench, plan, callers)
        rounds = in_turns(sides, plan.batch_rounds, plan.rounds_again)
        for side in sides:
            row = {"callers": callers, **summed(rounds, side, "items")}
            found.append({**row, "ratio": ratio(rounds, side, "embedded", "items")})
    return found


def batch_sides(bench: Bench, plan: Plan, callers: int) -> dict[str, Measure]:
    def embedded() -> dict[str, Any]:
        with bench.fresh() as path:
            return bench.measure("embedded.callers", path=path, callers=callers, batch=BATCH, seconds=plan.seconds)

    def served(binary: bool, request_ids: bool) -> dict[str, Any]:
        with bench.fresh() as path, pond(path) as child:
            found = drive(child, callers, plan.seconds, batch=BATCH, binary=binary, request_ids=request_ids)
            return {**found, "item_us": found["server_share"] / found["items"] * 1e6}

    return {
        "embedded": embedded,
        "served": lambda: served(True, True),
        "served, no request ids": lambda: served(True, False),
        "served, JSON": lambda: served(False, False),
    }


# ---- idle polls ---------------------------------------------------------------------------------------------


def measure_idle_polls(plan: Plan) -> dict[str, Any]:
    """One server, in turns with and without leases that wait on another queue. Memory counts the first time only.

    It is what the process has, not what the kernel has for its sockets.
    """
    with pond(":memory:") as child:
        drive(child, CONNECTIONS, plan.seconds)  # what the hot calls need is not the polls'
        before = child.resident_bytes()
        growth: list[int] = []

        def busy() -> dict[str, Any]:
            return drive(child, CONNECTIONS, plan.seconds)

        def while_parked() -> dict[str, Any]:
            with parked(child, plan.idle_polls):
                growth.append(child.resident_bytes() - before)
                return busy()

        rounds = in_turns({"alone": busy, "parked": while_parked}, plan.idle_rounds, plan.rounds_again)
    slowdown = [1 - one["parked"]["requests"] / one["alone"]["requests"] for one in rounds]
    dearer = [one["parked"]["server_us"] / one["alone"]["server_us"] - 1 for one in rounds]
    return {
        "polls": plan.idle_polls,
        "kib": round(growth[0] / KIB / plan.idle_polls, 2),
        "rows": [summed(rounds, side, "requests") for side in ("alone", "parked")],
        "slowdown": summary(slowdown, 3),
        "cpu_slowdown": summary(dearer, 3),
    }


@contextmanager
def parked(child: Child, polls: int) -> Iterator[None]:
    with process(*python("load", "park", msgspec.json.encode({"port": child.port, "polls": polls}).decode())):
        wait_for_waiters(child, polls)
        yield
    wait_for_waiters(child, 0)


def wait_for_waiters(child: Child, count: int) -> None:
    give_up_at = time.monotonic() + PARKED_TIMEOUT_S
    while (waiters := child.call("queue.stats", {"queue": IDLE_QUEUE})["waiters"]) != count:
        if time.monotonic() > give_up_at:
            raise SystemExit(f"{waiters} leases wait, instead of {count}; are there enough file descriptors?")
        time.sleep(0.02)


# ---- the run ------------------------------------------------------------------------------------------------


def run(bench: Bench, plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["singles"] = measure_singles(bench, plan)
    print_singles(found["singles"])
    os.sync()  # else what others wrote before is written out while the first rounds wait for the disk
    found["batches"] = measure_batches(bench, plan)
    print_batches(found["batches"])
    found["idle_polls"] = measure_idle_polls(plan)
    print_idle_polls(found["idle_polls"])
    found["headline"] = headline(found)
    return found


def headline(found: dict[str, Any]) -> dict[str, float | None]:
    """`vs_go` is against Go on one core, for the server has one; against all of them stands in the table."""
    against = {row["against"]: row["median"] for row in found["singles"]["ratios"]}
    served = {row["callers"]: row["ratio"]["median"] for row in found["batches"] if row["side"] == "served"}
    return {
        "server_vs_bare_1": against["bare"],
        "served_vs_embedded_100": served[HEADLINE_CALLERS],
        "idle_poll_kib": found["idle_polls"]["kib"],
        "idle_poll_slowdown": found["idle_polls"]["slowdown"]["median"],
        "vs_go": against.get("go, 1 core"),
    }


# ---- printing -----------------------------------------------------------------------------------------------

SHARE_COLUMNS = ("server cores", "load cores", "others' cores")
SHARES = ("server_share", "load_share", "others_share")
REQUEST_COLUMNS = ("requests/s", "low", "high", "p50 ms", "p99 ms", "server µs", "load µs", *SHARE_COLUMNS)
REQUEST_FIGURES = ("median", "low", "high", "p50_ms", "p99_ms", "server_us", "load_us", *SHARES)


def picked(row: dict[str, Any], names: Sequence[str]) -> list[Any]:
    return [row[name] for name in names]


def print_singles(found: dict[str, Any]) -> None:
    print_table(
        f"Produce, lease, complete of one item, JSON, in memory, {CONNECTIONS} connections",
        ("server", *REQUEST_COLUMNS),
        [picked(row, ("side", *REQUEST_FIGURES)) for row in found["rows"]],
    )
    print_table(
        "millpond against",
        ("server", "ratio", "low", "high", "by CPU"),
        [row.values() for row in found["ratios"]],
    )


def print_batches(rows: list[dict[str, Any]]) -> None:
    names = ("callers", "side", "median", "low", "high", "p50_ms", "p99_ms", "item_us", *SHARES)
    print_table(
        f"Batches of {BATCH}, durable: items/s, beside the engine without a server",
        (
            *("callers", "side", "items/s", "low", "high", "p50 ms", "p99 ms", "CPU µs", *SHARE_COLUMNS),
            *("/embedded", "low", "high"),
        ),
        [[*picked(row, names), *row["ratio"].values()] for row in rows],
    )


def print_idle_polls(found: dict[str, Any]) -> None:
    print_table(
        f"The same calls with {found['polls']:,} leases that wait, {found['kib']} KiB each",
        ("", *REQUEST_COLUMNS),
        [picked(row, ("side", *REQUEST_FIGURES)) for row in found["rows"]],
    )


# ---- the command --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description="Measure the server.")
    add_quick(parser)
    quick = parser.parse_args().quick
    plan = QUICK if quick else FULL
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the children's too: a connection is a descriptor
    started = time.monotonic()
    with scratch() as directory:
        about = tell_about(directory, plan)
        found = {**about, **run(Bench(directory), plan)}
    found["seconds"] = round(time.monotonic() - started)
    if not quick:
        keep(found, "server")
    print(f"\n{found['seconds']} s")
    print(msgspec.json.encode(found["headline"]).decode())


if __name__ == "__main__":
    main()
