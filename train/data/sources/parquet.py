"""Parquet files as a data source. Only columns of the shapes are read."""

from __future__ import annotations

from collections.abc import Iterator

from idlm.files.records import FileReader, Row, damaged, without_nulls
from idlm.train.data.build import file_source
from idlm.train.data.records.detect import wanted_columns

BATCH_ROWS = 256


@file_source("parquet")
class ParquetReader(FileReader):
    """Rows of Parquet files; `number` is the 1-based row of its file."""

    def rows(self) -> Iterator[Row]:
        import pyarrow
        from pyarrow import parquet

        for file, path in enumerate(self.paths):
            number = 0
            try:
                table = parquet.ParquetFile(path)
                columns, unread = wanted_columns(table.schema_arrow.names)
                for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                    for record in batch.to_pylist(maps_as_pydicts="strict"):
                        number += 1
                        yield Row(file=file, number=number, value=without_nulls(record), unread=unread)
                    self.share_read = (file + number / max(1, table.metadata.num_rows)) / len(self.paths)
            except (pyarrow.ArrowException, OSError) as error:
                raise damaged(f"{self.names[file]} (after row {number})", error) from error
