"""Names of files and folders that the system refuses to look at: too long, no permission."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from idlm.errors import UserError


@contextmanager
def telling_of_path(code: str, path: str | Path, *, fix: str) -> Iterator[None]:
    """Inside, an OSError raises the UserError `code` about `path`, or the file beside it that was met."""
    try:
        yield
    except OSError as error:
        met = str(path if error.filename is None else error.filename)
        raise UserError(code, f"cannot open {met!r}: {error.strerror}", fix=fix) from error
