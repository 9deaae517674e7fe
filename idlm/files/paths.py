"""Paths that a caller gives: UserError for what cannot be a path and for what the system refuses to open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from idlm.errors import UserError


@contextmanager
def translate_path_errors(code: str, path: str | Path, *, fix: str) -> Iterator[None]:
    """Inside, an OSError raises the UserError `code` about `path`, or about the related file that failed."""
    try:
        yield
    except OSError as error:
        failed = str(path if error.filename is None else error.filename)
        raise UserError(code, f"cannot open {failed!r}: {error.strerror}", fix=fix) from error


def given_path(code: str, path: Any, *, fix: str) -> Path:
    """Return `path` as a Path; UserError `code` if it is of another type."""
    if not isinstance(path, str | os.PathLike):
        raise UserError(code, f"{path!r} is not a valid path", fix=fix)
    return Path(path)
