"""Opening files of JSON lines, plain or `.gz`. Each reader checks the content of lines by its own rules."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import BinaryIO, cast

DAMAGE = (EOFError, OSError, zlib.error, UnicodeDecodeError)
"""What reading a damaged or truncated file raises."""


def unpacked(file: BinaryIO, path: Path) -> BinaryIO:
    """Return the content of an open file: decompressed where `path` ends in `.gz`, else the file itself."""
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file
