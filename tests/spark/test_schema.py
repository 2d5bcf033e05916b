"""JSON payloads as columns: no row is lost for not being JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from millpond.spark.schema import parse_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = StructType([StructField("n", IntegerType()), StructField("s", StringType())])
GOOD = [
    ('{"n": 1, "s": "x"}', (1, "x")),
    ('{"n": 2}', (2, None)),
    ('{"more": true}', (None, None)),
    ("{}", (None, None)),
]
BAD = ["not json", '{"n": ', "", "null", "[1, 2]", '"text"', '{"n": "many"}']


@pytest.mark.parametrize("schema", [SCHEMA, "n int, s string"])
def test_payloads_become_columns_and_what_does_not_parse_stays(spark: SparkSession, schema: StructType | str) -> None:
    rows = [(text.encode(),) for text, _ in GOOD] + [(text.encode(),) for text in BAD]
    df = parse_json(spark.createDataFrame(rows, "payload binary"), schema)
    assert df.columns == ["payload", "value", "_corrupt"]
    found = df.collect()
    good, bad = found[: len(GOOD)], found[len(GOOD) :]
    assert [tuple(row.value) for row in good] == [values for _, values in GOOD]
    assert [row._corrupt for row in good] == [None] * len(GOOD)
    assert [row._corrupt for row in bad] == BAD


def test_the_columns_can_be_named(spark: SparkSession) -> None:
    df = spark.createDataFrame([('{"n": 1}',), ("x",)], "payload string")
    parsed = parse_json(df, SCHEMA, into="order", corrupt="wrong")
    assert parsed.selectExpr("order.n", "wrong").collect() == [(1, None), (None, "x")]
