"""Tasks and consumers are registered by name, and checked where they are defined."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond.errors import InvalidRequest, NotFound
from millpond.model import LeasedItem
from millpond.tasks.connection import Where, where
from millpond.tasks.loading import load_app

NONE = (None, None, None)


@pytest.fixture
def app() -> millpond.App:
    return millpond.App(data=":memory:")


def test_a_task_is_still_the_function_that_it_was(app: millpond.App) -> None:
    @app.task
    def double(n: int) -> int:
        """Twice as much."""
        return 2 * n

    assert double(4) == 8
    assert double.__doc__ == "Twice as much."
    assert double.name.endswith("test_registering.test_a_task_is_still_the_function_that_it_was.double")


def test_two_functions_cannot_have_one_name(app: millpond.App) -> None:
    app.task(name="send")(len)
    with pytest.raises(InvalidRequest, match="there is a task 'send' already"):
        app.task(name="send")(max)


def test_a_function_that_is_defined_again_takes_its_own_place(app: millpond.App) -> None:
    def define() -> Any:
        @app.task(name="again")
        def again() -> None: ...

        return again

    define()
    newer = define()
    assert app.tasks == {"again": newer}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"max_attempts": "3"}, "max_attempts is '3'"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"backoff": "2"}, "backoff is '2'"),
        ({"backoff": {"bass": 2}}, "backoff has no 'bass'"),
        ({"backoff": {"base": 2, "jitter": 3}}, "backoff_jitter is 3"),
        ({"backoff": -1}, "backoff_base is -1"),
        ({"encoding": "pickle"}, "encoding is 'pickle'"),
        ({"queue": "no such"}, "'no such' is not a queue name"),
        ({"queue": "a/../b"}, "is not a queue name"),
        ({"queue": 3}, "3 is not a queue name"),
        ({"queue": "millpond/links"}, "'millpond/links' is one of millpond's own"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"priority": 32_768}, "priority is 32768; use -32767 to 32767"),
    ],
)
def test_wrong_options_are_told_where_the_task_is_defined(
    app: millpond.App, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        app.task(**options)(len)


class Shop:
    def sell(self, what: str) -> None: ...


def _yields() -> Any:
    yield 1


async def _yields_async() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (_yields, "_yields yields"),
        (_yields_async, "_yields_async yields"),
        (lambda: 1, "a lambda has no name"),
        (Shop.sell, r"Shop\.sell is a method"),
        (Shop, "Shop is a class"),
        (3, "a task is a function, not a int"),
    ],
)
def test_what_cannot_be_a_task_is_told_where_it_is_defined(app: millpond.App, function: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        app.task(function)
    assert app.tasks == {}


def test_the_queues_of_an_app_are_those_of_its_tasks_and_consumers(app: millpond.App) -> None:
    app.task(queue="mail")(len)

    @app.consumer("orders")
    def handle(item: LeasedItem) -> None: ...

    assert app.queues == ["mail", "orders"]
    with pytest.raises(InvalidRequest, match="'orders' has a consumer already"):
        app.consumer("orders")(print)


@pytest.mark.parametrize(
    ("given", "environment", "found"),
    [
        (("./x", None, None), {}, Where(data=str(Path("./x").absolute()))),
        ((None, "http://a:1", "t"), {}, Where(server="http://a:1", token="t")),
        (NONE, {"MILLPOND_SERVER": "http://b:1", "MILLPOND_TOKEN": "s"}, Where(server="http://b:1", token="s")),
        (NONE, {"MILLPOND_DATA": "/d"}, Where(data="/d")),
        (("/d", None, None), {"MILLPOND_SERVER": "http://b:1"}, Where(data="/d")),
        (NONE, {}, Where(data=str(Path("~/.local/share/millpond").expanduser()))),
    ],
)  # fmt: skip
def test_an_app_finds_its_place_as_the_command_line_does(given: Any, environment: dict[str, str], found: Where) -> None:
    data, server, token = given
    assert where(data, server, token, environment) == found


def test_an_app_has_one_place_and_shows_no_token() -> None:
    with pytest.raises(InvalidRequest, match="two places"):
        millpond.App(data="./x", server="http://a:1")
    assert "secret" not in repr(millpond.App(server="http://a:1", token="secret").connection.where)


# ---- loading ----------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module into the working directory; its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str) -> str:
        name = f"loaded_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def test_an_app_is_loaded_by_its_place(module: Callable[[str], str]) -> None:
    name = module("import millpond\napp = millpond.App(data=':memory:')\nclass Here:\n    other = app\n")
    assert load_app(f"{name}:app") is load_app(name) is load_app(f"{name}:Here.other")


@pytest.mark.parametrize(
    ("place", "kind", "complaint"),
    [
        ("", InvalidRequest, "write MODULE:APP"),
        ("./jobs.py:app", InvalidRequest, "write MODULE:APP"),
        ("no_such_module_here:app", NotFound, "there is no module no_such_module_here"),
        ("millpond.nowhere:app", NotFound, "there is no module millpond.nowhere"),
        ("NAME:application", NotFound, "has no application; it has app"),
        ("NAME:number", InvalidRequest, "is a int; name a millpond.App"),
    ],
)
def test_what_is_no_app_is_told(
    module: Callable[[str], str], place: str, kind: type[Exception], complaint: str
) -> None:
    name = module("import millpond\napp = millpond.App(data=':memory:')\nnumber = 1\n")
    with pytest.raises(kind, match=complaint):
        load_app(place.replace("NAME", name))


def test_annotations_that_name_nothing_are_told_when_the_app_is_loaded(module: Callable[[str], str]) -> None:
    text = "from __future__ import annotations\nimport millpond\napp = millpond.App(data=':memory:')\n@app.task\n"
    name = module(text + "def f(a: Later): ...\nclass Later: ...\n")
    assert list(load_app(name).tasks) == [f"{name}.f"]
    name = module(text + "def f(a: Never): ...\n")
    with pytest.raises(InvalidRequest, match="an annotation names what is not there"):
        load_app(name)


def test_what_the_module_itself_lacks_is_not_taken_for_the_module(module: Callable[[str], str]) -> None:
    name = module("import something_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="something_that_is_not_there"):
        load_app(name)


@pytest.mark.slow  # starts a Python
def test_a_script_registers_its_tasks_under_the_name_that_a_worker_imports_it_by(tmp_path: Path) -> None:
    script = tmp_path / "jobs.py"
    script.write_text("import millpond\napp = millpond.App(data=':memory:')\n@app.task\ndef f(): ...\nprint(f.name)")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert run.stdout == "jobs.f\n"
