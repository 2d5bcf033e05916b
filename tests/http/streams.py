"""Arrow IPC streams as batch readers and writers have them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

ARROW = "application/vnd.apache.arrow.stream"


def stream(*, rows_a_batch: int | None = None, **columns: Any) -> bytes:
    """Of lists, or of arrays where the type matters."""
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_a_batch)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def read(body: bytes) -> Any:
    """The table, checked to the last byte."""
    table = pa.ipc.open_stream(body).read_all()
    table.validate(full=True)
    return table
