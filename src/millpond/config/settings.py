"""What a server is told: the Structs that the rest of millpond reads, with their defaults. Durations are seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from millpond.model import StoreSettings

PORT = 7410

LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


class Address(msgspec.Struct, frozen=True):
    """Where to listen: `host` and `port`, or the `path` of a Unix socket. `host` is without the brackets of IPv6."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files. With `client_ca`, callers must show a certificate that it signed (mutual TLS), and a token too."""

    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    body_bytes: int = 16 << 20  # the largest produce that the engine takes
    header_bytes: int = 64 << 10  # a token, a host and a correlation id take 1 KiB
    connections: int = 10_000
    parked_leases: int = 8_000  # fewer than connections: those who complete must still get in


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    keep_alive: float = 75.0  # longer than the 60 s of usual proxies, so that they close first
    header: float = 10.0  # for the whole of a request's header: a slower one is an attack
    body: float = 30.0  # for the whole of its body, however slow the line: it is held in memory meanwhile
    shutdown: float = 30.0  # for what is under way when the server is told to end


class Log(msgspec.Struct, frozen=True, kw_only=True):
    format: LogFormat = "auto"  # console on a terminal, JSON lines elsewhere
    level: LogLevel = "info"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    data: Path = Path("~/.local/share/millpond")
    bind: tuple[Address, ...] = (Address("127.0.0.1", PORT),)
    allowed_hosts: tuple[str, ...] = ()
    insecure_no_tls: bool = False
    tls: Tls = Tls()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    log: Log = Log()
    stores: tuple[StoreSettings, ...] = ()
