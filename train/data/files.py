"""Files of records: which ones a path means, what identifies their content, and how they are read."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from idlm.errors import UserError

SAMPLED_BYTES = 65_536
NUM_SAMPLED = 16
SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz", ".json", ".json.gz"), "parquet": (".parquet", ".pq")}
"""Endings of the files that a source takes from a folder."""
DATASET_CARD = "dataset_info"
"""Beginning of the names of JSON files about a dataset, beside its records."""
SAVED_DATASET = ("state.json", "dataset_dict.json")
"""One of these is in a folder that `datasets` has written by `save_to_disk`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record, or the error it gave; `file` is an index into `Reader.names`, `place` counts from 1.

    `unread` names columns that were not loaded.
    """

    file: int
    place: int
    value: dict[str, Any] | UserError
    unread: tuple[str, ...] = ()


class Reader(Protocol):
    """Records of one source in a fixed order; `share_read` (0 to 1) grows while `rows` is consumed."""

    names: tuple[str, ...]
    share_read: float

    def identity(self) -> list[Any]:
        """Plain data that differs whenever the records may differ."""

    def rows(self) -> Iterator[Row]:
        """All records, in order; a damaged file raises UserError IDLM-0231."""


class FileReader:
    """Base of readers of files, in the order of their names."""

    def __init__(self, path: str | None, suffixes: Sequence[str]) -> None:
        self.paths = find_files(path, suffixes)
        self.names = tuple(shown(name) for name in self.paths)
        self.share_read = 0.0

    def identity(self) -> list[Any]:
        return identity_of(self.paths)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError into UserError IDLM-0237 that names its file, or `path` where it names none."""
    try:
        yield
    except OSError as error:
        raise UserError(
            "IDLM-0237",
            f"cannot read {shown(error.filename or path)}: {error.strerror or error}",
            fix="check the path and its permissions",
        ) from error


def damaged(origin: str, error: Exception | str) -> UserError:
    """The error about a file that ends too early or cannot be decoded."""
    return UserError(
        "IDLM-0231", f"{origin} breaks off or is damaged: {error}", fix="copy or download the file again"
    )


def shown(path: Any) -> str:
    """The path as printable text, also where its name is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def find_files(path: str | None, suffixes: Sequence[str]) -> tuple[Path, ...]:
    """The files that `path` names: one file, a pattern (`data/*.jsonl`), or a folder with its subfolders.

    Of a folder, all files with the first of `suffixes` that any file has; the order is that of the names.
    Raises UserError IDLM-0209 where nothing is found, IDLM-0237 without permission.
    """
    fix = "name a file, a folder or a pattern in data.path"
    if path is None or not path.strip():
        # pathlib takes an empty path for the current folder.
        raise UserError("IDLM-0209", "the data path is empty", fix=fix)
    given = Path(path).expanduser()
    with reading(given):
        if given.is_file():
            return (given,)
        matches: list[Iterable[Path]]
        if given.is_dir():
            matches = [given.rglob(f"*{suffix}") for suffix in suffixes]
            problem = f"the folder {path} has no file that ends in {' or '.join(suffixes)}"
        else:
            matches = [map(Path, glob.glob(str(given), recursive=True))]
            problem = f"no file matches {path}" if glob.has_magic(path) else f"{path} does not exist"
        found = next(filter(None, (sorted(filter(Path.is_file, paths)) for paths in matches)), [])
    if not found:
        raise UserError("IDLM-0209", problem, fix=fix)
    return tuple(found)


def source_of(path: str) -> str:
    """The source that reads `path`: hf for a saved dataset or an Arrow file, else by the endings of files;
    jsonl where there is nothing. UserError IDLM-0209 for a folder or pattern with files of several sources.
    """
    place = Path(path).expanduser()
    if place.suffix == ".arrow" or any((place / name).is_file() for name in SAVED_DATASET):
        return "hf"
    files = [path]
    with contextlib.suppress(UserError):
        found_files = find_files(path, ("",))
        files = [str(file) for file in found_files if not file.name.startswith(DATASET_CARD)]
    kinds = SUFFIXES | {"hf": (".arrow",)}
    found = [name for name, endings in kinds.items() if any(file.endswith(endings) for file in files)]
    if len(found) > 1:
        raise UserError(
            "IDLM-0209",
            f"{path} has files of several kinds: {', '.join(found)}",
            fix="choose one with data.source, or mix them as data.sources",
        )
    return found[0] if found else "jsonl"


def identity_of(paths: Sequence[Path]) -> list[list[Any]]:
    """Name, size, time of change and a hash of sampled blocks of every file.

    Hashing a large corpus whole would take longer than reading its cache. A change that keeps size, time and
    the sampled blocks is not noticed; a copy with a new time is tokenised again.
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
