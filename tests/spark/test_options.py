"""Options: what each use takes, and what is said of one that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millpond import model
from millpond.spark import options as module
from millpond.spark.options import (
    WrongOption,
    payload_is_text,
    peek_options,
    sink_options,
    stream_options,
    verdict_options,
)

BASE = {"url": "http://127.0.0.1:7410", "queue": "orders"}
STREAM = BASE | {"consumer": "c"}
SECRET = "mp_secret_that_nobody_sees"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (module.URL_ENVIRONMENT, module.TOKEN_ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)


def to_sink(options: dict[str, str]) -> Any:
    return sink_options(options, streaming=False)


def to_stream_sink(options: dict[str, str]) -> Any:
    return sink_options(options, streaming=True)


def test_limits_are_the_servers() -> None:
    assert module.ITEMS_PER_BATCH_MAX == model.CLAIM_ITEMS_MAX
    assert module.PARTS_MAX == model.CLAIM_PARTS_MAX
    assert module.NAME_MAX == model.NAME_MAX
    assert set(module.STATES) == set(model.State)


def test_names_are_taken_in_any_case() -> None:
    given = {"URL": BASE["url"], "queue": "orders", "CONSUMER": "c", "maxitemsperbatch": "7", "maxBytesPerBatch": "9"}
    options = stream_options(given)
    assert (options.items_max, options.bytes_max, options.consumer) == (7, 9, "c")


def test_what_is_left_out_has_a_default() -> None:
    options = stream_options(STREAM)
    assert (options.items_max, options.bytes_max, options.parts) == (100_000, None, 4)
    assert (options.server.timeout_s, options.server.retry_s, options.server.token) == (60.0, 60.0, None)
    peek = peek_options(BASE)
    assert (peek.state, peek.kind) == ("ready", None)
    assert peek_options(BASE | {"state": "any"}).state is None
    assert not payload_is_text(BASE)
    assert payload_is_text(BASE | {"payload": "string"})


def test_a_checkpoint_is_sparks_own_option() -> None:
    to_stream_sink(BASE | {"checkpointlocation": "/tmp/c"})


@pytest.mark.parametrize(
    ("read", "more", "said"),
    [
        (stream_options, {"maxItemPerBatch": "1"}, "no option 'maxitemperbatch'; did you mean maxItemsPerBatch?"),
        (stream_options, {"state": "ready"}, "readStream has no option 'state'; the options are url, queue"),
        (peek_options, {"consumer": "c"}, "read has no option 'consumer'"),
        (to_sink, {"reject": "/tmp"}, "write has no option 'reject'; did you mean rejects?"),
        (to_stream_sink, {"txn": "t"}, "the option txn is for batch writes"),
        (to_sink, {"path": "orders"}, "a queue has no path: name it with the option queue"),
        (stream_options, {"maxItemsPerBatch": "many"}, "is 'many'; give a whole number from 1 to 10000000"),
        (stream_options, {"maxItemsPerBatch": "0"}, "maxItemsPerBatch is '0'; give a whole number from 1"),
        (stream_options, {"parts": "1001"}, "parts is '1001'; give a whole number from 1 to 1000"),
        (stream_options, {"timeout": "soon"}, "timeout is 'soon'; give a duration such as 30s or 2m"),
        (stream_options, {"retryFor": "0s"}, "retryFor is '0s'; give a duration"),
        (stream_options, {"consumer": "a b"}, "consumer is 'a b'; use 1 to 180 printable ASCII characters, no spaces"),
        (stream_options, {"consumer": " "}, "consumer is empty; give it a value or leave it out"),
        (to_sink, {"txn": "x" * 201}, "use 1 to 200 printable ASCII characters"),
        (to_sink, {"rejects": "here"}, "rejects is 'here'; give a whole path or a URI"),
        (payload_is_text, {"payload": "strng"}, "payload is 'strng'; did you mean string?"),
        (peek_options, {"state": "redy"}, "state is 'redy'; did you mean ready?"),
        (peek_options, {"queue": "a b"}, "queue is 'a b', which is no queue name"),
        (peek_options, {"url": "localhost:7410"}, "url is 'localhost:7410'; write it like http://host:port"),
        (peek_options, {"url": "ftp://host"}, "write it like http://host:port"),
        (peek_options, {"url": "http://host:port"}, "url is no URL; write it like http://host:port"),
        (peek_options, {"url": "http://host/?a=b"}, "write it like http://host:port"),
        (peek_options, {"tokenFile": "/nonexistent/t"}, "'/nonexistent/t' cannot be read on the driver (No such"),
        (peek_options, {"caFile": "/nonexistent/ca"}, "caFile '/nonexistent/ca' cannot be read on the driver"),
    ],
)  # fmt: skip
def test_a_wrong_option_says_what_is_right(
    read: Callable[[dict[str, str]], Any], more: dict[str, str], said: str
) -> None:
    base = STREAM if read is stream_options else BASE
    with pytest.raises(WrongOption) as caught:
        read(base | more)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("read", "options", "said"),
    [
        (peek_options, {"queue": "q"}, "the option url is missing; give the server's address"),
        (peek_options, {"url": "http://h"}, "the option queue is missing; name the queue"),
        (stream_options, BASE, "the option consumer is missing; choose a name: the server keeps the query's place"),
        (verdict_options, BASE, "the option consumer is missing; choose a name: it is the one of the readStream"),
    ],
)
def test_a_missing_option_is_named(read: Callable[[dict[str, str]], Any], options: dict[str, str], said: str) -> None:
    with pytest.raises(WrongOption) as caught:
        read(options)
    assert said in str(caught.value)


# ---- the token ------------------------------------------------------------------------------------------------------


def token_of(options: dict[str, str]) -> str | None:
    token = peek_options(BASE | options).server.token
    return None if token is None else token.reveal()


def test_the_token_comes_from_the_option_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    assert token_of({}) is None
    monkeypatch.setenv(module.TOKEN_ENVIRONMENT, "of-the-environment")
    assert token_of({}) == "of-the-environment"
    assert token_of({"tokenFile": str(file)}) == "of-the-file"
    assert token_of({"token": "of-the-option"}) == "of-the-option"
    with pytest.raises(WrongOption, match="exclude each other"):
        token_of({"token": "a", "tokenFile": str(file)})


def test_the_url_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.URL_ENVIRONMENT, "http://elsewhere:1")
    assert peek_options({"queue": "q"}).server.url == "http://elsewhere:1"
    assert peek_options(BASE).server.url == BASE["url"]


def test_a_token_is_not_shown() -> None:
    options = peek_options(BASE | {"token": SECRET})
    assert SECRET not in repr(options)
    assert SECRET not in repr(options.server.transport().__dict__)


@pytest.mark.parametrize(
    "wrong",
    [
        {"token": f"{SECRET} {SECRET}"},
        {"token": f"{SECRET}\u00e9"},
        {"url": f"http://user:{SECRET}@host"},
    ],
)
def test_a_secret_that_is_wrong_is_not_shown_either(wrong: dict[str, str]) -> None:
    with pytest.raises(WrongOption) as caught:
        peek_options(BASE | wrong)
    assert SECRET not in str(caught.value)
