"""Tables of comma-, semicolon- or tab-separated text (RFC 4180) as a data source, also compressed.

All cells are text, and an empty one is null. Weights, labels and lists of turns, which other sources have as
numbers and lists, are read as JSON. Quotes are strict, because a table that escapes them in another way would
otherwise be split in the middle of a text."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from idlm.errors import UserError
from idlm.files.paths import BOM, DAMAGE, convert_command, packing, unpacked
from idlm.files.records import SUFFIXES, FileReader, Row, damaged, reading
from idlm.train.config.data import DataConfig
from idlm.train.data.base import SOURCES, Encoder
from idlm.train.data.build import cached_source
from idlm.train.data.cache import CachedSource
from idlm.train.data.records.detect import wanted_columns
from idlm.train.data.records.parts import LABEL_KEYS, LISTED_WEIGHTS, TEMPLATE_KEYS

DELIMITERS = ",;\t"
"""In the order in which a header decides for one of them."""
VALUE_COLUMNS = frozenset((*LABEL_KEYS, *LISTED_WEIGHTS, *TEMPLATE_KEYS))
TURNS = re.compile(r"\s*\[\s*\{\s*['\"](role|from|content|value)['\"]\s*:")
"""How a list of turns begins, as JSON or as Python writes it."""
WRITE_LINES = "write the table as JSON lines (`to_json` of datasets, or of pandas with lines=True)"


class CsvReader(FileReader):
    """Rows of tables with a header; `number` is the line in which a row begins."""

    def rows(self) -> Iterator[Row]:
        # A text may be longer than 128 KiB.
        csv.field_size_limit(sys.maxsize)
        sizes = [path.stat().st_size for path in self.paths]
        for file, (path, name) in enumerate(zip(self.paths, self.names, strict=True)):
            with reading(path):
                raw = path.open("rb")
            number = 0
            with raw:
                try:
                    kind = packing(raw, path)
                    for number, value, unread in _values(unpacked(raw, path), path, name):
                        yield Row(file=file, number=number, value=value, unread=unread)
                        self.share_read = (sum(sizes[:file]) + raw.tell()) / max(1, sum(sizes))
                except UnicodeDecodeError as error:
                    raise UserError(
                        "IDLM-0239",
                        f"{name} is not UTF-8 (after line {number})",
                        fix=f"convert the file: {convert_command(name, None, kind)}",
                    ) from error
                except csv.Error as error:
                    raise UserError(
                        "IDLM-0201",
                        f"{name}: the row after line {number} is not that of a table: {error}",
                        fix=f'double the quotes inside quoted cells ("" for "), or {WRITE_LINES}',
                    ) from error
                except DAMAGE as error:
                    raise damaged(f"{name} (after line {number})", error) from error


def _values(
    stream: Any, path: Path, name: str
) -> Iterator[tuple[int, dict[str, Any] | UserError, tuple[str, ...]]]:
    """(first line, record or the error that reading it gave, columns that are not read) of every row."""
    lines = (line.decode() for line in stream)
    header = next(lines, "").removeprefix(BOM.decode())
    delimiter = _delimiter(header, path)
    # A name in quotes may hold a line break.
    table = csv.reader(_after(header, lines), delimiter=delimiter, strict=True)
    names = next(table, [])
    if len(set(names)) < len(names):
        twice = next(key for key in names if names.count(key) > 1)
        raise UserError(
            "IDLM-0201", f"{name} has two columns {twice!r}", fix="rename one of them in the header"
        )
    # pandas writes the index of a row under no name.
    wanted, unread = wanted_columns([key for key in names if key])
    first = table.line_num + 1
    for cells in table:
        number, first = first, table.line_num + 1
        if not cells:
            continue
        origin = f"{name}:{number}"
        if len(cells) != len(names):
            yield number, _misfit(origin, cells, names), unread
            continue
        row = dict(zip(names, cells, strict=True))
        try:
            record = {key: _value(key, row[key], origin) for key in wanted}
        except UserError as error:
            yield number, error, unread
        else:
            yield number, record, unread


def _after(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines


def _delimiter(header: str, path: Path) -> str:
    if ".tsv" in path.name.lower():
        return "\t"
    bare = re.sub('"[^"]*"', "", header)
    return next((sign for sign in DELIMITERS if sign in bare), DELIMITERS[0])


def _misfit(origin: str, cells: list[str], names: list[str]) -> UserError:
    return UserError(
        "IDLM-0201",
        f"{origin} has {len(cells)} cells, and the header has {len(names)} columns",
        fix=f"put cells with a delimiter or a line break into quotes, or {WRITE_LINES}",
    )


def _value(key: str, cell: str, origin: str) -> Any:
    """Return a cell as other sources have it; UserError IDLM-0202 for turns that are not JSON."""
    if not cell:
        return None
    is_turns = TURNS.match(cell) is not None
    if not is_turns and key not in VALUE_COLUMNS:
        return cell
    try:
        # Python writes True where JSON has true.
        return json.loads(cell if is_turns else cell.lower())
    except (ValueError, RecursionError):
        if not is_turns:
            return cell
    raise UserError(
        "IDLM-0202",
        f"{origin}: {key}={cell!r:.60} is a list of turns that is not JSON, as pandas and numpy write one",
        fix=f"make the table again from its source: {WRITE_LINES}",
    )


@SOURCES.register("csv")
def csv_source(config: DataConfig, encoder: Encoder) -> CachedSource:
    return cached_source(CsvReader(config.path, SUFFIXES["csv"]), config, encoder)
