"""`make bench-spark`: Spark's source and sink beside their ceiling, the history jobs, the exporter beside the engine.

The ceiling is the same source or sink with a server that has its replies ready (`static_pages`). All are on this
machine: Spark's JVM with two tasks at a time, their Python processes, and one server or the other. Both sides are
measured in turns, round by round, and a ratio is the median of the rounds' ratios; rounds that neighbours disturbed are
measured again. What starting a query takes is not counted, what each micro-batch takes is.

Plain rows are a payload and nothing else, as in all the figures with targets; full ones have a key and a kind as well,
which costs a server, but not the ceiling. With the cores all busy a ratio follows from the CPU time that a row costs,
here and there; so that is shown too, for it can be trusted on a machine with neighbours.

Prints tables, keeps all figures in `benchmarks/results/`, and ends with one line of JSON: the figures with targets.
"""

from __future__ import annotations

import argparse
import http.client
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks import exporter, history_jobs
from benchmarks.bench import Bench, add_quick, keep, print_table, scratch, summary, tell_about
from benchmarks.children import Child, python, running
from benchmarks.load import cpu_seconds
from benchmarks.machine import busy_seconds
from benchmarks.meter import PAYLOAD_BYTES, payloads
from benchmarks.server import Found, Measure, in_turns, ratio, summed
from benchmarks.static_pages import Recording, record_claims, record_look
from millpond.spark.formats import FORMAT
from millpond.spark.options import PARTS
from millpond.spark.session import session

SETTINGS = history_jobs.SETTINGS
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PRODUCE_BATCH = 100  # as in the other benchmarks: what producers send at a time
PARTS_WRITTEN = 4  # tasks of a write
KINDS = ("click", "view", "order")  # of full rows
CALL_TIMEOUT_S = 60
TRIGGER_LOOK_S = 0.002  # between two looks at whether a query has begun

_numbers = count(1)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything. `rows` are read or written in a round, `batch` of them in a micro-batch."""

    rows: int = 600_000
    batch: int = 300_000
    rounds: int = 5
    rounds_again: int = 3  # more of each, if so many were disturbed
    events: int = history_jobs.EVENTS
    event_rounds: int = history_jobs.ROUNDS
    exporter: exporter.Plan = exporter.FULL


FULL = Plan()
QUICK = Plan(
    rows=4_000,
    batch=2_000,
    rounds=1,
    rounds_again=0,
    events=20_000,
    event_rounds=1,
    exporter=exporter.QUICK,
)


# ---- CPU time ---------------------------------------------------------------------------------------------


def jvm_of(spark: SparkSession) -> int:
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    return int(gateway.proc.pid)


class Process(NamedTuple):
    """CPU seconds: its own, and those of its children that have ended."""

    parent: int
    own: float
    ended: float


Tree = dict[int, Process]


def tree_below(root: int) -> Tree:
    """The root and all below it, by their ids."""
    known: Tree = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text("ascii", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        user, system, ended_user, ended_system = (int(ticks) * TICK_S for ticks in fields[11:15])
        known[int(place.parent.name)] = Process(int(fields[1]), user + system, ended_user + ended_system)
    found = [root]
    for pid in found:
        found += [child for child, process in known.items() if process.parent == pid]
    return {pid: known[pid] for pid in found}


def spent_below(root: int, before: Tree, after: Tree) -> float:
    """By all but the root. What one spent that has ended is in its parent's books, or nobody knows it."""

    def is_told(pid: int, process: Process) -> bool:
        booked = process.own + process.ended
        parent = process.parent
        return pid in after or (parent in after and after[parent].ended - before[parent].ended >= booked)

    told = [process for pid, process in before.items() if is_told(pid, process)]
    spent = sum(process.own + process.ended for process in after.values())
    spent -= sum(process.own + process.ended for process in told)
    return spent - (after[root].own - before[root].own)


class Clocks:
    """What had been spent when it was made."""

    def __init__(self, jvm: int, server: int) -> None:
        self._jvm = jvm
        self._tree = tree_below(jvm)
        self._seconds = {
            "wall": time.perf_counter(),
            "jvm": self._tree[jvm].own,
            "server": cpu_seconds(server),
            "driver": time.process_time(),
            "busy": busy_seconds(),
        }

    def until(self, later: Clocks) -> dict[str, float]:
        spent = {name: seconds - self._seconds[name] for name, seconds in later._seconds.items()}
        return spent | {"python": spent_below(self._jvm, self._tree, later._tree)}


# ---- one measurement --------------------------------------------------------------------------------------


class Stand:
    """What the measurements have in common: a session, and somewhere to put things."""

    def __init__(self, spark: SparkSession, directory: Path, plan: Plan) -> None:
        self.spark = spark
        self.directory = directory
        self.plan = plan
        self._jvm = jvm_of(spark)

    def measured(self, server: Child, work: Callable[[], None]) -> dict[str, Any]:
        """Rows a second, and what a row costs whom."""
        before = Clocks(self._jvm, server.pid)
        work()
        spent = before.until(Clocks(self._jvm, server.pid))
        ours = spent["jvm"] + spent["python"] + spent["server"] + spent["driver"]
        rows = self.plan.rows
        return {
            "rate": rows / spent["wall"],
            **{f"{name}_us": spent[name] / rows * 1e6 for name in ("jvm", "python", "server")},
            "cpu_us": (ours - spent["driver"]) / rows * 1e6,
            "others_share": max(0.0, spent["busy"] - ours) / spent["wall"],
        }

    def place(self, name: str) -> str:
        return str(self.directory / f"{name}-{next(_numbers)}")

    @contextmanager
    def static(self, recording: Recording) -> Iterator[Child]:
        path = Path(self.place("recording"))
        path.write_bytes(msgspec.msgpack.encode(recording))
        with running(*python("static_pages", str(path))) as child:
            path.unlink()
            yield child


def options(server: Child, queue: str, **more: str) -> dict[str, str]:
    return {"url": f"http://127.0.0.1:{server.port}", "queue": queue, **more}


def new_queue(server: Child) -> str:
    name = f"bench-{next(_numbers)}"
    server.call("queues.create", {"name": name})
    return name


def fill(server: Child, items: int, *, full: bool = False) -> str:
    """A queue of items as producers make them. Keys have to differ, and are the dearest part of it."""
    queue = new_queue(server)
    bodies = [{"bytes": one} for one in payloads(PRODUCE_BATCH)]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=CALL_TIMEOUT_S)
    assert items % PRODUCE_BATCH == 0, items
    for start in range(0, items, PRODUCE_BATCH):
        named = [body | names(start + place) for place, body in enumerate(bodies)] if full else bodies
        request = msgspec.msgpack.encode({"queue": queue, "items": named})
        connection.request("POST", "/v1/queue.produce", request, {"content-type": "application/msgpack"})
        reply = connection.getresponse()
        reply.read()
        assert reply.status == 200, reply.status
    connection.close()
    os.sync()  # what is left to be written is not the reader's
    return queue


def names(row: int) -> dict[str, Any]:
    return {"key": f"order-{row:012}", "kind": KINDS[row % len(KINDS)]}


def ready_count(server: Child, queue: str) -> int:
    return int(server.call("queue.stats", {"queue": queue})["counts"].get("ready", 0))


def drop_queue(server: Child, queue: str) -> None:
    server.call("queues.delete", {"name": queue, "force": True})
    os.sync()  # what this one left to be written is not the next one's


# ---- the source -------------------------------------------------------------------------------------------


def started(stand: Stand, server: Child, queue: str) -> StreamingQuery:
    """A stream of all there is, to nowhere, at its first batch."""
    given = options(server, queue, consumer=f"bench-{next(_numbers)}", maxItemsPerBatch=str(stand.plan.batch))
    frame = stand.spark.readStream.format(FORMAT).options(**given).load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", stand.place("checkpoint"))
    query = writer.trigger(availableNow=True).start()
    while query.isActive and not query.status["isTriggerActive"]:
        time.sleep(TRIGGER_LOOK_S)
    return query


def consumed(stand: Stand, server: Child, queue: str) -> dict[str, Any]:
    query = started(stand, server, queue)
    found = stand.measured(server, lambda: finish(query))
    rows = sum(one.numInputRows for one in query.recentProgress)
    assert rows == stand.plan.rows, f"{rows} rows were read"
    return found


def finish(query: StreamingQuery) -> None:
    query.awaitTermination()


def measure_stream(stand: Stand, server: Child, *, full: bool) -> list[Found]:
    plan = stand.plan
    queue = fill(server, plan.rows, full=full)
    recording = record_claims(server, queue, plan.batch, PARTS)
    drop_queue(server, queue)

    def millpond() -> dict[str, Any]:
        queue = fill(server, plan.rows, full=full)
        found = consumed(stand, server, queue)
        assert ready_count(server, queue) == 0, "all are consumed"
        drop_queue(server, queue)
        return found

    with stand.static(recording) as static:
        return rounds_of(plan, {"millpond": millpond, "ceiling": lambda: consumed(stand, static, "bench")})


def looked(stand: Stand, server: Child, queue: str) -> dict[str, Any]:
    frame = stand.spark.read.format(FORMAT).options(**options(server, queue)).load()
    return stand.measured(server, lambda: frame.write.format("noop").mode("overwrite").save())


def measure_look(stand: Stand, server: Child, *, full: bool) -> list[Found]:
    """A batch read, which leaves all as it is."""
    queue = fill(server, stand.plan.rows, full=full)
    with stand.static(record_look(server, queue)) as static:
        found = rounds_of(
            stand.plan,
            {"millpond": lambda: looked(stand, server, queue), "ceiling": lambda: looked(stand, static, queue)},
        )
    drop_queue(server, queue)
    return found


# ---- the sink ---------------------------------------------------------------------------------------------


def written(stand: Stand, rows: DataFrame, server: Child, queue: str) -> dict[str, Any]:
    given = options(server, queue, txn=f"bench:{next(_numbers)}")
    return stand.measured(server, lambda: rows.write.format(FORMAT).mode("append").options(**given).save())


def measure_sink(stand: Stand, server: Child, *, full: bool) -> list[Found]:
    """Rows that are in the JVM's memory already."""
    rows = cached_rows(stand, full=full)

    def millpond() -> dict[str, Any]:
        queue = new_queue(server)
        found = written(stand, rows, server, queue)
        assert ready_count(server, queue) == stand.plan.rows, "all are written"
        drop_queue(server, queue)
        return found

    with stand.static(Recording()) as static:
        found = rounds_of(stand.plan, {"millpond": millpond, "ceiling": lambda: written(stand, rows, static, "bench")})
    rows.unpersist(blocking=True)
    return found


def cached_rows(stand: Stand, *, full: bool) -> DataFrame:
    count = stand.plan.rows
    table = pa.table({"payload": pa.array(payloads(count), pa.binary())})
    if full:
        named = [names(row) for row in range(count)]
        for name in named[0]:
            table = table.append_column(name, pa.array([one[name] for one in named]))
    rows = stand.spark.createDataFrame(table).repartition(PARTS_WRITTEN).cache()
    assert rows.count() == count
    return rows


# ---- rounds -----------------------------------------------------------------------------------------------


def rounds_of(plan: Plan, sides: dict[str, Measure]) -> list[Found]:
    """The first time of each warms up what a session does once, and does not count."""
    for measure in sides.values():
        measure()
    return in_turns(sides, plan.rounds, plan.rounds_again)


def judged(rounds: list[Found]) -> dict[str, Any]:
    return {
        "rows": [summed(rounds, side, "rate") for side in rounds[0]],
        "ratio": ratio(rounds, "millpond", "ceiling", "rate"),
        "by_cpu": summary([one["ceiling"]["cpu_us"] / one["millpond"]["cpu_us"] for one in rounds], 3),
    }


# ---- the run ----------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    title: str
    measure: Callable[[Stand, Child], list[Found]]


CONNECTOR = {
    "stream": Piece("readStream, plain rows", partial(measure_stream, full=False)),
    "look": Piece("read, plain rows", partial(measure_look, full=False)),
    "sink": Piece("write, plain rows", partial(measure_sink, full=False)),
    "stream-full": Piece("readStream, full rows", partial(measure_stream, full=True)),
    "look-full": Piece("read, full rows", partial(measure_look, full=True)),
    "sink-full": Piece("write, full rows", partial(measure_sink, full=True)),
}
PIECES = (*CONNECTOR, "history", "exporter")


def run(bench: Bench, plan: Plan, pieces: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    wanted = {name: piece for name, piece in CONNECTOR.items() if name in pieces}
    if wanted:
        found |= run_connector(bench.directory, plan, wanted)
    os.sync()
    if "history" in pieces:
        found["history"] = history_jobs.measure(bench.directory, plan.events, plan.event_rounds)
        history_jobs.show(found["history"])
    if "exporter" in pieces:
        found["exporter"] = exporter.measure(bench, plan.exporter)
        exporter.show(found["exporter"])
    found["headline"] = headline(found)
    return found


def run_connector(directory: Path, plan: Plan, pieces: dict[str, Piece]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    spark = session("bench", **SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    stand = Stand(spark, directory, plan)
    try:
        with running(*python("pond", stand.place("data"))) as server:
            for name, piece in pieces.items():
                found[name] = judged(piece.measure(stand, server))
                print_piece(piece.title, plan, found[name])
    finally:
        spark.stop()
    return found


def headline(found: dict[str, Any]) -> dict[str, float | None]:
    """Of plain rows. A source is as good as the worse of its two ways to read."""
    ratios = {name: found[name]["ratio"]["median"] for name in CONNECTOR if name in found}
    return {
        "source_vs_ceiling": min([ratios[name] for name in ("stream", "look") if name in ratios], default=None),
        "sink_vs_ceiling": ratios.get("sink"),
        "history_10m_s": found.get("history", {}).get("history_10m_s"),
        "exporter_vs_engine": found.get("exporter", {}).get("exporter_vs_engine"),
    }


def print_piece(title: str, plan: Plan, found: dict[str, Any]) -> None:
    figures = ("median", "low", "high", "server_us", "python_us", "jvm_us", "cpu_us", "others_share")
    print_table(
        f"{title}, {plan.rows:,} rows of {PAYLOAD_BYTES} bytes: rows/s, and the CPU time that a row costs",
        ("side", "rows/s", "low", "high", "server µs", "Python µs", "JVM µs", "all µs", "others' cores"),
        [[row["side"], *(row[name] for name in figures)] for row in found["rows"]],
    )
    print_table(
        "of the ceiling",
        ("by", "ratio", "low", "high"),
        [("rows/s", *found["ratio"].values()), ("CPU", *found["by_cpu"].values())],
    )


# ---- the command ------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description="Measure what runs on Spark.")
    add_quick(parser)
    parser.add_argument("--rows", type=int, help="read or written in a round")
    parser.add_argument("--batch", type=int, help="rows of a micro-batch; it divides --rows")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="+", choices=PIECES, default=PIECES, help="measure these; nothing is kept")
    parser.add_argument("--skip", nargs="+", choices=PIECES, default=(), help="leave these out; nothing is kept")
    given = parser.parse_args()
    changes = {name: getattr(given, name) for name in ("rows", "batch", "rounds") if getattr(given, name)}
    plan = msgspec.structs.replace(QUICK if given.quick else FULL, **changes)
    started = time.monotonic()
    with scratch() as directory:
        about = tell_about(directory, plan)
        pieces = [piece for piece in PIECES if piece in given.only and piece not in given.skip]
        found = {**about, **run(Bench(directory), plan, pieces)}
    found["seconds"] = round(time.monotonic() - started)
    if plan == FULL and len(pieces) == len(PIECES):
        keep(found, "spark")
    print(f"\n{found['seconds']} s")
    print(msgspec.json.encode(found["headline"]).decode())


if __name__ == "__main__":
    main()
