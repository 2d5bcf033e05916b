"""Spark on more than one process: a standalone master and worker, Spark's local cluster, and drivers for them.

A process has one SparkContext at most, and that of the tests has the shared one. So what runs on a cluster has a driver
of its own: `run_driver`, or `submit`. Each process that is started here leads a session of the system's, by which all
that it starts in turn is found and ended with it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyspark

from millpond.spark.java import find_java_home
from tests.server.process import until

ROOT = Path(__file__).parent.parent.parent
LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 60.0  # for a JVM to say that it is ready, on a machine that is busy
DRIVER_TIMEOUT_S = 100.0  # under that of a test, which would not show what the driver wrote
TOLD = "told.json"  # in a driver's folder: what it tells

# No job begins before all executors are there: else one of them may do all of it.
ALL_EXECUTORS = {
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{START_TIMEOUT_S:g}s",
}


def local_cluster() -> dict[str, str]:
    """Settings for `session` in a driver: two executors of one core, each a JVM of its own beside the driver's."""
    return {"spark.master": "local-cluster[2,1,1024]", **ALL_EXECUTORS}  # 1024 MiB: what an executor asks for


class Process:
    """A command that leads a session; what it writes is in `lines`."""

    def __init__(self, command: Sequence[str | Path], environment: dict[str, str]) -> None:
        self._popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def says(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """The first line that matches, waited for."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        with self._news:
            self._news.wait_for(lambda: found() or self._ended, timeout_s)
            match = found()
            assert match, f"{pattern!r} was not said:\n{''.join(self.lines)}"
            return match

    def ended(self, timeout_s: float) -> int:
        """Its exit code, once all that it wrote is in `lines`."""
        with self._news:
            assert self._news.wait_for(lambda: self._ended, timeout_s), f"it goes on:\n{''.join(self.lines)}"
        return self._popen.wait(timeout_s)

    def kill(self) -> None:
        """It and all that it started. Killed again until none is left: one may have started another meanwhile."""
        until(lambda: not kill_session(self.pid), f"the session of process {self.pid} to end")
        self._popen.wait(START_TIMEOUT_S)
        self._reader.join(START_TIMEOUT_S)
        assert self._popen.stdout is not None
        self._popen.stdout.close()


def members(session: int) -> list[int]:
    """The processes that live in a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text()
            except OSError:  # it has just ended
                continue
            state, _, _, its_session, *_ = stat.rpartition(")")[2].split()
            if int(its_session) == session and state not in "ZX":  # a zombie is its parent's to bury
                found.append(int(folder.name))
    return found


def kill_session(session: int) -> list[int]:
    """Those that were still there."""
    found = members(session)
    for process in found:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return found


class Standalone(NamedTuple):
    url: str
    master: Process
    workers: list[Process]

    def settings(self) -> dict[str, str]:
        """For `session` in a driver."""
        return {"spark.master": self.url, **ALL_EXECUTORS}


@contextmanager
def standalone(folder: Path, *, workers: int = 1, cores: int = 2, memory: str = "1g") -> Iterator[Standalone]:
    """A master and its workers, as they are run on real clusters."""
    start = [spark_home(folder) / "bin" / "spark-class"]
    here = ["--host", LOOPBACK, "--port", "0", "--webui-port", "0"]
    size = ["--cores", str(cores), "--memory", memory, "--work-dir", str(folder / "work")]
    environment = driver_environment(folder)
    with ExitStack() as stack:
        master = stack.enter_context(Process([*start, "org.apache.spark.deploy.master.Master", *here], environment))
        url = master.says(r"Starting Spark master at (spark://\S+)")[1]
        master.says("I have been elected leader")
        command = [*start, "org.apache.spark.deploy.worker.Worker", *here, *size, url]
        started = [stack.enter_context(Process(command, environment)) for _ in range(workers)]
        for worker in started:
            worker.says("Successfully registered with master")
        yield Standalone(url, master, started)


def run_driver(code: str, folder: Path, *arguments: str, timeout_s: float = DRIVER_TIMEOUT_S) -> str:
    """What a Python program wrote. It runs in the root of the project; `folder` is for what Spark writes."""
    return _output([sys.executable, "-c", code, *arguments], folder, timeout_s)


def submit(
    code: str, folder: Path, settings: Mapping[str, str], *arguments: str, timeout_s: float = DRIVER_TIMEOUT_S
) -> str:
    """The same, by spark-submit."""
    script = folder / "submitted.py"
    script.write_text(code)
    told = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    return _output([spark_home(folder) / "bin" / "spark-submit", *told, script, *arguments], folder, timeout_s)


def _output(command: Sequence[str | Path], folder: Path, timeout_s: float) -> str:
    with Process(command, driver_environment(folder)) as driver:
        exit_code = driver.ended(timeout_s)
        assert exit_code == 0, "".join(driver.lines)
        return "".join(driver.lines)


def driver_environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "JAVA_HOME": str(find_java_home()),
        "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # a JVM that starts fast and is gone soon
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(spark_home(folder)),
        "SPARK_LOCAL_DIRS": str(folder),
        "SPARK_LOCAL_IP": LOOPBACK,
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",  # it would listen on a port of its own choice
        "TOLD": str(folder / TOLD),
    }


def spark_home(folder: Path) -> Path:
    """The package's, by links: a local cluster writes into its home, and that should not be where the package is."""
    home = folder / "spark-home"
    home.mkdir(exist_ok=True)
    for place in Path(pyspark.__file__).parent.iterdir():
        link = home / place.name
        if place.is_dir() and not link.is_symlink():
            link.symlink_to(place)
    return home


# A driver for settings in JSON. A task's Python process was made by another, which was started by the executor's JVM.
WHO_RUNS_WHAT = """
import json, os, sys
from pathlib import Path
from millpond.spark.session import session

def parent(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])

spark = session("who", **json.loads(sys.argv[1]))
tasks = spark.sparkContext.parallelize(range(2), 2)
jvms = tasks.mapPartitions(lambda rows: [parent(os.getppid())]).collect()
Path(os.environ["TOLD"]).write_text(json.dumps({
    "driver": spark._jvm.java.lang.ProcessHandle.current().pid(),
    "executors": jvms,
    "java": [os.readlink(f"/proc/{jvm}/exe") for jvm in jvms],
    "started_by": [parent(jvm) for jvm in jvms],
    "settings": dict(spark.sparkContext.getConf().getAll()),
}))
spark.stop()
"""


def told(folder: Path) -> dict[str, Any]:
    """What a driver has told, in a file: in its output it could be cut by a line of Spark's log."""
    found: dict[str, Any] = json.loads((folder / TOLD).read_text())
    return found
