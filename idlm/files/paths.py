"""Names of files and folders: what is none, and those that the system refuses (too long, no permission)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from idlm.errors import UserError


@contextmanager
def translate_path_errors(code: str, path: str | Path, *, fix: str) -> Iterator[None]:
    """Inside, an OSError raises the UserError `code` about `path`, or the file beside it that was met."""
    given_path(code, path, fix=fix)
    try:
        yield
    except OSError as error:
        met = str(path if error.filename is None else error.filename)
        raise UserError(code, f"cannot open {met!r}: {error.strerror}", fix=fix) from error


def given_path(code: str, path: Any, *, fix: str) -> Path:
    """The path that a caller has given; UserError `code` for anything else."""
    if not _is_path(path):
        raise UserError(code, f"{path!r} is no path", fix=fix)
    return Path(path)


def _is_path(path: Any) -> bool:
    """Whether it can name a file: text without a null character that the system's encoding has."""
    try:
        return isinstance(os.fspath(path), str) and b"\0" not in os.fsencode(path)
    except (TypeError, UnicodeEncodeError):
        return False
