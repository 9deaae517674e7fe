"""Parquet files as a data source: one file, a folder of shards or a pattern. Only the columns of the
shapes are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from idlm.errors import UserError
from idlm.train.data.base import SOURCES, Encoder
from idlm.train.data.build import cached_source
from idlm.train.data.cache import CachedSource
from idlm.train.data.files import SUFFIXES, Row, find_files, identity_of, shown
from idlm.train.data.shapes import KEYS

if TYPE_CHECKING:
    from idlm.train.data.settings import DataConfig

BATCH_ROWS = 256


class ParquetReader:
    """Rows of Parquet files, in the order of the files' names; `place` is the 1-based row of its file."""

    def __init__(self, path: str) -> None:
        self.paths = find_files(path, SUFFIXES["parquet"])
        self.names = tuple(shown(name) for name in self.paths)
        self.share_read = 0.0

    def identity(self) -> list[Any]:
        return identity_of(self.paths)

    def rows(self) -> Iterator[Row]:
        import pyarrow
        from pyarrow import parquet

        for file, path in enumerate(self.paths):
            place = 0
            try:
                table = parquet.ParquetFile(path)
                columns = wanted_columns(table.schema_arrow.names)
                for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                    for record in batch.to_pylist():
                        place += 1
                        yield Row(file=file, place=place, value=without_nulls(record))
                    self.share_read = (file + place / max(1, table.metadata.num_rows)) / len(self.paths)
            except (pyarrow.ArrowException, OSError) as error:
                raise UserError(
                    "IDLM-0231",
                    f"{self.names[file]} breaks off or is damaged behind row {place}: {error}",
                    fix="copy or download the file again",
                ) from error


def wanted_columns(names: list[str]) -> list[str]:
    """The columns that a shape may have; all of them where there is none, so that an error can name them."""
    return [name for name in names if name in KEYS] or list(names)


def without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """A table has every column in every row: null stands for a key that the record lacks."""
    return {key: value for key, value in record.items() if value is not None}


@SOURCES.register("parquet")
def parquet_source(config: DataConfig, encoder: Encoder) -> CachedSource:
    """Read `data.path`."""
    if config.path is None:
        raise UserError(
            "IDLM-0209", "data.source=parquet needs data.path", fix="set data.path=<file>.parquet"
        )
    return cached_source(ParquetReader(config.path), config, encoder)
