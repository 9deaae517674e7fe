"""Files that a caller names: UserError for what the system refuses to open; lines that may be packed."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from idlm.errors import UserError

DAMAGE = (EOFError, OSError, zlib.error, UnicodeDecodeError)
"""What reading a damaged or truncated file raises."""


@contextmanager
def translate_path_errors(code: str, path: str | Path, *, fix: str) -> Iterator[None]:
    """Inside, an OSError raises the UserError `code` about `path`, or about the related file that failed."""
    try:
        yield
    except OSError as error:
        failed = str(path if error.filename is None else error.filename)
        raise UserError(code, f"cannot open {failed!r}: {error.strerror}", fix=fix) from error


def unpacked(file: BinaryIO, path: Path) -> BinaryIO:
    """Return the content of an open file: decompressed where `path` ends in `.gz`, else the file itself."""
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file


def json_problem(error: Exception) -> str:
    """Return what is wrong in a line of JSON, and in which column; the caller knows the line."""
    return f"{error.msg}: column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
