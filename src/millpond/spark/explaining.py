"""What to say of an error of Spark's: a line of its text, and whether who asked has to change something."""

from __future__ import annotations

import re

from pyspark.errors import PySparkException

LINE_MAX = 500  # Spark names every column that there is

# What is a mistake in what was asked, by the class of its SQLSTATE: syntax or names, data, cardinality, not supported.
_ASKERS_OWN = ("42", "22", "21", "0A")
_STATE = re.compile(r"\s*SQLSTATE: \w+;?")


def line_of(error: PySparkException) -> str:
    line = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    return _STATE.sub("", line).strip()[:LINE_MAX]


def is_askers_own(error: PySparkException) -> bool:
    return (error.getSqlState() or "").startswith(_ASKERS_OWN)
