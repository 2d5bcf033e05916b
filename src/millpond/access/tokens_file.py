"""The access tokens of a data directory: one small file, written whole and renamed into place.

    {"version": 1, "tokens": [{"id": …, "role": …, "queues": […], "sha256": …, …}]}

A secret reads `mp_<id>_<random>`; only its SHA-256 is kept. Random bytes need no salt and no slow hash: there is
nothing to guess. Revoked tokens stay in the file, so that a directory that once asked for tokens never stops asking
because the last one was revoked.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from millpond.access.roles import ROLES
from millpond.errors import Conflict, InvalidRequest, MillpondError, NotFound
from millpond.model import QUEUE_NAME_MAX, to_datetime, to_ms
from millpond.store.disk import PRIVATE, make_directory, sync_directory

FILE_NAME = "tokens.json"
LOCK_NAME = "tokens.lock"  # beside the file: a lock on what is renamed away locks nothing
VERSION = 1
PREFIX = "mp"  # so that people and scanners of leaked secrets know one when they see it
ID_CHARS = 8  # 62 ** 8: enough for names; the secret is what must not be guessed
SECRET_BYTES = 32
SECRET_CHARS = 43  # what 32 bytes take in base 62
TOKENS_MAX = 10_000  # read whole at each change; more callers than this want an identity provider
QUEUES_MAX = 100  # patterns a token: each is tried for a queue that is not seen before
NAME_MAX = 100  # a name for people, shown in lists and logs
FILE_BYTES_MAX = 32 << 20  # TOKENS_MAX tokens with long patterns; anything larger is not ours
ENDED_KEPT_MS = 90 * 86_400_000  # ended tokens are listed so long, for those who ask what a token was

BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SECRET_FORM = re.compile(rf"{PREFIX}_([0-9A-Za-z]{{{ID_CHARS}}})_[0-9A-Za-z]{{{SECRET_CHARS}}}", re.ASCII)
_PATTERN = re.compile(r"[A-Za-z0-9._/*?\[\]!-]+", re.ASCII)

Status = Literal["active", "expired", "revoked"]


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a token: all but its secret."""

    id: str
    role: str
    queues: tuple[str, ...]
    sha256: str
    created_at: datetime
    name: str = ""
    commands: bool = False
    expires_at: datetime | None = None
    revoked_at: datetime | None = None

    def status(self, now: int) -> Status:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and to_ms(self.expires_at) <= now else "active"

    def ended_before(self, instant: int) -> bool:
        ends = [to_ms(at) for at in (self.revoked_at, self.expires_at) if at is not None]
        return bool(ends) and min(ends) < instant


class _Versioned(msgspec.Struct):
    version: int


class _Contents(msgspec.Struct):
    version: int
    tokens: list[Token]


class TokensUnreadable(MillpondError):
    """The file is there and nobody can tell what it says: no token counts until somebody has looked."""

    code = "tokens_unreadable"


class TokensFile:
    """For one process or several at once: changes take a lock, readers see the file before or after one."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self._directory = directory

    def read(self) -> list[Token]:
        """None at all if there is no file. Also those that have ended."""
        try:
            with self.path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise TokensUnreadable(f"cannot read {self.path} ({error.strerror}); make it readable") from error
        return decode(data, self.path)

    def create(
        self,
        now: int,
        *,
        role: str,
        queues: list[str],
        name: str = "",
        commands: bool = False,
        expire_timeout_ms: int | None = None,
    ) -> tuple[Token, str]:
        """The token and its secret, which nobody can tell again."""
        _check(role, queues, name)
        with self._changing() as tokens:
            kept = [token for token in tokens if not token.ended_before(now - ENDED_KEPT_MS)]
            if len(kept) >= TOKENS_MAX:
                raise Conflict(f"there are {len(kept)} tokens; use at most {TOKENS_MAX}, and revoke what is not used")
            id, secret = new_secret({token.id for token in kept})
            token = Token(
                id=id,
                role=role,
                queues=tuple(queues),
                sha256=digest(secret),
                created_at=to_datetime(now),
                name=name,
                commands=commands,
                expires_at=None if expire_timeout_ms is None else to_datetime(now + expire_timeout_ms),
            )
            self._write([*kept, token])
        return token, secret

    def revoke(self, id: str, now: int) -> Token:
        """Revoking twice is once. A secret in place of its id is understood: that is what leaks."""
        with self._changing() as tokens:
            token = self._found(tokens, id)
            if token.revoked_at is None:
                position = tokens.index(token)
                token = msgspec.structs.replace(token, revoked_at=to_datetime(now))
                self._write([*tokens[:position], token, *tokens[position + 1 :]])
            return token

    def get(self, id: str) -> Token:
        """By its id or its secret, as `revoke` finds it."""
        return self._found(self.read(), id)

    def _found(self, tokens: list[Token], id: str) -> Token:
        known = SECRET_FORM.fullmatch(id)
        id = known[1] if known else id
        for token in tokens:
            if token.id == id:
                return token
        raise NotFound(f"there is no token {id!r:.60} in {self._directory}; see `millpond token list`")

    @contextmanager
    def _changing(self) -> Iterator[list[Token]]:
        """What the file says, which nobody else changes meanwhile."""
        try:
            make_directory(self._directory.parent)
            make_directory(self._directory, PRIVATE)
            lock = os.open(self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise InvalidRequest(f"cannot use {self._directory} as data directory ({error}); choose another") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.read()
        finally:
            os.close(lock)

    def _write(self, tokens: list[Token]) -> None:
        """The new file is whole and on disk before it takes the old one's name."""
        partial = self.path.with_suffix(".new")
        partial.unlink(missing_ok=True)  # of a process that died; its mode may be anything
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(encode(tokens))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self.path)
        sync_directory(self._directory)


# ---- the format -------------------------------------------------------------------------------------------


def encode(tokens: list[Token]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(_Contents(VERSION, tokens)), indent=1) + b"\n"


def decode(data: bytes, path: Path) -> list[Token]:
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != VERSION:
            raise TokensUnreadable(f"{path} has version {version}, this millpond reads {VERSION}; use a newer millpond")
        return msgspec.json.decode(data, type=_Contents).tokens
    except msgspec.MsgspecError as error:
        raise TokensUnreadable(
            f"{path} is damaged ({error}); restore it, or delete it and create tokens anew"
        ) from None


# ---- secrets ----------------------------------------------------------------------------------------------


def new_secret(taken: set[str]) -> tuple[str, str]:
    """An id that is not taken, and the secret that begins with it."""
    while (id := "".join(secrets.choice(BASE62) for _ in range(ID_CHARS))) in taken:
        pass
    return id, f"{PREFIX}_{id}_{_base62(secrets.token_bytes(SECRET_BYTES))}"


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _base62(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    digits = ""
    for _ in range(SECRET_CHARS):
        number, rest = divmod(number, len(BASE62))
        digits = BASE62[rest] + digits
    return digits


def _check(role: str, queues: list[str], name: str) -> None:
    if role not in ROLES:
        raise InvalidRequest(f"{role!r:.60} is no role; use one of {', '.join(ROLES)}")
    if not 1 <= len(queues) <= QUEUES_MAX:
        raise InvalidRequest(f"{len(queues)} patterns of queues; give 1 to {QUEUES_MAX}, '*' for all queues")
    for pattern in queues:
        if len(pattern) > QUEUE_NAME_MAX or not _PATTERN.fullmatch(pattern):
            raise InvalidRequest(f"{pattern!r:.60} matches no queue's name; write a name, or a pattern like 'team-a/*'")
    if len(name) > NAME_MAX or not name.isprintable():
        raise InvalidRequest(f"the name {name!r:.60} is too long or not printable; use at most {NAME_MAX} characters")
