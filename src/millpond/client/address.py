"""Where a server is: `http://host:port`, `https://…`, `unix:///path/to.sock`."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from millpond.errors import InvalidRequest

DEFAULT_URL = "http://127.0.0.1:7410"
PORTS = {"http": 80, "https": 443}
PathLike = str | os.PathLike[str]


class Address(Struct, frozen=True):
    """`path` is a Unix socket's, `prefix` what a proxy put before `/v1/…`."""

    url: str
    host: str = ""
    port: int = 0
    path: str = ""
    tls: bool = False
    prefix: str = ""

    @property
    def host_header(self) -> str:
        if self.path:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS["https" if self.tls else "http"] else f"{host}:{self.port}"


def read_url(url: str) -> Address:
    given: object = url
    if not isinstance(given, str) or not url.isascii() or not url.isprintable() or " " in url:
        raise _wrong(given, "is no URL")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _wrong(url, f"is no URL ({error})") from None
    if "@" in parts.netloc:  # not shown: it may be a secret
        raise InvalidRequest("the URL has a user name or password; give the secret as token=")
    if parts.query or parts.fragment:
        raise _wrong(url, "has a query or a fragment")
    if parts.scheme in ("unix", "http+unix"):
        return _unix(url, unquote(parts.netloc) + unquote(parts.path))
    if parts.scheme not in PORTS or not parts.hostname:
        raise _wrong(url, "is no address of a server")
    port = PORTS[parts.scheme] if port is None else port
    prefix = parts.path.rstrip("/")
    return Address(url, parts.hostname, port, tls=parts.scheme == "https", prefix=prefix)


def _unix(url: str, path: str) -> Address:
    if not path.startswith("/"):
        raise _wrong(url, "names no socket")
    return Address(url, path=path)


def _wrong(url: object, what: str) -> InvalidRequest:
    return InvalidRequest(f"{url!r:.100} {what}; use http://host:port, https://host or unix:///path/to.sock")


def tls_context(
    address: Address, ca: PathLike | None, cert: PathLike | tuple[PathLike, PathLike] | None
) -> ssl.SSLContext:
    """Servers are verified always: by `ca`, else by what the system trusts. `cert` is ours, for mutual TLS."""
    try:
        context = ssl.create_default_context(cafile=None if ca is None else Path(ca))
        if isinstance(cert, tuple):
            context.load_cert_chain(*cert)
        elif cert is not None:
            context.load_cert_chain(cert)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(
            f"the certificates for {address.url} cannot be used ({error}); check ca= and cert="
        ) from error
    return context
