"""Found by Spark, which looks for modules named pyspark_*: `format("millpond")` works where millpond is installed.

Spark imports every such module before it uses any Python data source, so this one must not fail where the extra
`spark` is not installed as a whole.
"""

from __future__ import annotations

try:
    from millpond.spark.formats import MillpondSource as DefaultSource
    from millpond.spark.formats import pack
except ModuleNotFoundError:
    pass
else:
    __all__ = ["DefaultSource"]
    pack()
