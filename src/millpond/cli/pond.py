"""What a command works on: the pond in a data directory, whoever owns it, or a server.

    add_pond_flags(parser)
    with open_pond(asked) as pond:

A flag counts above the environment (MILLPOND_SERVER, MILLPOND_DATA) and that above the configuration. The token of a
server is in MILLPOND_TOKEN: what is on a command line is seen by everybody on the machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.cli.flags import Arguments, add_config_flags, load_or_exit

if TYPE_CHECKING:
    from millpond.blocking import Pond
    from millpond.client import AsyncClient, Client
    from millpond.embedded import AsyncPond

SERVER_VARIABLE, TOKEN_VARIABLE = "MILLPOND_SERVER", "MILLPOND_TOKEN"
LAKE_FOLDER = "history"  # of a data directory
ANSWER_S = 10.0  # a person waits for the command: a server that is away is told within it


def add_pond_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", metavar="URL", help=f"work on a server ({SERVER_VARIABLE}, {TOKEN_VARIABLE})")
    add_config_flags(parser, ["data"])


def server_of(asked: Arguments, environment: Mapping[str, str] = os.environ) -> str | None:
    """None where the command works on a data directory."""
    given: str | None = asked.server
    if given is None:
        return None if asked.data is not None else environment.get(SERVER_VARIABLE) or None
    if asked.data is not None:
        from millpond.errors import InvalidRequest

        raise InvalidRequest("--server and --data name two places to work on; give one of them")
    return given


def data_of(asked: Arguments) -> Path:
    """The data directory of this machine, also where the command works on a server."""
    data: Path = load_or_exit(asked).config.data
    return data


def lake_of(asked: Arguments) -> str:
    """A directory, or a URL that Spark can read."""
    return str(asked.lake) if asked.lake else str(data_of(asked) / LAKE_FOLDER)


def open_pond(asked: Arguments, *, create: bool = False) -> Pond | Client:
    """Open on return; use `with`. Without `create` the data directory must be there."""
    server = server_of(asked)
    if server is None:
        import millpond

        return millpond.open(_directory(asked, create))
    from millpond.client import Client

    return Client(server, token=_token(), timeout=ANSWER_S)


def open_async_pond(asked: Arguments, *, create: bool = False) -> AsyncPond | AsyncClient:
    """For `async with`."""
    server = server_of(asked)
    if server is None:
        import millpond

        return millpond.open_async(_directory(asked, create))
    from millpond.client import AsyncClient

    return AsyncClient(server, token=_token(), timeout=ANSWER_S)


@contextmanager
def open_for_spark(asked: Arguments) -> Iterator[tuple[Pond | Client, dict[str, str]]]:
    """The pond, and the options by which Spark's processes reach it too: they speak HTTP over TCP."""
    from millpond.client import Client

    server, token = server_of(asked), _token()
    if server is not None and server.startswith("http"):
        with open_pond(asked) as pond:
            yield pond, {"url": server} | ({"token": token} if token else {})
        return
    from millpond.cli.loopback import served

    with served(open_async_pond(asked)) as (url, secret), Client(url, token=secret, timeout=ANSWER_S) as client:
        yield client, {"url": url, "token": secret}


def _directory(asked: Arguments, create: bool) -> Path:
    from millpond.errors import NotFound

    data = data_of(asked)
    if not create and not data.is_dir():
        raise NotFound(f"there is no data directory {data}; name it with --data, or a server with --server")
    return data


def _token() -> str | None:
    return os.environ.get(TOKEN_VARIABLE) or None


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around the imports of what the base installation does not have."""
    try:
        yield
    except ModuleNotFoundError as error:
        from millpond.errors import InvalidRequest

        if error.name is not None and error.name.startswith("millpond"):
            raise
        raise InvalidRequest(
            f"there is no {error.name} here; install it with: pip install 'millpond[{extra}]'"
        ) from error
