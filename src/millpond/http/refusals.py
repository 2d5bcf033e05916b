"""The errors that only a server can raise: of method, media type, pace; and the host that nobody here is."""

from __future__ import annotations

from typing import Any

from millpond.errors import Forbidden, InvalidRequest


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"
    status = 405

    def __init__(self, message: str, *, allow: str, **details: Any) -> None:
        super().__init__(message, allow=allow, **details)
        self.allow = allow


class UnsupportedMediaType(InvalidRequest):
    code = "unsupported_media_type"
    status = 415


class TooSlow(InvalidRequest):
    code = "too_slow"
    status = 408


class HeadersTooLarge(InvalidRequest):
    code = "headers_too_large"
    status = 431


class WrongHost(Forbidden):
    code = "wrong_host"


class ClientGone(Exception):
    """Nobody is left to answer. Not an error of anybody's."""
