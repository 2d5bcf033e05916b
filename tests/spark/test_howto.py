"""docs/howto/use-spark.md tells the truth: its snippets run, and do what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.spark import options
from tests.spark.server import pond_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).parent.parent.parent / "docs" / "howto" / "use-spark.md"
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_snippets_run_from_top_to_bottom(spark: SparkSession, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    with pond_in(tmp_path / "data") as pond:
        for queue in ("orders", "enriched"):
            pond.server.must("queues.create", name=queue)
        for snippet in SNIPPET.findall(PAGE.read_text()):
            text = snippet.replace("http://127.0.0.1:7410", pond.url)
            for folder in ("checkpoints/", "booked/"):
                text = text.replace(folder, f"{tmp_path}/{folder}")
            exec(compile(text, str(PAGE), "exec"), names)
        assert pond.counts("orders") == {}
        assert pond.counts("enriched") == {"dead": 1}
        [dead] = pond.items("enriched")
    assert json.loads(dead["text"]) == {"amount": 900, "currency": "EUR"}
    assert (dead["key"], dead["last_error"]) == ("o2", "over the limit")
    booked = spark.read.parquet(f"{tmp_path}/booked").select("key", "value.amount").orderBy("key").collect()
    assert [tuple(row) for row in booked] == [("o1", 5), ("o2", 900), ("o4", None)]


def test_every_option_is_in_the_table() -> None:
    table = PAGE.read_text().partition("## Options")[2].partition("\n## ")[0]
    known = {*options.READ_NAMES, *options.SINK_NAMES, *options.VERDICT_NAMES}
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == known
