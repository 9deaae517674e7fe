"""JSON lines as a data source, also compressed: one file, a folder of shards or a pattern.

A file may hold one array of records instead, which is read whole. `datasets` reads the same files but
infers one schema for all records and cannot name the line of a bad one."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from idlm.errors import UserError
from idlm.files.paths import BOM, json_lines, json_problem, json_value, wide_encoding
from idlm.files.records import TextFile, TextReader, Value
from idlm.train.data.build import file_source

PEEKED_BYTES = 4096


@file_source("jsonl")
class JsonlReader(TextReader):
    """Records of JSON files; `number` is a line, or an item of an array."""

    def values(self, file: TextFile) -> Iterator[Value]:
        for number, value in _values(file.stream, file.path):
            yield number, _record(value, file, number), ()


def _values(stream: Any, path: Path) -> Iterator[tuple[int, Any]]:
    """(1-based line or item, value or the error that reading it gave) of every record; UnicodeDecodeError
    where the file as a whole is not UTF-8."""
    head = stream.peek(PEEKED_BYTES).removeprefix(BOM)
    if wide_encoding(head):
        raise UnicodeDecodeError("utf-8", head, 0, 1, "")
    if re.match(rb"\s*\[" if ".json" in path.suffixes else rb"\s*\[\s*\{", head):
        content = stream.read()
        try:
            items = json_value(content.removeprefix(BOM).decode())
        except json.JSONDecodeError as error:
            if ".json" in path.suffixes or not error.msg.startswith("Extra data"):
                raise
            # Lines that are arrays are named one by one.
            stream = io.BytesIO(content)
        else:
            yield from enumerate(items, start=1)
            return
    yield from json_lines(stream)


def _record(value: Any, file: TextFile, number: int) -> dict[str, Any] | UserError:
    origin = f"{file.name}:{number}"
    if isinstance(value, UnicodeDecodeError):
        return file.not_utf8(value, number)
    if isinstance(value, Exception):
        return UserError(
            "IDLM-0201",
            f"{origin} is not valid JSON: {json_problem(value)}",
            fix="repair or delete that line: each has one JSON object; files of another kind are known by "
            "their endings (.csv, .parquet, .arrow) or by data.source",
        )
    if not isinstance(value, dict):
        fix = "write one JSON object per line"
        return UserError("IDLM-0202", f"{origin} has a JSON {type(value).__name__}", fix=fix)
    return value
