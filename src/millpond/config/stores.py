"""The `[[stores]]` of a configuration file, and what is wrong with each, on its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from millpond.config.toml_lines import Path as Place
from millpond.config.values import shown
from millpond.model import StoreSettings
from millpond.service.validate_stores import problems

HIDDEN = "***"
SECRETS = ("password", "secret", "scram")  # in the names of what libpq takes as a parameter


class StoreTables(Struct, frozen=True):
    """As they were written in `file`."""

    raw: Any
    file: Path
    lines: Mapping[Place, int]

    def line(self, position: int, field: str = "") -> int:
        """Of a field that is missing, its table's."""
        found = self.lines.get(("stores", position, field)) or self.lines.get(("stores", position))
        return found or self.lines["stores",]


def read_stores(tables: StoreTables, data: Path) -> tuple[tuple[StoreSettings, ...], list[tuple[int, str, str]]]:
    """The stores; and of each mistake its line, the key and what is wrong. With any, there are no stores."""
    raw = tables.raw
    if not isinstance(raw, list) or not all(isinstance(one, dict) for one in raw):
        return (), [(tables.lines["stores",], "stores", f"is {shown(raw)}; write [[stores]] and its keys below")]
    given = [_from_file(one, tables.file.parent) for one in raw]
    wrong = [
        (tables.line(position, field), f"stores.{field}" if field else "stores", text)
        for position, field, text in problems(given, data)
    ]
    return (() if wrong else tuple(_settings(one) for one in given)), wrong


def _from_file(one: dict[str, Any], base: Path) -> dict[str, Any]:
    """Relative paths start from the file."""
    path = one.get("path")
    if not isinstance(path, str) or not path:
        return one
    try:
        return {**one, "path": str(base / Path(path).expanduser())}
    except RuntimeError:  # ~ of nobody
        return one


def _settings(one: dict[str, Any]) -> StoreSettings:
    return StoreSettings(**{**one, "affinity": float(one.get("affinity", 1.0))})


def warnings(stores: tuple[StoreSettings, ...]) -> Iterator[str]:
    affinities = {"default": 1.0} | {one.name: one.affinity for one in stores}
    if not any(affinities.values()):
        yield "all stores have affinity 0, so that no queue can be created; raise one of them"
    for one in stores:
        if one.driver == "memory":
            yield f"store {one.name!r} is in memory: what is in it is lost with the process; it is for tests"


def without_password(url: str) -> str:
    """A store's url as it may be shown. What libpq takes for a password may have a `?` or a `#` in it."""
    try:
        urlsplit(url)
    except ValueError:
        return HIDDEN
    scheme, mark, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    name, colon, password = user.partition(":")
    shown = f"{scheme}{mark}{name}{colon}{HIDDEN if password else ''}{at}{host}{slash}{path}"
    place, question, query = shown.partition("?")
    return f"{place}?{HIDDEN}" if any(map(_is_secret, query.split("&"))) else f"{place}{question}{query}"


def _is_secret(parameter: str) -> bool:
    name = unquote(parameter.partition("=")[0]).lower()
    return any(word in name for word in SECRETS)
