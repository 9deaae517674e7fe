"""Tables of comma-, semicolon- or tab-separated text (RFC 4180) as a data source, also compressed.

All cells are text, and an empty one is null. Weights, labels and lists of turns, which other sources have as
numbers and lists, are read as JSON. Quotes are strict, because a table that escapes them in another way would
otherwise be split in the middle of a text."""

from __future__ import annotations

import csv
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

from idlm.errors import UserError
from idlm.files.paths import BOM
from idlm.files.records import TextFile, TextReader, Value
from idlm.train.data.build import file_source
from idlm.train.data.records.detect import wanted_columns
from idlm.train.data.records.turns import WRITE_LINES, with_cells

DELIMITERS = ",;\t"
"""In the order in which a header decides for one of them."""


@file_source("csv")
class CsvReader(TextReader):
    """Rows of tables with a header; `number` is the line in which a row begins."""

    def values(self, file: TextFile) -> Iterator[Value]:
        # A text may be longer than 128 KiB.
        csv.field_size_limit(sys.maxsize)
        lines = _lines(file)
        header = next(lines, "").removeprefix(BOM.decode())
        signs = "\t" if ".tsv" in file.path.name.lower() else re.sub('"[^"]*"', "", header)
        delimiter = next((sign for sign in DELIMITERS if sign in signs), DELIMITERS[0])
        # A name in quotes may hold a line break.
        table = csv.reader(itertools.chain([header], lines), delimiter=delimiter, strict=True)
        first = 1
        try:
            names = next(table, [])
            wanted, unread = _columns(names, file.name)
            first = table.line_num + 1
            for cells in table:
                number, first = first, table.line_num + 1
                if cells:
                    yield number, _record(cells, names, wanted, f"{file.name}:{number}"), unread
        except csv.Error as error:
            raise UserError(
                "IDLM-0201",
                f"{file.name}:{first} begins a row that is not that of a table: {error}",
                fix=f'double the quotes inside quoted cells ("" for "), or {WRITE_LINES}',
            ) from error


def _lines(file: TextFile) -> Iterator[str]:
    for number, line in enumerate(file.stream, start=1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise file.not_utf8(error, number) from error


def _columns(names: list[str], file: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the columns that are read, and those that are not."""
    if len(set(names)) < len(names):
        twice = next(key for key in names if names.count(key) > 1)
        raise UserError(
            "IDLM-0201", f"{file} has two columns {twice!r}", fix="rename one of them in the header"
        )
    # pandas writes the index of a row under no name.
    return wanted_columns([key for key in names if key])


def _record(cells: list[str], names: list[str], wanted: list[str], origin: str) -> dict[str, Any] | UserError:
    if len(cells) != len(names):
        return UserError(
            "IDLM-0201",
            f"{origin} has {len(cells)} cells, and the header has {len(names)} columns",
            fix=f"put cells with a delimiter or a line break into quotes, or {WRITE_LINES}",
        )
    row = dict(zip(names, cells, strict=True))
    return with_cells({key: row[key] for key in wanted}, wanted, origin)
