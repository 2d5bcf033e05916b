"""Who asks, and whether they may: the access tokens of the data directory, seen from the server.

The app calls `authenticate` with the Authorization header, then `authorize` with the call and the queue that the
request names. Both are plain lookups; the tokens file is looked at when the last look is `LOOK_EVERY_MS` old, so that
a token that the command line creates or revokes beside a running server counts within seconds.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import logging
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

from millpond.access.roles import COMMAND_KINDS, LISTS, ROLES, WHOLE, may_make, may_register, roles_with
from millpond.access.tokens_file import SECRET_FORM, Token, TokensFile, TokensUnreadable
from millpond.errors import Forbidden, Unauthorized, Unavailable
from millpond.model import to_datetime, to_ms

LOOK_EVERY_MS = 1_000  # a revoke must count within 5 s; a look is one stat
HEADER_MAX = 256  # a token has 55 characters; what is longer is none
SEEN_MAX = 10_000  # queues remembered an identity, with whether it may use them

CHALLENGE = 'Bearer realm="millpond"'
CHALLENGE_INVALID = f'{CHALLENGE}, error="invalid_token"'
NO_DIGEST = "0" * 64  # compared with when the id is unknown, so that it takes as long

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int, int]
UNKNOWN: Stamp = (0, 0, 0, 0)


class Identity:
    """Who a request is from: a token's holder, or `LOCAL`."""

    __slots__ = ("_match", "_seen", "calls", "commands", "expires_ms", "id", "name", "queues", "role", "sha256")

    def __init__(self, token: Token) -> None:
        self.id = token.id
        self.name = token.name
        self.role = token.role
        self.queues = token.queues
        self.commands = token.commands
        self.sha256 = token.sha256
        self.expires_ms = None if token.expires_at is None else to_ms(token.expires_at)
        self.calls = ROLES.get(token.role, frozenset())  # a role of a later release may do nothing here
        self._match = re.compile("|".join(fnmatch.translate(pattern) for pattern in token.queues)).match
        self._seen: dict[str, bool] = {}

    @property
    def who(self) -> str:
        """As the audit log names them."""
        return self.name or self.id

    @property
    def everywhere(self) -> bool:
        return "*" in self.queues

    def sees(self, queue: str) -> bool:
        """Whether the token's patterns match: what queues.list shows, and what any call may name."""
        known = self._seen.get(queue)
        if known is None:
            if len(self._seen) >= SEEN_MAX:
                self._seen.clear()
            known = self._seen[queue] = self._match(queue) is not None
        return known

    def __repr__(self) -> str:
        """For logs and errors: never the secret, which nobody here knows."""
        return f"token {self.id}" + (f" ({self.name})" if self.name else "")


LOCAL = Identity(
    Token(
        id="local",
        role="admin",
        queues=("*",),
        sha256=NO_DIGEST,
        created_at=to_datetime(0),
        commands=True,
    )
)
"""Everybody, where no tokens are: on loopback and on Unix sockets, whoever can connect owns the machine's user."""


class Guard:
    """`open_to_local`: nobody but this machine can connect, so that tokens are asked for once there are some.

    `now` is the server's clock, in ms. A guard that has seen a token asks for one as long as it lives, whatever
    becomes of the file.
    """

    def __init__(self, directory: Path | None, now: Callable[[], int], *, open_to_local: bool) -> None:
        self._file = None if directory is None else TokensFile(directory)
        self._now = now
        self._identities: dict[str, Identity] = {}
        self._open = open_to_local
        self._broken = False
        self._stamp: Stamp | None = None
        self._looked_at = now()
        self._look()

    # ---- who ------------------------------------------------------------------------------------------------

    def authenticate(self, authorization: bytes | None) -> Identity:
        now = self._now()
        if now - self._looked_at >= LOOK_EVERY_MS:
            self._looked_at = now
            self._look()
        if self._open:
            return LOCAL
        if self._broken:
            raise Unavailable("the server cannot read its tokens; its log says why, ask its operator")
        if authorization is None:
            raise Unauthorized(
                "no token was sent; send 'Authorization: Bearer <token>' with one of `millpond token create`",
                challenge=CHALLENGE,
            )
        return self._holder(_secret_of(authorization), now)

    def _holder(self, secret: re.Match[str], now: int) -> Identity:
        identity = self._identities.get(secret[1])
        known = NO_DIGEST if identity is None else identity.sha256
        given = hashlib.sha256(secret[0].encode()).hexdigest()
        if not hmac.compare_digest(given, known) or identity is None:
            raise _invalid("the token is not known here or was revoked; ask for a new one")
        if identity.expires_ms is not None and identity.expires_ms <= now:
            raise _invalid(f"token {identity.id} has expired; ask for a new one")
        return identity

    # ---- whether they may -----------------------------------------------------------------------------------

    def authorize(self, identity: Identity, call: str, queue: str | None, kinds: Collection[str] = ()) -> None:
        """For each queue that a request names (a dead queue too). `kinds` are those of the items that it produces."""
        if may_register(identity.calls, call, queue, kinds):
            return
        if call not in identity.calls and not may_make(identity.calls, call, queue):
            raise _wrong_role(identity, call)
        if queue is None:
            if call not in LISTS and not identity.everywhere:
                raise _no_queue(identity, call)
        elif not identity.sees(queue):
            raise Forbidden(
                f"{identity!r} is for queues {', '.join(identity.queues)}, not for {queue!r:.220};"
                " use a token whose --queues match it",
                call=call,
                queues=list(identity.queues),
            )
        if not identity.commands and not COMMAND_KINDS.isdisjoint(kinds):
            raise Forbidden(
                f"{identity!r} may not produce jobs (kind {' or '.join(sorted(COMMAND_KINDS))}), which workers run;"
                " use a token created with --commands",
                call=call,
            )

    # ---- the file -------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._file is None:
            return
        stamp = _stamp(self._file.path)
        if stamp == self._stamp and not self._broken:
            return
        try:
            tokens = self._file.read()
        except TokensUnreadable as error:
            if not self._broken:
                log.error("no token counts: %s", error.message)
            self._broken, self._open, self._identities = True, False, {}
            return
        self._stamp = stamp
        self._broken = False
        self._open = self._open and not tokens
        self._identities = {token.id: Identity(token) for token in tokens if token.revoked_at is None}


def _stamp(path: Path) -> Stamp | None:
    """Taken before the file is read: a change in between is seen at the next look. None where there is no file."""
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError:
        return UNKNOWN  # there may be one: reading it will tell
    return stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size


def _secret_of(authorization: bytes) -> re.Match[str]:
    scheme, _, rest = authorization[:HEADER_MAX].decode("latin-1").strip().partition(" ")
    if scheme.lower() != "bearer":
        raise _invalid("the Authorization header is not of scheme Bearer; send 'Authorization: Bearer <token>'")
    secret = SECRET_FORM.fullmatch(rest.strip())
    if secret is None:
        raise _invalid("the Authorization header holds no token of millpond; a token reads mp_…_…, send it whole")
    return secret


def _invalid(text: str) -> Unauthorized:
    return Unauthorized(text, challenge=CHALLENGE_INVALID)


def _wrong_role(identity: Identity, call: str) -> Forbidden:
    roles = roles_with(call)
    needed = f"use a token of role {' or '.join(roles)}" if roles else "no role may"
    return Forbidden(
        f"{identity!r} has role {identity.role}, which may not call {call}; {needed}", call=call, roles=roles
    )


def _no_queue(identity: Identity, call: str) -> Forbidden:
    """Lease tokens name their queue, but it is the engine that can read them: here, `queue` must say it."""
    what = "use a token of --queues '*'" if call in WHOLE else "name the queue in `queue`"
    return Forbidden(f"{identity!r} is for queues {', '.join(identity.queues)} only; for {call}, {what}", call=call)
