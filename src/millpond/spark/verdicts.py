"""Verdicts on items of the running micro-batch: retry this one, bury that one; completing its claim completes the rest.

Verdicts are noted with the claim and take effect when it is completed, so giving them again, in a retried task or a
replayed batch, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import DataType, DoubleType, FloatType, IntegralType, StringType, StructType

from millpond.spark.options import VerdictOptions, verdict_options
from millpond.spark.schema import WrongSchema
from millpond.spark.sink import Overwriting
from millpond.spark.transport import Refused, Transport

FORMAT = "millpond.verdicts"
VERDICTS = ("retry", "dead")
VERDICTS_MAX = 1_000  # in one request
SHOWN_MAX = 5  # of those that went wrong
COLUMNS: dict[str, tuple[type[DataType], ...]] = {
    "id": (StringType,),
    "verdict": (StringType,),
    "error": (StringType,),
    "delay": (StringType, DoubleType, FloatType, IntegralType),
}
REQUIRED = ("id", "verdict")


class VerdictRefused(ValueError):
    """A verdict that cannot be given. Others may have been noted: giving them again does no harm."""


@dataclass
class Given(WriterCommitMessage):
    verdicts: int


class VerdictSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise Overwriting("verdicts are added to those given before; write with mode('append')")
        check_columns(schema)
        return VerdictWriter(verdict_options(self.options))


class VerdictWriter(DataSourceArrowWriter):
    """Made on the driver, which looks up the consumer's claim: there is one at a time, that of the running batch."""

    def __init__(self, options: VerdictOptions) -> None:
        self._options = options
        self._claim_id, self._epoch = find_claim(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        given = 0
        with self._options.server.transport() as transport:
            for batch in iterator:
                for start in range(0, batch.num_rows, VERDICTS_MAX):
                    rows = batch.slice(start, VERDICTS_MAX).to_pylist()
                    self._give(transport, [_verdict(row) for row in rows])
                    given += len(rows)
        return Given(given)

    def _give(self, transport: Transport, verdicts: list[dict[str, Any]]) -> None:
        fields = {"queue": self._options.queue, "claim_id": self._claim_id, "epoch": self._epoch}
        results = transport.call("claim.verdict", verdicts=verdicts, **fields)["results"]
        wrong = [
            f"{verdict['id']!r}: {result['error']['message']}"
            for verdict, result in zip(verdicts, results, strict=True)
            if result.get("error")
        ]
        if wrong:
            more = f"; and {len(wrong) - SHOWN_MAX} more" if len(wrong) > SHOWN_MAX else ""
            raise VerdictRefused(
                f"{len(wrong)} verdicts were refused: {'; '.join(wrong[:SHOWN_MAX])}{more}. Give verdicts on items of"
                f" the running batch of consumer {self._options.consumer!r} only"
            )


def check_columns(schema: StructType) -> None:
    names = schema.fieldNames()
    for name in REQUIRED:
        if name not in names:
            raise WrongSchema(f"there is no column {name}; a verdict has the columns {', '.join(COLUMNS)}")
    for field in schema.fields:
        if field.name not in COLUMNS:
            raise WrongSchema(f"a verdict has no {field.name!r:.60}; its columns are {', '.join(COLUMNS)}")
        if not isinstance(field.dataType, COLUMNS[field.name]):
            said = "a duration: a string or seconds" if field.name == "delay" else "a string"
            raise WrongSchema(f"the column {field.name} is {field.dataType.simpleString()}; it must be {said}")


def _verdict(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] is None or row["verdict"] not in VERDICTS:
        raise VerdictRefused(
            f"the verdict on {row['id']!r:.80} is {row['verdict']!r:.60}; give every row an id and one of"
            f" {', '.join(VERDICTS)} (items without a row are completed)"
        )
    return {name: value for name, value in row.items() if value is not None}


def find_claim(options: VerdictOptions) -> tuple[str, int | None]:
    with options.server.transport() as transport:
        claims = transport.call("claims.list", queue=options.queue)["claims"]
    for claim in claims:
        if claim["claim_id"].rpartition(":")[0] == options.consumer:
            return claim["claim_id"], claim.get("epoch")
    raise Refused(
        "not_found",
        f"consumer {options.consumer!r} of queue {options.queue!r} has no open claim; give verdicts inside foreachBatch"
        " of the query that reads with this consumer",
    )
