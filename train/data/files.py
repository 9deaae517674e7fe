"""Files of records: which ones a path means, what identifies their content, and what a reader of them is."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from idlm.errors import UserError

SAMPLED_BYTES = 65_536
NUM_SAMPLED = 16
GLOB_MARKS = "*?["
SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz", ".json", ".json.gz"), "parquet": (".parquet", ".pq")}
"""Endings of the files that a source takes from a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A record, or what is wrong with it, with its file (an index into `Reader.names`) and 1-based line
    or row.
    """

    file: int
    place: int
    value: dict[str, Any] | UserError


class Reader(Protocol):
    """Records of one source in a fixed order. `share_read` (0 to 1) grows while `rows` is consumed."""

    names: tuple[str, ...]
    share_read: float

    def identity(self) -> list[Any]:
        """Plain data that differs whenever the records may differ."""

    def rows(self) -> Iterator[Row]:
        """All records, in order; a file that breaks off in the middle raises UserError."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, an OSError becomes UserError IDLM-0237 naming its file, or `path` where it names none."""
    try:
        yield
    except OSError as error:
        raise UserError(
            "IDLM-0237",
            f"cannot read {shown(error.filename or path)}: {error.strerror or error}",
            fix="check the path and its permissions",
        ) from error


def shown(path: Any) -> str:
    """The path as text that can be printed, also where its name is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def find_files(path: str, suffixes: Sequence[str]) -> tuple[Path, ...]:
    """The files that `path` means: a file, a pattern (`data/*.jsonl`), or all of a folder with one of
    `suffixes`.

    A folder is searched with its subfolders, for the first suffixes that it has any files of; order is
    that of the names. Raises UserError IDLM-0209 where nothing is found, IDLM-0237 where nobody may look.
    """
    with reading(Path(path)):
        return _find_files(path, suffixes)


def _find_files(path: str, suffixes: Sequence[str]) -> tuple[Path, ...]:
    if not path.strip():
        # pathlib takes it for the current folder.
        raise UserError("IDLM-0209", "the data path is empty", fix="name a file, a folder or a pattern")
    given = Path(path).expanduser()
    if any(mark in path for mark in GLOB_MARKS) and not given.exists():
        found = [Path(name) for name in glob.glob(str(given), recursive=True)]
        found = sorted(name for name in found if name.is_file())
        if not found:
            raise UserError("IDLM-0209", f"no file matches {path}", fix="correct the pattern")
        return tuple(found)
    if given.is_dir():
        for suffix in suffixes:
            found = sorted(name for name in given.rglob(f"*{suffix}") if name.is_file())
            if found:
                return tuple(found)
        raise UserError(
            "IDLM-0209",
            f"the folder {path} has no file that ends in {' or '.join(suffixes)}",
            fix="give another folder, or name the files by a pattern",
        )
    if not given.is_file():
        raise UserError(
            "IDLM-0209",
            f"the data file {path} does not exist",
            fix="name a file, a folder or a pattern",
        )
    return (given,)


def identity_of(paths: Sequence[Path]) -> list[list[Any]]:
    """Name, size, time of change and a hash of sampled blocks of every file.

    Hashing all of a large corpus would take longer than opening its cache is worth. A change that keeps
    size, time and the sampled blocks is not noticed; a mere copy with a new time costs a second
    tokenisation, never a wrong one.
    """
    facts: list[list[Any]] = []
    for path in paths:
        with reading(path):
            status = path.stat()
            facts.append([path.name, status.st_size, status.st_mtime_ns, _sampled_hash(path, status.st_size)])
    return facts


def _sampled_hash(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for index in range(NUM_SAMPLED):
            file.seek(max(0, (size - SAMPLED_BYTES) * index // (NUM_SAMPLED - 1)))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()
