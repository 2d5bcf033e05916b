"""Where to listen, and who may then come: addresses, the rules for binding, and the Host header.

A server that only this machine can reach may do without tokens and TLS; any other must have both, or be told not to.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from millpond.config.settings import PORT, Address, Config

SOCKET_PATH_MAX = 107  # bytes: what sun_path holds on Linux, less its end

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?", re.ASCII)

Resolve = Callable[[str], Iterable[str]]


# ---- addresses --------------------------------------------------------------------------------------------


def read_address(text: str, base: Path) -> Address:
    """`127.0.0.1:7410`, `[::1]:7410`, `name:7410` or `unix:/path`; a relative path starts from `base`."""
    if text.startswith("unix:"):
        return _unix(text.removeprefix("unix:"), base)
    if "://" in text:
        raise ValueError(f"is {text!r:.80}, a URL; write only the address, like '127.0.0.1:{PORT}'")
    host, port = _split(text)
    if not is_host(host):
        raise ValueError(
            f"is {text!r:.80}, which is no address; write '127.0.0.1:{PORT}', '[::1]:{PORT}' or 'unix:/path'"
        )
    return Address(host.lower(), _port(port, text))


def is_host(text: str) -> bool:
    return len(text) <= 253 and (_ip(text) is not None or _is_name(text))


def _is_name(text: str) -> bool:
    """A name whose last part is a number would be taken for an IPv4 address by some, and for a name by others."""
    return _HOST_NAME.fullmatch(text) is not None and not text.rstrip(".").rpartition(".")[2].isdigit()


def _split(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if closed and _ip(host) is not None and (not rest or rest.startswith(":")):
            return host, rest[1:] or str(PORT)
        return "", ""
    if text.count(":") > 1:
        raise ValueError(f"is {text!r:.80}; write an IPv6 address in brackets, like '[::1]:{PORT}'")
    host, colon, port = text.partition(":")
    if colon and not host:
        raise ValueError(
            f"is {text!r:.80}; say where to listen, like '127.0.0.1{text}' (this machine) or '0.0.0.0{text}'"
        )
    if host.isdigit() and not colon:
        raise ValueError(f"is {text!r:.80}; say where to listen too, like '127.0.0.1:{host}'")
    return host, port if colon else str(PORT)


def _port(port: str, text: str) -> int:
    if not (port.isascii() and port.isdigit() and int(port[:6]) <= 65_535):
        raise ValueError(f"is {text!r:.80}, whose port is no number from 0 to 65535; write it like '127.0.0.1:{PORT}'")
    return int(port)


def _unix(path: str, base: Path) -> Address:
    if not path or "\0" in path or path.endswith("/"):
        raise ValueError(
            f"is {'unix:' + path!r:.80}; write the path of a socket behind it, like 'unix:/run/millpond.sock'"
        )
    full = str((base / Path(path).expanduser()).absolute())
    if len(full.encode(errors="replace")) > SOCKET_PATH_MAX:
        raise ValueError(
            f"is 'unix:{full}', longer than the {SOCKET_PATH_MAX} bytes of a socket's path; use a shorter one"
        )
    return Address(path=full)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


# ---- the rules for binding --------------------------------------------------------------------------------


def resolve(host: str) -> list[str]:
    """All addresses of a name; none if it has none."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return []


def is_local(address: Address, resolver: Resolve = resolve) -> bool:
    """Whether only this machine can connect. A name is as local as the least local of its addresses."""
    if address.path or address.host == "localhost":
        return True
    own = _ip(address.host)
    found = [address.host] if own is not None else list(resolver(address.host))
    return bool(found) and all(_is_loopback(host) for host in found)


def _is_loopback(host: str) -> bool:
    ip = _ip(host.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return ip is not None and (mapped or ip).is_loopback


def only_local(config: Config, resolver: Resolve = resolve) -> bool:
    """Whether the guard may let everybody in while there are no tokens."""
    return all(is_local(address, resolver) for address in config.bind)


def check_bind(config: Config, has_tokens: bool, resolver: Resolve = resolve) -> list[str]:
    """What forbids to listen as told; nothing if all is well."""
    far = [address for address in config.bind if not is_local(address, resolver)]
    problems = [
        f"bind names {address.host!r}, which has no address; check the name, or bind an address"
        for address in far
        if _ip(address.host) is None and not list(resolver(address.host))
    ]
    shown = ", ".join(map(str, far))
    if far and not has_tokens:
        problems.append(
            f"bind {shown} can be reached from other machines, and there are no tokens;"
            f" create one with `millpond token create --role admin --queues '*' --data {config.data}`,"
            f" or bind 127.0.0.1:{far[0].port}"
        )
    if far and config.tls.cert is None and not config.insecure_no_tls:
        problems.append(
            f"bind {shown} can be reached from other machines, and there is no TLS; set tls.cert and tls.key,"
            f" or bind 127.0.0.1:{far[0].port} behind a proxy that has TLS, or allow plain text with --insecure-no-tls"
        )
    return problems


# ---- the Host header --------------------------------------------------------------------------------------


def host_names(config: Config) -> frozenset[str] | None:
    """The names that the server answers to, besides literal addresses; None for any name.

    Another name is that of a page which was pointed at this machine (DNS rebinding). For TCP only: no browser talks to
    a Unix socket.
    """
    if "*" in config.allowed_hosts:
        return None
    return frozenset({"localhost", *(address.host for address in config.bind if address.host), *config.allowed_hosts})
