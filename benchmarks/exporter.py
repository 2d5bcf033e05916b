"""The exporter beside the engine whose journal it exports: `python -m benchmarks.exporter`.

Both are measured in turns, round by round: the engine works for a while, durably and in batches of 100, one stream;
then the exporter brings all of it from the pond's files into Parquet, through the API. Events are changes of state,
three for each item. A ratio of 1 keeps up. Then both at once, the exporter as a second process on the same directory:
how far behind it was when the engine stopped, and what it cost the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

import millpond
from benchmarks.bench import CHILD_TIMEOUT_S, Bench, print_table, scratch, summary
from benchmarks.children import ROOT
from benchmarks.engine import QUEUE
from millpond.directory import SOCKET
from millpond.errors import Unavailable
from millpond.history.exporter import SyncReport, sync
from millpond.history.lake import Lake
from millpond.history.lookup import timeline, totals

BATCH = 100
EVENTS_AN_ITEM = 3  # produced, leased, completed
INTERVAL = 0.2  # seconds between the passes of an exporter that follows
LOOK_UPS = 20


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float = 2.0
    rounds: int = 5
    beside_seconds: float = 6.0


FULL = Plan()
QUICK = Plan(seconds=0.1, rounds=1, beside_seconds=0.5)


# ---- in processes of their own ------------------------------------------------------------------------------


async def export(path: str, lake: str) -> dict[str, Any]:
    """All of a pond that nobody uses; and what a look at one item takes then."""
    async with millpond.open_async(path) as pond:
        await pond.stats(QUEUE)  # awake: what opening takes is not the exporter's
        wall, cpu = time.perf_counter(), time.process_time()
        report = await sync(pond, lake)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        own = (await pond.stats(QUEUE)).totals
    assert {name: count for name, count in totals(Lake(lake), QUEUE).items() if count} == own
    return {
        "events": report.events,
        "rate": report.events / wall,
        "cpu_us": cpu / report.events * 1e6,
        "bytes": report.bytes / report.events,
        "files": report.files,
        "look_up_ms": look_up_ms(Lake(lake)),
    }


def look_up_ms(lake: Lake) -> float:
    """The median time to find all that happened to one item, here and there in the lake."""
    file = lake.files()[0]
    items = totals(lake, QUEUE)["produced"]
    spent = []
    for place in range(1, LOOK_UPS + 1):
        start = time.perf_counter()
        found = timeline(lake, f"{file.span.incarnation}-{file.span.partition}-{items * place // LOOK_UPS}")
        spent.append(time.perf_counter() - start)
        assert found, "an item that was produced has a history"
    return median(spent) * 1e3


async def follow(path: str, lake: str) -> dict[str, Any]:
    """Beside the pond's owner, until told on stdin that it has stopped; then as fast as it can to the end."""
    stop, passes = asyncio.Event(), SyncReport()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(stop.set)), daemon=True).start()
    async with millpond.open_async(path) as pond:
        await sync(pond, lake, follow=True, interval=INTERVAL, stop=stop, on_pass=passes.join)
        start = time.perf_counter()
        while True:
            try:
                await sync(pond, lake)
                break
            except Unavailable:  # it is taking the owner's place
                continue
        behind = time.perf_counter() - start
        own = (await pond.stats(QUEUE)).totals
    found = {name: count for name, count in totals(Lake(lake), QUEUE).items() if count}
    assert found == own, "all of it, once"
    return {"events": sum(found.values()), "before": passes.events, "behind_s": behind}


# ---- measurements -------------------------------------------------------------------------------------------


def child(name: str, **arguments: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.exporter", "--child", name, msgspec.json.encode(arguments).decode()]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def result_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Its last words; its stdin ends now."""
    said, _ = process.communicate(timeout=CHILD_TIMEOUT_S)
    if process.returncode:
        raise SystemExit(f"{process.args!r} ended with {process.returncode}; see its output above")
    return msgspec.json.decode(said.splitlines()[-1], type=dict[str, Any])


def measure_round(bench: Bench, seconds: float) -> dict[str, dict[str, Any]]:
    with bench.fresh() as path:
        engine = bench.measure("engine.cycle", path=path, batch=BATCH, seconds=seconds)
        os.sync()  # what the engine left to be written is not the exporter's
        exporter = result_of(child("export", path=path, lake=f"{path}-lake"))
    return {"engine": engine, "exporter": exporter}


def measure_beside(bench: Bench, seconds: float) -> dict[str, Any]:
    """The engine with an exporter on its directory."""
    with bench.fresh() as path:
        arguments = msgspec.json.encode({"path": path, "batch": BATCH, "seconds": seconds}).decode()
        command = [sys.executable, "-m", "benchmarks.child", "engine.cycle", arguments]
        engine = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        while not (Path(path) / SOCKET).exists() and engine.poll() is None:
            time.sleep(0.01)
        exporter = child("follow", path=path, lake=f"{path}-lake")
        worked = result_of(engine)
        followed = result_of(exporter)
    return {"rate": worked["rate"], **followed}


def measure(bench: Bench, plan: Plan) -> dict[str, Any]:
    """What `exporter_vs_engine` is made of, and that figure: the median of the rounds' ratios."""
    rounds = [measure_round(bench, plan.seconds) for _ in range(plan.rounds)]
    ratios = [one["exporter"]["rate"] / (EVENTS_AN_ITEM * one["engine"]["rate"]) for one in rounds]
    beside = measure_beside(bench, plan.beside_seconds)
    alone = median(one["engine"]["rate"] for one in rounds)
    return {
        "engine_events": summary([EVENTS_AN_ITEM * one["engine"]["rate"] for one in rounds]),
        "exporter_events": summary([one["exporter"]["rate"] for one in rounds]),
        "ratio": summary(ratios, 3),
        **{key: round(median(one["exporter"][key] for one in rounds), 3) for key in ("cpu_us", "bytes", "look_up_ms")},
        "beside": {
            "engine_share": round(beside["rate"] / alone, 3),
            "behind_events": beside["events"] - beside["before"],
            "behind_s": round(beside["behind_s"], 3),
            "events": beside["events"],
        },
        "exporter_vs_engine": round(median(ratios), 3),
    }


def show(found: dict[str, Any]) -> None:
    print_table(
        "Exporter and engine, durable, batches of 100: events/s",
        ("side", "median", "low", "high"),
        [
            (side, row["median"], row["low"], row["high"])
            for side, row in (
                ("engine", found["engine_events"]),
                ("exporter", found["exporter_events"]),
                ("exporter/engine", found["ratio"]),
            )
        ],
    )
    print_table(
        "An event costs",
        ("CPU µs", "bytes", "an item's timeline, ms"),
        [(found["cpu_us"], found["bytes"], found["look_up_ms"])],
    )
    beside = found["beside"]
    print_table(
        "Both at once",
        ("engine's rate, of that alone", "events", "behind when it stopped", "made up for in s"),
        [(beside["engine_share"], beside["events"], beside["behind_events"], beside["behind_s"])],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exporter", description="Measure the exporter.")
    parser.add_argument("--quick", action="store_true", help="see that it runs; the figures mean nothing")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "ARGUMENTS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        name, arguments = given.child
        found = asyncio.run({"export": export, "follow": follow}[name](**msgspec.json.decode(arguments)))
        print(msgspec.json.encode(found).decode())
        return
    with scratch() as directory:
        found = measure(Bench(directory), QUICK if given.quick else FULL)
    show(found)
    print(msgspec.json.encode({"exporter_vs_engine": found["exporter_vs_engine"]}).decode())


if __name__ == "__main__":
    main()
