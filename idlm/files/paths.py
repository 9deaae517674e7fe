"""Files that a caller names: UserError for what the system refuses to open; lines that may be packed."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from idlm.errors import UserError
from idlm.files.encodings import likely_encoding, wide_encoding

DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, UnicodeDecodeError)
"""What reading a damaged or truncated file raises."""
PACKINGS = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd"}
"""Endings of compressed files, and how their content begins. No JSON begins so."""
BOM = b"\xef\xbb\xbf"


def path_error(code: str, path: str | Path, error: OSError, *, fix: str) -> UserError:
    """The UserError `code` about `path`, or about the related file that failed."""
    failed = str(path if error.filename is None else error.filename)
    return UserError(code, f"cannot open {failed!r}: {error.strerror}", fix=fix)


@contextmanager
def translate_path_errors(code: str, path: str | Path, *, fix: str) -> Iterator[None]:
    """Inside, an OSError raises `path_error`."""
    try:
        yield
    except OSError as error:
        raise path_error(code, path, error, fix=fix) from error


def packing(file: BinaryIO, path: Path) -> str | None:
    """Return the key of PACKINGS of an open file, by its content and else by its name; None: plain text."""
    head = cast(io.BufferedReader, file).peek(8)
    found = next((suffix for suffix, magic in PACKINGS.items() if head.startswith(magic)), path.suffix)
    return found if found in PACKINGS else None


def unpacked(file: BinaryIO, path: Path) -> BinaryIO:
    """Return the content of an open file, decompressed where it is compressed. Reading what is cut short or
    damaged raises one of DAMAGE. Only `.zst` cannot be positioned."""
    kind = packing(file, path)
    if kind is not None and not cast(io.BufferedReader, file).peek(1):
        raise EOFError("the file is empty")
    if kind == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if kind == ".bz2":
        return cast(BinaryIO, bz2.BZ2File(file))
    if kind == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(file))
    if kind == ".zst":
        # Python's own module for it is of a later version than 3.11.
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
        return cast(BinaryIO, io.BufferedReader(stream))
    return file


def json_lines(lines: Iterable[bytes], *, first: int = 1, hook: Any = None) -> Iterator[tuple[int, Any]]:
    """Yield number (from `first` on) and value of every line that is not blank; of one that is not JSON in
    UTF-8, the error of reading it. `hook`: json's `object_pairs_hook`."""
    for number, line in enumerate(lines, start=first):
        # With its end, a line that stops too early would be wrong in column 1 of the next one.
        content = line.removeprefix(BOM).rstrip(b"\r\n")
        if not content.strip():
            continue
        value: Any
        try:
            value = json.loads(content.decode(), object_pairs_hook=hook)
        except (ValueError, RecursionError) as error:
            value = error
        yield number, value


def json_problem(error: Exception) -> str:
    """Return what is wrong in a line of JSON, and in which column or encoding; the caller knows the line."""
    if isinstance(error, UnicodeDecodeError):
        found = wide_encoding(error.object) or likely_encoding(error.object)
        return f"it is not UTF-8{f', it may be {found}' if found else ''}"
    return f"{error.msg}: column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
