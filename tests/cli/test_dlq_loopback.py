"""The server that a command starts for its own children."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import millpond
from millpond.cli.loopback import served
from millpond.errors import DirectoryInUse, InvalidRequest, Unauthorized


def test_only_who_has_the_secret_is_answered(tmp_path: Path) -> None:
    with served(millpond.open_async(tmp_path / "pond")) as (url, secret):
        assert url.startswith("http://127.0.0.1:")
        with millpond.Client(url, token=secret) as client:
            client.create_queue("q")
            client.produce("q", [b"a"])
            assert client.stats("q").counts["ready"] == 1
        for token in (None, f"{secret[:-1]}~", "mp_nobody"):
            with millpond.Client(url, token=token) as client, pytest.raises(Unauthorized, match="a command's own"):
                client.stats("q")


def test_it_is_gone_with_the_command_and_the_pond_is_closed(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with served(millpond.open_async(tmp_path / "pond")) as (url, secret):
        pass
    assert set(threading.enumerate()) <= before
    with millpond.Client(url, token=secret, timeout=1) as client, pytest.raises(millpond.MillpondError):
        client.list_queues()
    millpond.open(tmp_path / "pond").close()


def test_a_pond_that_cannot_be_opened_is_told_to_who_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises((InvalidRequest, DirectoryInUse, OSError)), served(millpond.open_async(tmp_path / "file")):
        pass
