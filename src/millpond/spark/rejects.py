"""Rows that a write has rejected, as Parquet files beside each other in a directory.

A task writes hidden files; the driver gives those of the tries that counted their names, which begin with the
transaction's, in place of what an earlier run of it had left. Readers that ignore names with a leading dot, Spark among
them, see each rejected row once.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet

REASON, TASK, ROW = "_reason", "_task", "_row"


class Rejects:
    """One task's try. `directory` is a path or a URI that driver and executors share."""

    def __init__(self, directory: str, txn: str, name: str) -> None:
        self._directory = directory
        self._file = f".{_prefix(txn)}{name}.parquet"
        self._writer: pa.parquet.ParquetWriter | None = None

    def add(self, rows: pa.RecordBatch, reasons: pa.Array, task: int, places: pa.Array) -> None:
        tasks = pa.array([task] * rows.num_rows, pa.int32())
        columns = [*rows.columns, reasons, tasks, places]
        table = pa.Table.from_arrays(columns, names=[*rows.schema.names, REASON, TASK, ROW])
        if self._writer is None:
            files, root = _place(self._directory)
            files.create_dir(root, recursive=True)
            self._writer = pa.parquet.ParquetWriter(f"{root}/{self._file}", table.schema, filesystem=files)
        self._writer.write_table(table)

    def close(self) -> list[str]:
        if self._writer is None:
            return []
        self._writer.close()
        return [self._file]

    @staticmethod
    def keep(directory: str, txn: str, names: Sequence[str]) -> None:
        """These are the transaction's; whatever else it has left goes."""
        files, root = _place(directory)
        prefix = _prefix(txn)
        chosen = pyarrow.fs.FileSelector(root, allow_not_found=True)
        for found in files.get_file_info(chosen):
            if found.base_name.lstrip(".").startswith(prefix) and found.base_name not in names:
                files.delete_file(found.path)
        for name in names:
            files.move(f"{root}/{name}", f"{root}/{name.removeprefix('.')}")


def _prefix(txn: str) -> str:
    return f"{quote(txn, safe='')}--"


def _place(directory: str) -> tuple[pyarrow.fs.FileSystem, str]:
    files, root = pyarrow.fs.FileSystem.from_uri(directory)
    return files, root.rstrip("/")
