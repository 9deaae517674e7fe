"""JSON lines as a data source, also `.gz`: one file, a folder of shards or a pattern.

A `.json` file may hold one array of records instead, which is read whole. `datasets` reads the same files but
infers one schema for all records and cannot name the line of a bad one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from idlm.errors import UserError
from idlm.files.paths import DAMAGE, json_problem, unpacked
from idlm.train.config.data import DataConfig
from idlm.train.data.base import SOURCES, Encoder
from idlm.train.data.build import cached_source
from idlm.train.data.cache import CachedSource
from idlm.train.data.files import SUFFIXES, FileReader, Row, damaged, reading

BOM = b"\xef\xbb\xbf"
PEEKED_BYTES = 4096


class JsonlReader(FileReader):
    """Records of JSON files; `place` is a line, or an item of an array."""

    def rows(self) -> Iterator[Row]:
        sizes = [path.stat().st_size for path in self.paths]
        for file, (path, name) in enumerate(zip(self.paths, self.names, strict=True)):
            with reading(path):
                raw = path.open("rb")
            with raw:
                try:
                    for place, value in _values(unpacked(raw, path), path):
                        yield Row(file=file, place=place, value=_record(value, f"{name}:{place}"))
                        num_bytes = sum(sizes[:file]) + raw.tell()
                        self.share_read = num_bytes / max(1, sum(sizes))
                except (*DAMAGE, json.JSONDecodeError, RecursionError) as error:
                    raise damaged(name, error) from error


def _values(stream: Any, path: Path) -> Iterator[tuple[int, Any]]:
    """(1-based line or item, value or the error that reading it gave) of every record."""
    if ".json" in path.suffixes and stream.peek(PEEKED_BYTES).removeprefix(BOM).lstrip()[:1] == b"[":
        yield from enumerate(json.load(stream), start=1)
        return
    for number, line in enumerate(stream, start=1):
        text = line.removeprefix(BOM).strip()
        if text:
            try:
                yield number, json.loads(text)
            except (ValueError, RecursionError) as error:
                yield number, error


def _record(value: Any, origin: str) -> dict[str, Any] | UserError:
    if isinstance(value, Exception):
        fix = "repair or delete that line; the file must hold one JSON object per line"
        return UserError("IDLM-0201", f"{origin} is not valid JSON: {json_problem(value)}", fix=fix)
    if not isinstance(value, dict):
        fix = "write one JSON object per line"
        return UserError("IDLM-0202", f"{origin} has a JSON {type(value).__name__}", fix=fix)
    return value


@SOURCES.register("jsonl")
def jsonl_source(config: DataConfig, encoder: Encoder) -> CachedSource:
    """Read `data.path`."""
    return cached_source(JsonlReader(config.path, SUFFIXES["jsonl"]), config, encoder)
