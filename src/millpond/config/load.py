"""From a file, the environment and flags to a Config, with where each value came from and everything that is wrong.

Flags go over the environment, the environment over the file, the file over the defaults. All problems are found in one
run: whoever mends a file wants to mend it once.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millpond.config import values
from millpond.config.keys import BY_NAME, CONFIG_VARIABLE, DEFAULT_FILE, KEYS, OTHER_VARIABLES, TABLES, Key
from millpond.config.settings import Config, Limits, Log, Timeouts, Tls
from millpond.config.stores import StoreTables, read_stores
from millpond.config.stores import warnings as store_warnings
from millpond.config.toml_lines import lines_of
from millpond.model import StoreSettings

FILE_BYTES_MAX = 1 << 20  # a configuration is a page; a larger file is not one
TYPO_RATIO = 0.9  # how like a known variable another must be, to be worth a word

_AT_LINE = re.compile(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", re.DOTALL)

STORES = "stores"  # the one that is no value but tables, and only in the file


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """`where` is a file with a line, a variable or a flag."""

    where: str
    text: str
    key: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.key} {self.text}" if self.key else f"{self.where}: {self.text}"


HERE = Path()  # the working directory: looked up for a relative path alone, since it may have been removed


class Given(msgspec.Struct, frozen=True):
    """A value as somebody wrote it. `lines` are those of an array's members, where known."""

    key: Key
    raw: Any
    where: str
    base: Path
    line: int | None = None
    lines: tuple[int, ...] = ()


class Loaded(msgspec.Struct, frozen=True):
    """`config` is what holds where there are no problems, and the defaults in place of what is wrong."""

    config: Config
    origins: dict[str, str]
    problems: list[Problem]
    warnings: list[str]
    file: Path | None


def load(
    file: str | None = None,
    flags: Mapping[str, str | Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Loaded:
    """`flags` by key name, as text. Without `file`, MILLPOND_CONFIG or the default file, if there is one."""
    environment = os.environ if environment is None else environment
    problems: list[Problem] = []
    chosen = _choose(file, environment)
    given: list[Given] = []
    tables: list[StoreTables] = []
    if chosen is not None:
        given += _from_file(chosen, problems, tables)
    given += _from_environment(environment)
    given += _from_flags(flags or {})
    found, sources = _read(given, problems)
    problems += _together(found, sources)
    origins = {key.name: sources[key.name].where if key.name in sources else "default" for key in KEYS}
    stores = _stores(tables, found["data"], origins, problems)
    warnings = [*_warnings(found), *store_warnings(stores), *_typos(environment)]
    return Loaded(_build(found, stores), origins, problems, warnings, chosen)


def _choose(file: str | None, environment: Mapping[str, str]) -> Path | None:
    named = file or environment.get(CONFIG_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    default = DEFAULT_FILE.expanduser()
    return default if default.is_file() else None


# ---- the file ---------------------------------------------------------------------------------------------


def _from_file(path: Path, problems: list[Problem], tables: list[StoreTables]) -> Iterator[Given]:
    text = _text_of(path, problems)
    if text is None:
        return
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problems.append(_syntax(path, text, str(error)))
        return
    except RecursionError:
        problems.append(Problem(str(path), "is nested too deeply; a configuration has tables of one level"))
        return
    lines = lines_of(text)
    for parts, raw in _leaves(document):
        name = ".".join(parts)
        line = lines[parts]
        where = f"{path}:{line}"
        if name in BY_NAME:
            count = len(raw) if isinstance(raw, list) else 0
            members = tuple(lines[*parts, position] for position in range(count))
            yield Given(BY_NAME[name], raw, where, path.parent, line, members)
        elif name == STORES:
            tables.append(StoreTables(raw, path, lines))
        else:
            problems.append(Problem(where, _unknown(parts, raw), name, line))


def _text_of(path: Path, problems: list[Problem]) -> str | None:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        problems.append(Problem(str(path), f"cannot be read ({error.strerror}); name a file with --config"))
        return None
    if len(data) > FILE_BYTES_MAX:
        problems.append(Problem(str(path), f"has more than {FILE_BYTES_MAX} bytes; name a TOML file with --config"))
        return None
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problems.append(Problem(f"{path}:{line}", "is not UTF-8; save the file as UTF-8", line=line))
        return None


def _syntax(path: Path, text: str, told: str) -> Problem:
    match = _AT_LINE.fullmatch(told)
    last = text.rstrip("\n").count("\n") + 1
    line = int(match[2]) if match and match[2] else last
    what = (match[1] if match else told).rstrip(".")
    return Problem(f"{path}:{line}", f"this is no TOML ({what}); mend the line, text needs quotes", line=line)


def _leaves(document: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Tables that have keys are gone into, one level; anything else is for somebody to judge."""
    for name, raw in document.items():
        if name in TABLES and isinstance(raw, dict):
            yield from (((name, inner), value) for inner, value in raw.items())
        else:
            yield (name,), raw


def _unknown(parts: tuple[str, ...], raw: Any) -> str:
    name = ".".join(parts)
    if name in TABLES:
        return f"is {values.shown(raw)}; it is a table, write [{name}] and its keys below"
    what = "table" if isinstance(raw, dict) else "key"
    hint = _right_key(parts, what)
    return f"is no {what} of millpond; {hint}"


def _right_key(parts: tuple[str, ...], what: str) -> str:
    """By the whole name; then by the last part, for a key that stands in the wrong table."""
    names = [*BY_NAME, *TABLES, STORES]
    if hint := values.nearest(".".join(parts), names):
        return hint
    lasts = {key.path[-1]: key.name for key in KEYS}
    close = difflib.get_close_matches(parts[-1].lower(), lasts, 1)
    if close:
        return f"did you mean {lasts[close[0]]!r}?"
    return f"remove it; there are {', '.join(TABLES if what == 'table' else names)}"


# ---- environment and flags --------------------------------------------------------------------------------


def _from_environment(environment: Mapping[str, str]) -> Iterator[Given]:
    """A variable that is set to nothing counts as not set."""
    for key in KEYS:
        if raw := environment.get(key.variable):
            yield Given(key, raw, key.variable, HERE)


def _from_flags(flags: Mapping[str, str | Sequence[str]]) -> Iterator[Given]:
    for name, raw in flags.items():
        key = BY_NAME[name]
        yield Given(key, raw if isinstance(raw, str) else list(raw), key.flag, HERE)


def _typos(environment: Mapping[str, str]) -> Iterator[str]:
    """Only a word of warning: others set variables of this prefix too (Kubernetes does, for a service named so)."""
    known = [*(key.variable for key in KEYS), *OTHER_VARIABLES]
    for name in sorted(environment):
        if name.startswith("MILLPOND_") and name not in known:
            close = difflib.get_close_matches(name, known, 1, TYPO_RATIO)
            if close:
                yield f"{name} is no variable of millpond and is ignored; did you mean {close[0]}?"


# ---- all together -----------------------------------------------------------------------------------------


def _read(given: list[Given], problems: list[Problem]) -> tuple[dict[str, Any], dict[str, Given]]:
    """The values by name, and what they are from. A wrong one is told also where another goes over it."""
    found = {key.name: key.default for key in KEYS}
    found["data"] = found["data"].expanduser()
    sources: dict[str, Given] = {}
    for one in given:
        try:
            found[one.key.name] = one.key.read(one.raw, one.base)
            sources[one.key.name] = one
        except ValueError as error:
            problems.append(_problem(one, error))
    return found, sources


def _problem(given: Given, error: ValueError) -> Problem:
    where, line = given.where, given.line
    if isinstance(error, values.MemberError) and given.lines:
        line = given.lines[error.position]
        where = f"{where.rpartition(':')[0]}:{line}"
    return Problem(where, str(error), given.key.name, line)


def _together(found: dict[str, Any], sources: dict[str, Given]) -> Iterator[Problem]:
    """What is right by itself and wrong beside the rest."""

    def problem(name: str, text: str) -> Problem:
        source = sources.get(name)
        return Problem(source.where if source else "default", text, name, source.line if source else None)

    for one, other in (("tls.cert", "tls.key"), ("tls.key", "tls.cert"), ("tls.client_ca", "tls.cert")):
        if found[one] is not None and found[other] is None:
            yield problem(one, f"is set without {other}; set both or neither")
    for name in ("tls.cert", "tls.key", "tls.client_ca"):
        if found[name] is not None and not (found[name].is_file() and os.access(found[name], os.R_OK)):
            yield problem(name, f"is {str(found[name])!r}, which cannot be read; name a PEM file")
    if found["data"].exists() and not found["data"].is_dir():
        yield problem("data", f"is {str(found['data'])!r}, which is no directory; name a directory")


def _stores(
    tables: list[StoreTables], data: Path, origins: dict[str, str], problems: list[Problem]
) -> tuple[StoreSettings, ...]:
    for one in tables:
        stores, wrong = read_stores(one, data)
        problems += [Problem(f"{one.file}:{line}", text, key, line) for line, key, text in wrong]
        origins.update((f"{STORES}.{store.name}", f"{one.file}:{one.line(no)}") for no, store in enumerate(stores))
        return stores
    return ()


def _warnings(found: dict[str, Any]) -> Iterator[str]:
    if found["limits.parked_leases"] >= found["limits.connections"]:
        yield "limits.parked_leases leaves no connection to complete items with; make limits.connections larger"
    if found["insecure_no_tls"] and found["tls.cert"] is not None:
        yield "insecure_no_tls changes nothing while tls.cert is set; remove one of them"
    key = found["tls.key"]
    if key is not None and key.is_file() and key.stat().st_mode & 0o077:
        yield f"tls.key {key} can be read by others; `chmod 600` it"


def _build(found: dict[str, Any], stores: tuple[StoreSettings, ...]) -> Config:
    def table(name: str) -> dict[str, Any]:
        return {key.path[1]: found[key.name] for key in KEYS if key.path[0] == name and len(key.path) == 2}

    return Config(
        data=found["data"],
        bind=found["bind"],
        allowed_hosts=found["allowed_hosts"],
        insecure_no_tls=found["insecure_no_tls"],
        tls=Tls(**table("tls")),
        limits=Limits(**table("limits")),
        timeouts=Timeouts(**table("timeouts")),
        log=Log(**table("log")),
        stores=stores,
    )
