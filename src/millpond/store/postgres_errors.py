"""The url of a PostgreSQL store, and its errors in words: what is wrong, what to do, and never the password."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from millpond.errors import InvalidRequest
from millpond.store.base import StoreFailed, StoreFull, StoreRefused

CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 30  # the longest commit writes a snapshot of some hundred MB
SCHEMA = "millpond"

DEFAULTS: dict[str, Any] = {
    "application_name": "millpond",
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives_idle": 10,  # seconds: a host that is gone is noticed before the timeout, where the network says so
    "keepalives_interval": 5,
    "keepalives_count": 3,
}

# ---- the url ----------------------------------------------------------------------------------------------

HOW_TO_WRITE = (
    "write it as postgresql://user:password@host:5432/database, "
    "with %40 for @, %3A for :, %2F for / and %25 for % in the password"
)


def parse_url(url: str) -> tuple[dict[str, Any], str]:
    """What libpq makes of it, and the schema. What is not understood is not shown: it may be a password."""
    try:
        found: dict[str, Any] = conninfo_to_dict(url)
    except psycopg.Error:
        found = {}
    if not found:
        raise InvalidRequest(f"the url of a PostgreSQL store cannot be read; {HOW_TO_WRITE}")
    misplaced = "@" in f"{found.get('host', '')}{found.get('dbname', '')}"
    ports = str(found.get("port", "")).split(",")  # of each host; one that is left out is the usual one
    if misplaced or not all(port.isdigit() for port in ports if port):
        raise InvalidRequest(f"the url of a PostgreSQL store has an @ or / too many; {HOW_TO_WRITE}")
    options, schema = take_schema(str(found.get("options", "")))
    if options:
        found["options"] = options
    else:
        found.pop("options", None)
    return {**DEFAULTS, **found}, schema


def take_schema(options: str) -> tuple[str, str]:
    """`-csearch_path=name` names the schema; the other options are the server's."""
    kept, schema = [], SCHEMA
    for option in options.replace("-c ", "-c").split():
        name, _, value = option.removeprefix("-c").partition("=")
        if name == "search_path":
            schema = value
        else:
            kept.append(option)
    if not schema.isidentifier() or schema != schema.lower() or len(schema) > 63:
        raise InvalidRequest(f"{schema!r} cannot be the schema of a store; use one lower-case word, as in {SCHEMA}")
    return " ".join(kept), schema


# ---- errors -----------------------------------------------------------------------------------------------

TLS = "TLS"  # in place of a code: nobody answers with one while a connection is being secured
WHAT_TO_DO = {
    "28P01": "the user or the password is wrong; correct the store's url",
    "28000": "the user may not connect; correct the store's url, or pg_hba.conf on the server",
    "3D000": "there is no such database; create it, or correct the store's url",
    "42501": "the user lacks a privilege; let an administrator CREATE SCHEMA {schema} AUTHORIZATION {user}",
    "3F000": "the schema is gone; restore it from a backup",
    "42P01": "a table of the schema {schema} is gone; restore it from a backup",
    "42883": "a function of the schema {schema} is gone; restore it from a backup",
    "25006": "it only reads, as a standby does; name the server that writes, or add target_session_attrs=read-write",
    "53100": "there is no room; free disk space on the database server",
    "53300": "it has too many connections; raise its max_connections, or end some",
    "55P03": "another's commit is in the way; it is tried again",
    "57014": "it took longer than {statement} s; see what keeps the server busy",
    "XX001": "its data are damaged; restore them from a backup",
    "XX002": "an index is damaged; REINDEX it, or restore a backup",
    "MP001": "run one millpond with these queues, and stop the other",
    "MP002": "so it was after a failover to a standby that lagged; what is left is read again",
    "MP003": "the queue is being deleted",
    TLS: "see sslmode and sslrootcert in the store's url, and the server's certificate",
}
IN_TEXT = {  # libpq gives no code for what happens before a connection stands
    "password authentication failed": "28P01",
    "no password supplied": "28P01",
    "pg_hba.conf": "28000",
    'role "': "28P01",
    "permission denied": "28000",
    'database "': "3D000",
    "too many": "53300",
    "remaining connection slots": "53300",
    "read-only": "25006",
    "not accepting writes": "25006",
}
TLS_WORDS = ("certificate", "sslmode", "SSL was required")


def code_of(problem: psycopg.Error) -> str | None:
    if problem.sqlstate is not None or not isinstance(problem, psycopg.OperationalError):
        return problem.sqlstate
    if any(word in str(problem) for word in TLS_WORDS):
        return TLS
    fatal = str(problem).partition("FATAL:")[2] or str(problem).partition("session is ")[2]
    return next((code for text, code in IN_TEXT.items() if text in fatal), None)


def kind_of(problem: psycopg.Error) -> type[StoreFailed]:
    """An error that the server answers with means that nothing was written; a lost connection means nothing."""
    if problem.diag.severity_nonlocalized != "ERROR":
        return StoreFailed
    return StoreFull if isinstance(problem, psycopg.errors.DiskFull) else StoreRefused


def describe(name: str, arguments: dict[str, Any], schema: str, problem: psycopg.Error) -> str:
    what = " ".join((problem.diag.message_primary or str(problem)).split()) or type(problem).__name__
    advice = WHAT_TO_DO.get(code_of(problem) or "", "check that the server runs and can be reached; it is tried again")
    user = arguments.get("user", "the user")
    return f"{name} failed ({what}): {advice.format(schema=schema, user=user, statement=STATEMENT_TIMEOUT_S)}"


def name_of(arguments: dict[str, Any]) -> str:
    """Where a store is, for people."""
    host, port = arguments.get("host", "localhost"), arguments.get("port", 5432)
    return f"PostgreSQL at {host}:{port}/{arguments.get('dbname', '')}"
