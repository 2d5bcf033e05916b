"""A server, a driver and what they do, through kill after kill; at the end every item is where it should be, once."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet

from tests.spark.cluster import Process, driver_environment, local_cluster
from tests.spark.torture.gate import gate
from tests.spark.torture.lasting import Down, LastingServer
from tests.spark.torture.points import ANY_INSTANT, LOGS, Given, Kill, Query, Trigger, Victim
from tests.spark.torture.trap import Trap

DEADLINE_S = 180.0  # for a point to come or a queue to be empty: two sessions may have to start, on a busy machine
LOOK_S = 0.001  # between looks at a checkpoint: the next step of Spark's takes longer
ASK_S = 0.05  # between questions to a server
MORE_S = 30.0  # without the point, after which more items come: some points take another batch
INSTANT_S = 2.5  # a random instant is within so long after the driver is heard of
TRIES = 1_000  # of a task: none is given up for being killed
SOURCES = {Query.PARQUET: "from/parquet", Query.QUEUE: "from/queue"}
TARGET = "to/queue"

LOCAL = {"spark.master": f"local[2,{TRIES}]"}
CLUSTER = local_cluster() | {"spark.deploy.maxExecutorRetries": "-1"}
SETTINGS = {"spark.default.parallelism": "2", "spark.task.maxFailures": str(TRIES)}


class Broken(AssertionError):
    """What must not be."""


@dataclass(frozen=True)
class Setup:
    """`items_max` of a micro-batch; a wave is somewhat more."""

    seed: str
    executors: bool = False
    trigger: Trigger = Trigger.ALWAYS
    partitions: int = 2
    items_max: int = 30
    waves: tuple[int, ...] = (75,)

    def __str__(self) -> str:
        where = "on a cluster" if self.executors else "in one process"
        return f"{where}, {self.trigger}, {self.partitions} partitions, batches of {self.items_max}"


class World:
    def __init__(self, folder: Path, setup: Setup, say: Callable[[str], None] = lambda line: None) -> None:
        self._folder = folder
        self._setup = setup
        self._say = say
        self._random = Random(setup.seed)
        self._stack = ExitStack()
        self._produced: dict[Query, Counter[tuple[str, str]]] = {query: Counter() for query in Query}
        self._waves = 0
        self._environment = _environment(folder)
        self.done: Counter[Kill] = Counter()

    def __enter__(self) -> World:
        self._server = LastingServer(self._folder / "data")
        self._stack.callback(self._server.close)
        for queue in (*SOURCES.values(), TARGET):
            self._server.must("queues.create", name=queue, partitions=self._setup.partitions)
        queues = {queue: query for query, queue in SOURCES.items()} | {TARGET: Query.QUEUE}
        self._trap = Trap(queues, self._server.kill, self._order, self._random)
        self._stack.callback(self._trap.end)
        self._url = self._stack.enter_context(gate(self._trap, self._server.address))
        self._start_driver()
        return self

    def __exit__(self, *_: object) -> None:
        self._trap.end()
        self._stack.close()

    def run(self, kills: Sequence[Kill]) -> None:
        for kill in kills:
            began = time.monotonic()
            self._round(kill)
            self.done[kill] += 1
            self._say(f"  {time.monotonic() - began:5.1f} s  {kill}")
        self._drain()
        self._end_driver()
        self.check()
        self._server.kill()
        self._server.restart()
        self.check()

    @property
    def items(self) -> int:
        return sum(produced.total() for produced in self._produced.values())

    # ---- a kill -----------------------------------------------------------------------------------------------

    def _round(self, kill: Kill) -> None:
        if kill.point.given in (Given.IDLE, Given.LAST):
            self._drain()
        log = _Log(self._checkpoint(kill.query) / kill.point.at) if kill.point.at in LOGS else None
        self._trap.arm(kill)
        if kill.point.given != Given.IDLE:
            self._wave(last=kill.point.given == Given.LAST)
        self._trap.go_on()
        instant = self._instant() if kill.point is ANY_INSTANT else math.inf
        more_at = time.monotonic() + MORE_S if kill.point.given == Given.ANYTHING else math.inf

        def went_off() -> bool:
            nonlocal more_at
            now = time.monotonic()
            if now >= instant or (log is not None and log.has_grown()):
                self._trap.spring()
            elif now >= more_at:
                more_at = now + MORE_S
                self._wave(last=False)
                self._trap.go_on()
            return self._trap.went_off

        self._until(went_off, f"the point: {kill}", LOOK_S)
        self._recover(kill)
        self._trap.go_on()
        if kill.point.given == Given.LAST:
            self._drain()  # without more items to bring it about

    def _instant(self) -> float:
        self._until(lambda: self._trap.is_up, "the driver to be heard of", ASK_S)
        return time.monotonic() + self._random.uniform(0, INSTANT_S)

    def _recover(self, kill: Kill) -> None:
        if kill.victim == Victim.SERVER and self._server.has_ended:
            self._server.restart()
        elif kill.victim in (Victim.DRIVER, Victim.MACHINE):
            self._start_driver()

    def _wave(self, last: bool) -> None:
        """To both queues. A server that is killed meanwhile is asked again when it is back."""
        self._waves += 1
        sizes = self._setup.waves
        items = self._setup.items_max if last else sizes[self._waves % len(sizes)]
        texts = [f"wave {self._waves} item {number}" for number in range(items)]
        for query, queue in SOURCES.items():
            ids = self._produced_to(queue, texts)
            self._produced[query].update(zip(ids, texts, strict=True))

    def _produced_to(self, queue: str, texts: list[str]) -> list[str]:
        try:
            return self._server.produce(queue, texts, f"wave-{self._waves}")
        except Down:
            if not self._trap.went_off:
                raise Broken("the server ended by itself") from None
            self._server.restart()
            return self._server.produce(queue, texts, f"wave-{self._waves}")

    def _drain(self) -> None:
        self._trap.go_on()
        for queue in SOURCES.values():
            self._until(partial(self._server.is_done, queue), f"{queue} to be empty", ASK_S)

    def _until(self, holds: Callable[[], bool], what: str, look_s: float) -> None:
        give_up_at = time.monotonic() + DEADLINE_S
        while not holds():
            if self._trap.wrong:
                raise Broken(f"{self._trap.wrong[0]}\n{self._said()}")
            if self._driver.has_ended and not holds():
                raise Broken(f"the driver ended by itself\n{self._said()}")
            if time.monotonic() > give_up_at:
                raise Broken(f"waited {DEADLINE_S:g} s for {what}: {self._state()}\n{self._said()}")
            self._trap.wait(look_s)

    # ---- the driver -------------------------------------------------------------------------------------------

    def _start_driver(self) -> None:
        settings = (CLUSTER if self._setup.executors else LOCAL) | SETTINGS
        place = {
            "url": self._url,
            "from_parquet": SOURCES[Query.PARQUET],
            "from_queue": SOURCES[Query.QUEUE],
            "to_queue": TARGET,
            "parquet": str(self._folder / "parquet"),
            "checkpoint_parquet": str(self._checkpoint(Query.PARQUET)),
            "checkpoint_queue": str(self._checkpoint(Query.QUEUE)),
            "retry_for": f"{DEADLINE_S:g}s",
        }
        command = [sys.executable, "-m", "tests.spark.torture.driver", json.dumps(settings), json.dumps(place)]
        self._driver = self._stack.enter_context(_Driver(command, self._environment))
        self._trap.watch(self._driver.pid)

    def _end_driver(self) -> None:
        if self._setup.trigger == Trigger.NOW:
            self._trap.end()
            exit_code = self._driver.ended(DEADLINE_S)
            if exit_code:
                raise Broken(f"the driver ended with {exit_code}\n{self._said()}")
        self._driver.kill()

    def _order(self, query: Query, number: int) -> dict[str, Any]:
        random = Random(f"{self._setup.seed}/{query}/{number}")
        return {
            "now": self._setup.trigger == Trigger.NOW,
            "items_max": self._setup.items_max,
            "parts": random.choice((1, 2, 4)),
            "shuffled": random.random() < 0.5,
        }

    def _checkpoint(self, query: Query) -> Path:
        return self._folder / f"checkpoint-{query}"

    def _said(self) -> str:
        return "".join(self._driver.lines[-200:])

    # ---- the end ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        found = {
            Query.PARQUET: rows_of(self._folder / "parquet"),
            Query.QUEUE: self._server.rows(TARGET),
        }
        for query, produced in self._produced.items():
            lost, extra = produced - found[query], found[query] - produced
            if lost or extra:
                raise Broken(
                    f"to {query}: {produced.total()} produced, {lost.total()} lost, {extra.total()} too many;"
                    f" {sorted(lost)[:5]}, {sorted(extra)[:5]}; {self._state()}"
                )
        for queue in SOURCES.values():
            if not self._server.is_done(queue):
                raise Broken(f"{queue} is not empty: {self._state()}")
        counts = self._server.counts(TARGET)
        if counts != {"ready": self._produced[Query.QUEUE].total()}:
            raise Broken(f"{TARGET} holds {counts}")

    def _state(self) -> dict[str, Any]:
        try:
            return {
                queue: (self._server.counts(queue), self._server.must("claims.list", queue=queue)["claims"])
                for queue in (*SOURCES.values(), TARGET)
            }
        except Down:
            return {"the server": "is down"}


class _Driver(Process):
    @property
    def has_ended(self) -> bool:
        """It is not waited for: its number must remain its own until all that it has started is killed by it."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _environment(folder: Path) -> dict[str, str]:
    """What is killed cleans nothing up, so what is temporary is where it goes with the rest."""
    temporary = folder / "temporary"
    temporary.mkdir()
    inherited = driver_environment(folder)
    java = f"{inherited['JDK_JAVA_OPTIONS']} -Djava.io.tmpdir={temporary}"
    return inherited | {"TMPDIR": str(temporary), "JDK_JAVA_OPTIONS": java}


class _Log:
    """One of the checkpoint's: a file a batch, named by its number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._newest = self._find()

    def has_grown(self) -> bool:
        return self._find() > self._newest

    def _find(self) -> int:
        try:
            return max((int(file.name) for file in self._folder.iterdir() if file.name.isdecimal()), default=-1)
        except FileNotFoundError:
            return -1


def rows_of(folder: Path) -> Counter[tuple[str, str]]:
    """Ids and payloads in all that readers of Parquet see there."""
    rows: Counter[tuple[str, str]] = Counter()
    for file in folder.glob("batch=*/[!._]*.parquet"):
        table = pyarrow.parquet.ParquetFile(file).read(["id", "payload"])
        rows.update(zip(*(column.to_pylist() for column in table.columns), strict=True))
    return rows
