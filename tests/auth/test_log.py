"""What is logged, and what never is."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from millpond import log
from millpond.tasks.errors import Interrupted
from millpond.tasks.threads import _raise_in

own = logging.getLogger("millpond.test")

SECRET = "mp_4fXq09Zb_" + "aB3" * 14 + "x"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # pytest's own would be closed by `configure`
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_has_the_text_and_the_fields(stream: io.StringIO) -> None:
    log.configure("json", "info", stream)
    logging.getLogger("millpond.server").info("listening on %s", "here", extra={"queue": "a/b", "items": 3})
    [line] = lines(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "millpond.server",
        "message": "listening on here",
        "queue": "a/b",
        "items": 3,
    }


def test_auto_is_json_where_nobody_watches_and_console_on_a_terminal(stream: io.StringIO) -> None:
    log.configure("auto", "info", stream)
    own.info("one")
    assert lines(stream)
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    log.configure("auto", "info", terminal)
    logging.getLogger("x").info("two", extra={"why": "a b", "n": 1})
    assert terminal.getvalue()[12:] == ' INFO    x: two why="a b" n=1\n'


def test_the_level_holds_for_all(stream: io.StringIO) -> None:
    log.configure("json", "warning", stream)
    logging.getLogger("uvicorn.error").info("no")
    logging.getLogger("uvicorn.error").warning("yes")
    assert [line["message"] for line in lines(stream)] == ["yes"]


def test_the_correlation_id_of_the_request_is_added(stream: io.StringIO) -> None:
    log.configure("json", "info", stream)
    token = log.correlation_id.set("abc")
    own.info("one")
    own.info("two", extra={"correlation_id": "own"})
    log.correlation_id.reset(token)
    own.info("three")
    assert [line.get("correlation_id") for line in lines(stream)] == ["abc", "own", None]


@pytest.mark.parametrize("format", ["json", "console"])
def test_secrets_and_payloads_never_get_out(stream: io.StringIO, format: str) -> None:
    log.configure(format, "debug", stream)
    own.info("given %s", SECRET)
    own.info("headers %r", [(b"authorization", f"Bearer {SECRET}".encode()), (b"cookie", b"hidden-1")])
    own.info("Authorization: Basic hidden-2 and more")
    own.info("authorization=hidden-3", extra={"Authorization": "hidden-4", "token": "hidden-5"})
    own.info("bearer hidden-6-of-somebody-else")
    own.info("x", extra={"payload": "hidden-7", "headers": {"Cookie": "hidden-8", "x": [SECRET]}, "raw": b"hidden-9"})
    own.info("x" * (log.FIELD_CHARS_MAX - 10) + SECRET)
    try:
        raise ValueError(f"no such token: {SECRET}")
    except ValueError:
        own.exception("failed", stack_info=True)
    text = stream.getvalue()
    assert "hidden" not in text
    assert SECRET[12:20] not in text
    assert text.count("mp_4fXq09Zb_[redacted]") >= 4  # the id stays: it finds the token that leaked
    assert "Traceback" in text


HINT = "send 'Authorization: Bearer <token>' with one of yours"


def test_ordinary_words_are_left_alone() -> None:
    for text in ("authorization is on", "basic configuration", "the bearer of news", "mp_short", "a/b c=d", HINT):
        assert log.redact(text) == text


def test_no_one_can_forge_a_line(stream: io.StringIO) -> None:
    log.configure("console", "info", stream)
    own.info("queue %s", "x\n12:00 ERROR fake\x1b[2J", extra={"why": "y\nz"})
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()


def test_no_field_takes_the_place_of_the_first_ones(stream: io.StringIO) -> None:
    log.configure("json", "info", stream)
    own.info("true", extra={"level": "fake", "time": "fake"})
    [line] = lines(stream)
    assert (line["level"], line["message"]) == ("info", "true")
    assert line["time"] != "fake"


def test_whatever_is_given_can_be_written(stream: io.StringIO) -> None:
    log.configure("json", "info", stream)
    loop: list[Any] = []
    loop.append(loop)
    given = {"o": object(), "e": ValueError("v"), "loop": loop, "k": {(1, 2): {3}}, "n": float("nan"), "s": "\ud800"}
    own.info("odd", extra=given)
    assert len(stream.getvalue().splitlines()) == 1


def test_arguments_that_do_not_fit_cost_neither_the_line_nor_a_secret(
    stream: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("json", "info", stream)
    own.info("count %d", SECRET)
    assert lines(stream)[0]["message"] == "count %d (its arguments do not fit)"
    stream.close()
    own.info("nobody reads this: %s", SECRET)
    assert capsys.readouterr().err == ""


def test_a_thread_that_is_interrupted_while_it_logs_does_not_keep_the_lock(stream: io.StringIO) -> None:
    """As a task is whose time is over. The exception comes when the thread has got the lock that it waited for."""
    log.configure("json", "info", stream)
    [handler] = logging.getLogger().handlers
    about_to_lock = threading.Event()

    def tell(record: logging.LogRecord) -> bool:
        about_to_lock.set()
        return True

    def work() -> None:
        with suppress(Interrupted):
            own.info("never said")

    handler.addFilter(tell)
    lock = handler.lock
    assert lock is not None
    with lock:
        thread = threading.Thread(target=work)
        thread.start()
        about_to_lock.wait()
        _raise_in(thread.ident or 0, Interrupted)
    thread.join()
    assert lock.acquire(blocking=False)
    lock.release()


def test_a_log_that_nobody_reads_stops_no_work(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "READER_MS", 1)
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as reader, open(writing, "w", encoding="utf-8") as writer:
        log.configure("json", "info", writer)
        said = 200
        for number in range(said):
            own.info("x" * 5_000, extra={"number": number})  # in all far more than a pipe holds
        os.set_blocking(reading, False)
        begun = reader.read()
        own.info("the last")
        rest = reader.read().splitlines()
    *whole, torn = begun.splitlines()
    assert [json.loads(line)["number"] for line in whole] == list(range(len(whole)))
    assert 0 < len(whole) < said
    assert len(torn) < 5_000  # where the pipe was full
    left_out = said - len(whole)
    assert [json.loads(line)["message"] for line in rest if line] == [
        f"{left_out} lines of the log were left out, for nobody read it",
        "the last",
    ]
