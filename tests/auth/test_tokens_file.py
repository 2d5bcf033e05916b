"""The file that tokens are kept in."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from millpond.access.tokens_file import ENDED_KEPT_MS, SECRET_FORM, TokensFile, TokensUnreadable
from millpond.errors import InvalidRequest, NotFound

NOW = 1_700_000_000_000


@pytest.fixture
def file(tmp_path: Path) -> TokensFile:
    return TokensFile(tmp_path / "pond")


def make(file: TokensFile, now: int = NOW, **changes: Any) -> tuple[str, str]:
    token, secret = file.create(now, **({"role": "viewer", "queues": ["*"]} | changes))
    return token.id, secret


def test_a_secret_says_what_it_is_and_whose(file: TokensFile) -> None:
    id, secret = make(file)
    match = SECRET_FORM.fullmatch(secret)
    assert match
    assert match[1] == id
    assert len(secret) == len("mp_") + 8 + 1 + 43


def test_secrets_differ(file: TokensFile) -> None:
    made = [make(file) for _ in range(20)]
    assert len({id for id, _ in made}) == len({secret for _, secret in made}) == 20


def test_only_the_hash_is_kept_and_only_the_owner_may_read_it(file: TokensFile) -> None:
    before = os.umask(0)
    try:
        _, secret = make(file)
    finally:
        os.umask(before)
    text = file.path.read_text()
    assert secret not in text
    assert secret.split("_")[2] not in text
    assert hashlib.sha256(secret.encode()).hexdigest() in text
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_the_format_is_versioned_and_stays(file: TokensFile) -> None:
    """Version 1, as it was first written: a later millpond must read it."""
    file.path.parent.mkdir()
    file.path.write_text(
        '{"version": 1, "tokens": [{"id": "4fXq09Zb", "role": "consumer", "queues": ["a/*", "b"], "sha256": "00ff",'
        ' "created_at": "2026-01-02T03:04:05Z", "name": "ci", "commands": true,'
        ' "expires_at": "2026-02-01T00:00:00Z", "revoked_at": "2026-01-31T00:00:00Z"}]}'
    )
    [token] = file.read()
    assert (token.id, token.role, token.queues, token.sha256) == ("4fXq09Zb", "consumer", ("a/*", "b"), "00ff")
    assert (token.name, token.commands, token.status(0)) == ("ci", True, "revoked")
    make(file)
    kept = json.loads(file.path.read_text())
    assert kept["version"] == 1


def test_a_file_of_a_later_version_is_neither_read_nor_written_over(file: TokensFile) -> None:
    make(file)
    later = file.path.read_text().replace('"version": 1', '"version": 2')
    file.path.write_text(later)
    with pytest.raises(TokensUnreadable, match="use a newer millpond"):
        file.read()
    with pytest.raises(TokensUnreadable):
        make(file)
    assert file.path.read_text() == later


def test_a_revoked_token_stays_in_the_list(file: TokensFile) -> None:
    id, _ = make(file)
    first = file.revoke(id, NOW + 1)
    assert file.revoke(id, NOW + 2) == first
    assert [token.status(NOW + 2) for token in file.read()] == ["revoked"]


def test_a_secret_in_place_of_its_id_is_understood(file: TokensFile) -> None:
    id, secret = make(file)
    assert file.revoke(secret, NOW).id == id


def test_revoking_what_is_not_there_is_not_found(file: TokensFile) -> None:
    make(file)
    with pytest.raises(NotFound, match="millpond token list"):
        file.revoke("nobody", NOW)


def test_expiry_is_an_instant(file: TokensFile) -> None:
    make(file, expire_timeout_ms=1_000)
    [token] = file.read()
    assert [token.status(NOW + ms) for ms in (0, 999, 1_000)] == ["active", "active", "expired"]


def test_tokens_that_ended_long_ago_are_forgotten_when_one_is_made(file: TokensFile) -> None:
    old, _ = make(file, expire_timeout_ms=1_000)
    revoked, _ = make(file)
    file.revoke(revoked, NOW)
    lasting, _ = make(file)
    recent, _ = make(file, NOW + ENDED_KEPT_MS + 1)
    assert [token.id for token in file.read()] == [old, lasting, recent]


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "king"},
        {"queues": []},
        {"queues": ["*"] * 101},
        {"queues": [""]},
        {"queues": ["a b"]},
        {"queues": ["ä"]},
        {"queues": ["x" * 201]},
        {"name": "x" * 101},
        {"name": "a\nb"},
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(file: TokensFile, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="; "):
        make(file, **wrong)
    assert not file.path.exists()


def test_the_rest_of_a_write_that_was_cut_short_is_in_nobodys_way(file: TokensFile) -> None:
    make(file)
    partial = file.path.with_suffix(".new")
    partial.write_text("{")
    partial.chmod(0o644)
    make(file)
    assert len(file.read()) == 2
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_a_directory_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="choose another"):
        make(TokensFile(tmp_path / "file"))


def test_many_at_once_lose_none(file: TokensFile) -> None:
    made: list[str] = []

    def some() -> None:
        own = TokensFile(file.path.parent)
        made.extend(make(own)[0] for _ in range(5))

    threads = [threading.Thread(target=some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(token.id for token in file.read()) == sorted(made)
