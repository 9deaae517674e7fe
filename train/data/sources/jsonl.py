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
from idlm.files.paths import (
    BOM,
    DAMAGE,
    convert_command,
    json_lines,
    json_problem,
    likely_encoding,
    packing,
    unpacked,
    wide_encoding,
)
from idlm.files.records import SUFFIXES, FileReader, Row, damaged, reading
from idlm.train.config.data import DataConfig
from idlm.train.data.base import SOURCES, Encoder
from idlm.train.data.build import cached_source
from idlm.train.data.cache import CachedSource

PEEKED_BYTES = 4096


class JsonlReader(FileReader):
    """Records of JSON files; `number` is a line, or an item of an array."""

    def rows(self) -> Iterator[Row]:
        sizes = [path.stat().st_size for path in self.paths]
        for file, (path, name) in enumerate(zip(self.paths, self.names, strict=True)):
            with reading(path):
                raw = path.open("rb")
            number = 0
            with raw:
                try:
                    kind = packing(raw, path)
                    for number, value in _values(unpacked(raw, path), path):
                        yield Row(file=file, number=number, value=_record(value, name, number, kind))
                        num_bytes = sum(sizes[:file]) + raw.tell()
                        self.share_read = num_bytes / max(1, sum(sizes))
                except UnicodeDecodeError as error:
                    raise _not_utf8(name, error, kind) from error
                except (*DAMAGE, json.JSONDecodeError, RecursionError) as error:
                    raise damaged(f"{name} (after line {number})", error) from error


def _values(stream: Any, path: Path) -> Iterator[tuple[int, Any]]:
    """(1-based line or item, value or the error that reading it gave) of every record; UnicodeDecodeError
    where the file as a whole is not UTF-8."""
    head = stream.peek(PEEKED_BYTES).removeprefix(BOM)
    if encoding := wide_encoding(head):
        raise UnicodeDecodeError(encoding, head, 0, 1, "")
    if re.match(rb"\s*\[" if ".json" in path.suffixes else rb"\s*\[\s*\{", head):
        content = stream.read()
        try:
            items = json.loads(content.removeprefix(BOM).decode())
        except json.JSONDecodeError as error:
            if ".json" in path.suffixes or not error.msg.startswith("Extra data"):
                raise
            # Lines that are arrays are named one by one.
            stream = io.BytesIO(content)
        else:
            yield from enumerate(items, start=1)
            return
    yield from json_lines(stream)


def _record(value: Any, name: str, number: int, kind: str | None) -> dict[str, Any] | UserError:
    origin = f"{name}:{number}"
    if isinstance(value, UnicodeDecodeError):
        return _not_utf8(name, value, kind, number)
    if isinstance(value, Exception):
        return UserError(
            "IDLM-0201",
            f"{origin} is not valid JSON: {json_problem(value)}",
            fix="repair or delete that line; the file must hold one JSON object per line",
        )
    if not isinstance(value, dict):
        fix = "write one JSON object per line"
        return UserError("IDLM-0202", f"{origin} has a JSON {type(value).__name__}", fix=fix)
    return value


def _not_utf8(name: str, error: UnicodeDecodeError, kind: str | None, number: int | None = None) -> UserError:
    """The error about a file, or about its line `number`, that is not UTF-8."""
    found = error.encoding if error.encoding != "utf-8" else likely_encoding(error.object)
    where = name if number is None else f"{name}:{number} (byte {error.start + 1} of the line)"
    note = "" if found is None else f" but {found}" if error.encoding != "utf-8" else f"; it may be {found}"
    fix = f"convert the file: {convert_command(name, found, kind)}"
    if found is None:
        fix = f"repair or delete that line, or {fix}"
    return UserError("IDLM-0239", f"{where} is not UTF-8{note}", fix=fix)


@SOURCES.register("jsonl")
def jsonl_source(config: DataConfig, encoder: Encoder) -> CachedSource:
    return cached_source(JsonlReader(config.path, SUFFIXES["jsonl"]), config, encoder)
