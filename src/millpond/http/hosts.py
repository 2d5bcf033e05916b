"""The Host header against DNS rebinding: a page of another site must not reach a server on this machine."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from millpond.http.refusals import WrongHost

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::\d{1,5})?")
SHOWN_MAX = 60  # of a wrong name in the error


class AllowedHosts:
    """Names that this server answers to. Addresses are always good: only a name can be rebound to another machine."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {name.lower().rstrip(".") for name in names}
        self._good: set[bytes] = set()  # headers seen to be good: few, for each passed the test

    def check(self, host: bytes | None) -> None:
        if host in self._good:
            return
        if host is None or not self._is_good(host.decode("latin-1")):
            shown = (host or b"").decode("latin-1")[:SHOWN_MAX]
            raise WrongHost(f"this server does not go by the name {shown!r}; use its address, or have the name allowed")
        if len(self._good) < 1_000:  # ports vary: a client must not grow it without end
            self._good.add(host)

    def _is_good(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].lower().rstrip(".")
        return name in self._names or _is_address(name.strip("[]"))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
