"""Records in Parquet files, read a few thousand rows at a time.

data.source=parquet  data.path=FILE|FOLDER|PATTERN      needs the extra `parquet`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

from multipack.data.data_config import DataConfig
from multipack.data.messages import without_nulls
from multipack.data.record_source import FileRecords, Row
from multipack.data.tokenizer import TokenizerConfig

PARQUET_SUFFIXES = (".parquet", ".pq")
ROWS = 1024
"""Rows that are objects of Python at once. Of a file, no more than about one row group is in memory."""


class ParquetSource(FileRecords):
    """The rows of Parquet files; only the columns that are used are read."""

    unit = "rows"

    def __init__(self, config: DataConfig, tokenizer: TokenizerConfig | None = None) -> None:
        super().__init__(config, tokenizer, PARQUET_SUFFIXES)
        self._done = 0
        for index in range(len(self._files.paths)):
            with self._files.open(index) as file:
                self.total += self._open(index, file).metadata.num_rows

    @property
    def done(self) -> int:
        """See `Source`."""
        return self._done

    def _before(self) -> None:
        super()._before()
        self._done = 0

    def _open(self, index: int, file: BinaryIO) -> Any:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ImportError(
                'data.source=parquet needs the package pyarrow: pip install "multipack[parquet]"'
            ) from error
        try:
            return parquet.ParquetFile(file)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{self._files.paths[index]}: not a Parquet file: {error}") from error

    def _read(self, index: int, file: BinaryIO) -> Iterator[Row]:
        import pyarrow

        path, name, number = self._files.paths[index], self._files.names[index], 0
        table = self._open(index, file)
        columns = self._reader.columns(table.schema_arrow.names)
        batches = table.iter_batches(batch_size=ROWS, columns=columns, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except (pyarrow.ArrowException, OSError) as error:
                raise ValueError(f"{path}, after row {number}: broken Parquet file: {error}") from error
            if batch is None:
                return
            for record in batch.to_pylist():
                number += 1
                self._done += 1
                yield Row(f"{name}:{number}", f"{path}, row {number}", without_nulls(record))
