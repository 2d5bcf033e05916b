"""The parts without I/O: addresses, durations, replies, lines, merging."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.client.address import read_url
from millpond.client.faults import twin
from millpond.client.http1 import Lines, ReplyParser
from millpond.client.lines import item_of
from millpond.client.merging import MERGED_ENTRIES_MAX, Part, take
from millpond.durations import seconds
from millpond.errors import BY_CODE, BadReply, InvalidRequest, NotFound, TooManyRequests, made


@pytest.mark.parametrize(
    ("url", "host_header", "tls"),
    [
        ("http://127.0.0.1:7410", "127.0.0.1:7410", False),
        ("https://queues.example.org", "queues.example.org", True),
        ("http://[::1]:80/", "[::1]", False),
        ("unix:///tmp/p.sock", "localhost", False),
    ],
)
def test_addresses(url: str, host_header: str, tls: bool) -> None:
    address = read_url(url)
    assert (address.host_header, address.tls) == (host_header, tls)


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:7410", "ftp://h", "http://", "unix://", "http://h:x", "http://h/?q", "http://h\r\nX: y", None],
)
def test_what_is_no_address(url: Any) -> None:
    with pytest.raises(InvalidRequest):
        read_url(url)


def test_a_secret_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_url("http://me:sesame@h")
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(2, 2.0), ("1m30s", 90.0), ("500ms", 0.5), ("PT1M30S", 90.0), ("P1DT1H", 90_000.0), (timedelta(hours=1), 3600.0)],
)
def test_durations(given: Any, expected: float) -> None:
    assert seconds(given) == expected


@pytest.mark.parametrize("given", ["", "soon", "1", "1x", True, None])
def test_what_is_no_duration(given: Any) -> None:
    assert seconds(given) is None


@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_replies_come_in_any_pieces(size: int) -> None:
    parser = ReplyParser(100)
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: a/b\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    plain = b"HTTP/1.1 503 No\r\nRetry-After: 2\r\nContent-Length: 2\r\n\r\nno"
    for data, expected in ((chunked, (200, "a/b", b"abcde", 0.0)), (plain, (503, "", b"no", 2.0))):
        replies = [parser.feed(data[begin : begin + size]) for begin in range(0, len(data), size)]
        reply = replies[-1]
        assert reply is not None
        assert (reply.status, reply.media_type, reply.body, reply.retry_after) == expected
        assert reply.reusable
        assert not any(replies[:-1])


def test_more_than_one_reply_ends_the_connection() -> None:
    one = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab"
    reply = ReplyParser(100).feed(one + one.replace(b"ab", b"cd"))
    assert reply is not None
    assert reply.body == b"ab"
    assert not reply.reusable


def test_lines_come_in_any_pieces() -> None:
    lines = Lines(10)
    assert [line for part in (b"ab", b"c\n\nd", b"e\nf") for line in lines.feed(part)] == [b"abc", b"de"]
    with pytest.raises(BadReply):
        lines.feed(b"x" * 11)


def test_lines_of_a_stream() -> None:
    assert item_of(b"{}") is None
    with pytest.raises(NotFound):
        item_of(b'{"error":{"code":"not_found","message":"m","details":{}}}')
    with pytest.raises(BadReply):
        item_of(b"nonsense")


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_every_code_has_its_class(code: str) -> None:
    error = made(code, "words", details={"message": "a detail of that name"})
    assert type(error) is BY_CODE[code]
    assert (error.message, error.details) == ("words", {"message": "a detail of that name"})


def test_a_twin_is_the_same_and_another() -> None:
    error = made("too_many_requests", "words", retry_after=3.0)
    other = twin(error)
    assert other is not error
    assert isinstance(other, TooManyRequests)
    assert (str(other), other.retry_after) == ("words", 3.0)


def test_what_goes_together_is_bounded() -> None:
    def caller(count: int, size: int = 0) -> Any:
        return SimpleNamespace(part=Part("k", [0] * count, size, lambda entries: None))  # type: ignore[arg-type, return-value]

    waiting = deque([caller(90)] * 20)
    assert len(take(waiting)) == MERGED_ENTRIES_MAX // 90
    assert len(take(deque([caller(1, 3 << 20)] * 2))) == 1
    assert len(take(deque([caller(5_000)]))) == 1
