"""What a command works on: the pond in a data directory, whoever owns it, or a server.

    runs_on_pond(verb, run)
    with open_pond(asked) as pond:                  # blocking
    return on_pond(asked, work)                     # work(pond) is a coroutine

A command locks the directory, acts and lets go of it; if another process owns it, that one acts for it. Only what stays
for a while (`listen`) answers others meanwhile.

A flag counts above the environment (MILLPOND_SERVER, MILLPOND_DATA) and that above the configuration. The token of a
server is in MILLPOND_TOKEN: what is on a command line is seen by everybody on the machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from millpond.cli.flags import Arguments, Run, add_config_flags, add_json, load_or_exit
from millpond.cli.output import say

if TYPE_CHECKING:
    from millpond.blocking import Pond
    from millpond.client import AsyncClient, Client
    from millpond.embedded import AsyncPond
    from millpond.model import StoreSettings

T = TypeVar("T")

SERVER_VARIABLE, TOKEN_VARIABLE = "MILLPOND_SERVER", "MILLPOND_TOKEN"
LAKE_FOLDER = "history"  # of a data directory
LOGS_FOLDER = "logs"  # of a data directory: the output of commands
ANSWER_S = 10.0  # a person waits for the command: a server that is away is told within it


def add_pond_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", metavar="URL", help=f"work on a server ({SERVER_VARIABLE}, {TOKEN_VARIABLE})")
    add_config_flags(parser, ["data"])


def runs_on_pond(verb: argparse.ArgumentParser, run: Run) -> None:
    """What most verbs end with: flags that name the pond, `--json`, and what is then done."""
    add_pond_flags(verb)
    add_json(verb)
    verb.set_defaults(run=run)


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


def stores_of(asked: Arguments) -> tuple[StoreSettings, ...]:
    """For a command that turns out to own the directory: partitions may be in them."""
    stores: tuple[StoreSettings, ...] = load_or_exit(asked).config.stores
    return stores


def lake_of(asked: Arguments) -> str:
    """A directory, or a URL that Spark can read."""
    return str(asked.lake) if asked.lake else str(data_of(asked) / LAKE_FOLDER)


def open_pond(asked: Arguments, *, create: bool = False, listen: bool = False) -> Pond | Client:
    """Open on return; use `with`. Without `create` the data directory must be there."""
    server = server_of(asked)
    if server is None:
        import millpond

        data = directory_of(asked, create=create)
        return millpond.open(data, listen=listen, stores=stores_of(asked), patient=False)
    from millpond.client import Client

    return Client(server, token=token_of(), timeout=ANSWER_S, patient=False)


def open_async_pond(
    asked: Arguments, *, create: bool = False, listen: bool = True, patient: bool = True, token: str | None = None
) -> AsyncPond | AsyncClient:
    """For `async with`. Without `patient` for a person who waits."""
    server = server_of(asked)
    if server is None:
        import millpond

        data = directory_of(asked, create=create)
        return millpond.open_async(data, listen=listen, stores=stores_of(asked), patient=patient)
    from millpond.client import AsyncClient

    return AsyncClient(server, token=token or token_of(), timeout=ANSWER_S, patient=patient)


def on_pond(
    asked: Arguments,
    work: Callable[[Any], Awaitable[T]],
    *,
    create: bool = False,
    listen: bool = False,
    empty: bool = False,
) -> T:
    """What `work` gives, on an event loop of its own. The pond that it is called with has the calls of `Api`.

    `empty`: it only looks, and before the first job there is nothing to see, which is no failure. A directory that
    the command itself names must be there.
    """
    import asyncio

    async def run() -> T:
        if empty and asked.data is None and server_of(asked) is None and not data_of(asked).is_dir():
            opened = _empty_pond(asked)
        else:
            opened = open_async_pond(asked, create=create, listen=listen, patient=False)
        async with opened as pond:
            return await work(pond)

    return asyncio.run(run())


def _empty_pond(asked: Arguments) -> AsyncPond | AsyncClient:
    import millpond

    say(f"there is no data directory {data_of(asked)} yet; the first `millpond enqueue` makes it")
    return millpond.AsyncPond(":memory:")


@contextmanager
def open_for_spark(asked: Arguments) -> Iterator[tuple[Pond | Client, dict[str, str]]]:
    """The pond, and the options by which Spark's processes reach it too: they speak HTTP over TCP."""
    from millpond.client import Client

    server, token = server_of(asked), token_of()
    if server is not None and server.startswith("http"):
        with open_pond(asked) as pond:
            yield pond, {"url": server} | ({"token": token} if token else {})
        return
    from millpond.cli.loopback import served

    with served(open_async_pond(asked)) as (url, secret), Client(url, token=secret, timeout=ANSWER_S) as client:
        yield client, {"url": url, "token": secret}


def directory_of(asked: Arguments, *, create: bool = False) -> Path:
    from millpond.errors import NotFound

    data = data_of(asked)
    if not create and not data.is_dir():
        raise NotFound(
            f"there is no data directory {data}; the first `millpond enqueue` or `millpond queue create` makes it,"
            " or name another with --data, or a server with --server"
        )
    return data


def token_of() -> str | None:
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
