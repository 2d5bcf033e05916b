"""Every key of the configuration: how it is written, read and explained. One row each; the rest follows from them.

`limits.body_bytes` in the file is `MILLPOND_LIMITS_BODY_BYTES` in the environment and `--limits-body-bytes` as a flag.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from millpond.config import values
from millpond.config.settings import Config

BODY_BYTES = (1 << 10, 1 << 30)  # below, no produce fits; above, a few requests fill the memory
HEADER_BYTES = (1 << 10, 1 << 20)  # as many bytes may be held for each connection before anybody is known
CONNECTIONS = (1, 1_000_000)  # a file each; the system's own limit is lower still
PARKED = (0, 1_000_000)  # 0 forbids long polls
TIMEOUT = (0.1, 3_600.0)  # less is a mistake of units, more holds sockets of the dead
SHUTDOWN = (0.0, 3_600.0)  # 0 ends at once


class Key(msgspec.Struct, frozen=True):
    """`switch` is a flag without a value, `many` one that may be given again."""

    name: str
    read: values.Read
    about: str
    metavar: str = ""
    switch: bool = False
    many: bool = False

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.name.split("."))

    @property
    def variable(self) -> str:
        return "MILLPOND_" + self.name.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace(".", "-").replace("_", "-")

    @property
    def default(self) -> Any:
        return self.value_in(Config())

    def value_in(self, config: Config) -> Any:
        found: Any = config
        for part in self.path:
            found = getattr(found, part)
        return found

    def text_in(self, config: Config) -> str:
        return values.text_of(self.value_in(config))


KEYS = (
    Key("data", values.path, "the data directory", "DIR"),
    Key("bind", values.addresses, "where to listen: 127.0.0.1:7410, [::1]:7410 or unix:/path", "ADDR", many=True),
    Key("allowed_hosts", values.hosts, "names under which callers may reach the server", "HOST", many=True),
    Key("insecure_no_tls", values.boolean, "listen to other machines without TLS", switch=True),
    Key("tls.cert", values.path, "the server's certificate chain, PEM", "FILE"),
    Key("tls.key", values.path, "the certificate's private key, PEM", "FILE"),
    Key("tls.client_ca", values.path, "callers must show a certificate of this authority, PEM", "FILE"),
    Key("limits.body_bytes", values.size(*BODY_BYTES), "the largest body of a request (413 above)", "SIZE"),
    Key("limits.header_bytes", values.size(*HEADER_BYTES), "the largest header of a request (431 above)", "SIZE"),
    Key("limits.connections", values.count(*CONNECTIONS), "connections at a time (503 above)", "N"),
    Key("limits.parked_leases", values.count(*PARKED), "leases that wait, at a time (429 above)", "N"),
    Key("timeouts.keep_alive", values.duration(*TIMEOUT), "how long an idle connection is kept", "TIME"),
    Key("timeouts.header", values.duration(*TIMEOUT), "how long a request's header may take", "TIME"),
    Key("timeouts.body", values.duration(*TIMEOUT), "how long a request's body may take", "TIME"),
    Key("timeouts.shutdown", values.duration(*SHUTDOWN), "how long the end waits for requests under way", "TIME"),
    Key("log.format", values.choice("auto", "json", "console"), "json, console, or auto by the terminal", "FORMAT"),
    Key("log.level", values.choice("debug", "info", "warning", "error"), "the least level that is logged", "LEVEL"),
)

BY_NAME = {key.name: key for key in KEYS}
TABLES = tuple(dict.fromkeys(key.path[0] for key in KEYS if len(key.path) == 2))

CONFIG_VARIABLE = "MILLPOND_CONFIG"
OTHER_VARIABLES = (CONFIG_VARIABLE, "MILLPOND_SERVER", "MILLPOND_TOKEN")  # of the clients, and of the file itself

DEFAULT_FILE = Path("~/.config/millpond/millpond.toml")


def with_values(config: Config, other: Config, names: Iterable[str]) -> Config:
    """The configuration, with these keys as another has them."""
    for name in names:
        *table, last = BY_NAME[name].path
        value = BY_NAME[name].value_in(other)
        if table:
            last, value = table[0], replace(getattr(config, table[0]), **{last: value})
        config = replace(config, **{last: value})
    return config
