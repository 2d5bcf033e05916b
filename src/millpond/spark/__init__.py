"""Spark reads, writes and remembers: the extra `spark`, and the only part that imports pyspark.

Nothing is imported here before it is asked for: the processes that Spark starts for a data source import its modules
one by one, and one that is slow to start is given up.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.spark.formats import give_verdicts, register
    from millpond.spark.schema import parse_json, to_payload

__all__ = ["give_verdicts", "parse_json", "register", "to_payload"]

_HOMES = {
    "give_verdicts": "millpond.spark.formats",
    "parse_json": "millpond.spark.schema",
    "register": "millpond.spark.formats",
    "to_payload": "millpond.spark.schema",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'millpond.spark' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
