"""JSON-lines files as a data source: one file, a folder of shards or a pattern; `.gz` is read as it is.

A `.json` file may also hold one array of records, which is read piece by piece.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from idlm.errors import UserError
from idlm.files.json_lines import DAMAGE, unpacked
from idlm.train.data.base import SOURCES, Encoder
from idlm.train.data.build import cached_source
from idlm.train.data.cache import CachedSource
from idlm.train.data.files import SUFFIXES, Row, find_files, identity_of, reading, shown

if TYPE_CHECKING:
    from idlm.train.data.settings import DataConfig

CHUNK = 1 << 20
BOM = b"\xef\xbb\xbf"
SKIPPED = re.compile(r"[\s,]*")


class JsonlReader:
    """Rows of JSON files, in the order of the files' names; `place` is the line a record begins in."""

    def __init__(self, path: str) -> None:
        self.paths = find_files(path, SUFFIXES["jsonl"])
        self.names = tuple(shown(name) for name in self.paths)
        self.share_read = 0.0

    def identity(self) -> list[Any]:
        return identity_of(self.paths)

    def rows(self) -> Iterator[Row]:
        sizes = [path.stat().st_size for path in self.paths]
        for file, path in enumerate(self.paths):
            with reading(path):
                raw = path.open("rb")
            name = self.names[file]
            with raw:
                try:
                    for place, value in _values(unpacked(raw, path), path, name):
                        yield Row(file=file, place=place, value=_record(value, f"{name}:{place}"))
                        self.share_read = (sum(sizes[:file]) + raw.tell()) / max(1, sum(sizes))
                except DAMAGE as error:
                    raise _damaged(name, error) from error


def _record(value: Any, origin: str) -> dict[str, Any] | UserError:
    if isinstance(value, Exception):
        return UserError(
            "IDLM-0201",
            f"{origin} is not valid JSON: {value}",
            fix="repair or delete that line; the file must hold one JSON object per line",
        )
    if not isinstance(value, dict):
        return UserError(
            "IDLM-0202",
            f"{origin} has a JSON {type(value).__name__}",
            fix="write one JSON object per line",
        )
    return value


def _values(stream: Any, path: Path, name: str) -> Iterator[tuple[int, Any]]:
    """(1-based line, value or the error that reading it gave) of every record."""
    if ".json" in path.suffixes and stream.peek(CHUNK)[:CHUNK].removeprefix(BOM).lstrip()[:1] == b"[":
        yield from _array_values(io.TextIOWrapper(stream, encoding="utf-8-sig"), name)
        return
    for line_number, line in enumerate(stream, start=1):
        text = line.removeprefix(BOM).strip()
        if text:
            try:
                yield line_number, json.loads(text)
            except (ValueError, RecursionError) as error:
                yield line_number, error


def _array_values(stream: IO[str], name: str) -> Iterator[tuple[int, Any]]:
    """The items of a JSON array. What stands behind a fault cannot be told, so that a fault ends the run."""
    decoder, is_all = json.JSONDecoder(), False
    buffer = stream.read(CHUNK)
    place = buffer.index("[") + 1
    line_number = 1 + buffer.count("\n", 0, place)
    while True:
        found = SKIPPED.match(buffer, place)
        assert found is not None
        line_number += found.group().count("\n")
        place = found.end()
        if buffer.startswith("]", place):
            if buffer[place + 1 :].strip() or any(
                piece.strip() for piece in iter(lambda: stream.read(CHUNK), "")
            ):
                raise _damaged(f"{name}:{line_number}", ValueError("there is text behind the array's ]"))
            return
        try:
            value, end = decoder.raw_decode(buffer, place)
        except (ValueError, RecursionError) as error:
            if is_all:
                raise _damaged(f"{name}:{line_number}", error) from error
            piece = stream.read(CHUNK)
            buffer, place, is_all = buffer[place:] + piece, 0, not piece
            continue
        yield line_number, value
        line_number += buffer.count("\n", place, end)
        place = end


def _damaged(origin: str, error: Exception) -> UserError:
    return UserError(
        "IDLM-0231", f"{origin} breaks off or is damaged: {error}", fix="copy or download the file again"
    )


@SOURCES.register("jsonl")
def jsonl_source(config: DataConfig, encoder: Encoder) -> CachedSource:
    """Read `data.path`."""
    if config.path is None:
        raise UserError("IDLM-0209", "data.source=jsonl needs data.path", fix="set data.path=<file>.jsonl")
    return cached_source(JsonlReader(config.path), config, encoder)
