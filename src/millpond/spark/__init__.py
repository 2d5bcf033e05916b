"""Spark reads, writes and remembers: the extra `spark`, and the only part that imports pyspark.

Nothing is imported here before it is asked for: the processes that Spark starts for a data source import its modules
one by one, and one that is slow to start is given up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.spark.formats import register

__all__ = ["register"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'millpond.spark' has no attribute {name!r}")
    from millpond.spark.formats import register

    return register
