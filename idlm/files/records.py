"""Files of records: which ones a path means, what identifies their content, and how they are read."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from idlm.errors import UserError, some_of
from idlm.files.paths import (
    DAMAGE,
    PACKINGS,
    convert_command,
    likely_encoding,
    packing,
    refuse_pointer,
    translate_path_errors,
    unpacked,
    wide_encoding,
)

SAMPLED_BYTES = 65_536
NUM_SAMPLED = 16


def _packed(*endings: str) -> tuple[str, ...]:
    return tuple(f"{ending}{packing}" for ending in endings for packing in ("", *PACKINGS))


SUFFIXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "jsonl": (_packed(".jsonl", ".ndjson"), _packed(".json")),
    "parquet": ((".parquet", ".pq"),),
    "csv": (_packed(".csv", ".tsv"),),
}
"""Endings of the files that a source takes from a folder, in groups: see `search`."""
ANY_FILE = (("",),)
"""A group with every ending."""
DATASET_CARDS = ("dataset_info.json", "dataset_infos.json")
"""JSON files about a dataset, next to its records."""
SAVED_DATASET = ("state.json", "dataset_dict.json")
"""One of these is in a folder that `datasets` has written by `save_to_disk`."""
HIDDEN = re.compile(
    r"\..*|.*~|~\$.*|#.*#|.*\.(tmp|temp|part|partial|crdownload|download|swp|bak)"
    r"|__MACOSX|__pycache__|_temporary|_delta_log|lost\+found|\$RECYCLE\.BIN|System Volume Information",
    re.IGNORECASE | re.DOTALL,
)
"""Names of editors, browsers, desktops and systems for what is not a user's data."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/(?!.*\.(?:json|csv|tsv|parquet))[\w.-]+")
"""What may be the name of a dataset of the hub."""


class Found(NamedTuple):
    """Files to read, and what else is there: files, and folders with a slash at the end."""

    paths: tuple[Path, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record, or the error it gave; `file` is an index into `Reader.names`, `number` counts from 1,
    `unread` names columns that were not loaded."""

    file: int
    number: int
    value: dict[str, Any] | UserError
    unread: tuple[str, ...] = ()


class Reader(Protocol):
    """Records of one source in a fixed order; `share_read` (0 to 1) grows while `rows` is consumed. `names`
    begin the origins of its rows. `files` are those that are read, `left_out` what else is in their folder
    and is not data."""

    names: tuple[str, ...]
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    share_read: float

    def identity(self) -> list[Any]:
        """Plain data that differs whenever the records may differ."""

    def rows(self) -> Iterator[Row]:
        """All records, in order; a damaged file raises UserError IDLM-0231."""


class FileReader:
    """Base of readers of files, in the order of their names."""

    def __init__(self, path: str | None, groups: Sequence[Sequence[str]]) -> None:
        self.paths, self.left_out = search(path, groups)
        self.names = self.files = tuple(shown(name) for name in self.paths)
        self.share_read = 0.0
        for file in self.paths:
            refuse_pointer("IDLM-0231", file)

    def identity(self) -> list[Any]:
        return identity_of(self.paths)


class TextFile(NamedTuple):
    """An open file of text: its content without the compression `packing`, a key of PACKINGS or None."""

    path: Path
    name: str
    packing: str | None
    stream: BinaryIO

    def not_utf8(self, error: UnicodeDecodeError, number: int | None = None) -> UserError:
        """The error about the file, or about its line `number`, that is not UTF-8."""
        wide = wide_encoding(error.object)
        found = wide or likely_encoding(error.object)
        where = self.name if number is None else f"{self.name}:{number} (byte {error.start + 1} of the line)"
        note = (f" but {found}" if wide else f"; it may be {found}") if found else ""
        fix = f"convert the file: {convert_command(self.name, found, self.packing)}"
        if found is None:
            fix = f"repair or delete that line, or {fix}"
        return UserError("IDLM-0239", f"{where} is not UTF-8{note}", fix=fix)


Value = tuple[int, dict[str, Any] | UserError, tuple[str, ...]]
"""`number`, `value` and `unread` of a row."""


class TextReader(FileReader, ABC):
    """Base of readers of text, which may be compressed."""

    @abstractmethod
    def values(self, file: TextFile) -> Iterator[Value]:
        """Yield the records of an open file."""

    def rows(self) -> Iterator[Row]:
        sizes = [path.stat().st_size for path in self.paths]
        num_bytes, num_before = max(1, sum(sizes)), 0
        for index, (path, name, size) in enumerate(zip(self.paths, self.names, sizes, strict=True)):
            with reading(path):
                raw = path.open("rb")
            number = 0
            with raw:
                try:
                    file = TextFile(path, name, packing(raw, path), unpacked(raw, path))
                    for number, value, unread in self.values(file):
                        yield Row(file=index, number=number, value=value, unread=unread)
                        self.share_read = (num_before + raw.tell()) / num_bytes
                except UserError:
                    raise
                except UnicodeDecodeError as error:
                    raise file.not_utf8(error) from error
                except (*DAMAGE, ValueError, RecursionError) as error:
                    raise damaged(f"{name} (after line {number})", error) from error
            num_before += size


def reading(path: Path) -> AbstractContextManager[None]:
    """Inside, an OSError becomes UserError IDLM-0237."""
    return translate_path_errors("IDLM-0237", path, fix="check the path and its permissions")


def damaged(origin: str, error: Exception | str) -> UserError:
    """The error about a file that ends too early or cannot be decoded."""
    return UserError(
        "IDLM-0231", f"{origin} breaks off or is damaged: {error}", fix="copy or download the file again"
    )


def shown(path: Any) -> str:
    """The path as printable text, also where its name is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def search(path: str | None, groups: Sequence[Sequence[str]]) -> Found:
    """Return the files of `path`: one file, a pattern (`data/*.jsonl`), or a folder with all below it.

    `groups` are endings, as in SUFFIXES: of a folder, all files with an ending of the first group that any
    file has. Hidden and temporary files are left out, unless `path` itself names them; so is a compressed
    file next to the same one that is not. The order is that of the names. Raises UserError IDLM-0209 where
    nothing is found, IDLM-0237 without permission."""
    fix = "name a file, a folder or a pattern in data.path"
    if path is None or not path.strip():
        # pathlib takes an empty path for the current folder.
        raise UserError("IDLM-0209", "path is empty", fix=fix)
    given = Path(path)
    with reading(given):
        if given.is_file():
            return Found((given,), ())
        left_out: list[str] = []
        if given.is_dir():
            files = _below(given, left_out)
            found = next(filter(None, (_taken(files, group) for group in groups)), [])
            left_out += [shown(file) for file in set(files) - set(found)]
            plain = [end for group in groups for end in group if Path(end).suffix not in PACKINGS]
            problem = f"the folder {path} has no file that ends in {' or '.join(plain)}"
        else:
            found = _matching(given, left_out)
            problem = f"no file matches {path}" if glob.has_magic(path) else f"{path} does not exist"
            problem += "; a dataset of the hub needs data.source=hf" if _HUB_NAME.fullmatch(path) else ""
    known = set(found)
    # The records of `a.jsonl.gz` next to `a.jsonl` would be repeated.
    copies = {file for file in known if file.suffix in PACKINGS and file.with_suffix("") in known}
    left_out += [shown(file) for file in copies]
    found = [file for file in found if file not in copies]
    if not found:
        note = f"; left out: {some_of(sorted(left_out))}" if left_out else ""
        raise UserError("IDLM-0209", problem + note, fix=fix)
    return Found(tuple(sorted(found)), tuple(sorted(left_out)))


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is hidden or temporary, so that it is not data."""
    return HIDDEN.fullmatch(name) is not None


def files_below(folder: Path) -> list[Path]:
    """Return all files in a folder and below, without hidden and temporary ones, in the order of names."""
    with reading(folder):
        return sorted(_below(folder, []))


def _below(folder: Path, left_out: list[str]) -> list[Path]:
    """Files in a folder and below it, through links too; what is hidden goes to `left_out`."""
    found: list[Path] = []
    visited: set[str] = set()

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        real = os.path.realpath(root)
        if real in visited:
            # A link back to a folder above would be followed for ever.
            folders.clear()
            continue
        visited.add(real)
        left_out += [shown(Path(root, name)) + "/" for name in folders if is_hidden(name)]
        left_out += [shown(Path(root, name)) for name in names if is_hidden(name)]
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        found += [Path(root, name) for name in names if not is_hidden(name)]
    return found


def _matching(pattern: Path, left_out: list[str]) -> list[Path]:
    """Files that match a pattern, whose existing folders may have names with brackets."""
    root = next(folder for folder in pattern.parents if folder.is_dir())
    parts = pattern.relative_to(root).parts
    named = [part for part in parts if is_hidden(part)]
    found = []
    for match in glob.iglob(os.path.join(*parts), root_dir=root, recursive=True, include_hidden=True):
        path = root / match
        if not path.is_file():
            left_out += [shown(path) + "/"] if path.is_dir() and "**" not in parts else []
        elif any(is_hidden(p) and not any(fnmatch(p, part) for part in named) for p in Path(match).parts):
            left_out.append(shown(path))
        else:
            found.append(path)
    return found


def _taken(files: Sequence[Path], group: Sequence[str]) -> list[Path]:
    named = [file for file in files if file.name not in DATASET_CARDS]
    return [file for file in named if file.name.lower().endswith(tuple(group))]


def is_saved(path: Path) -> bool:
    """Return whether `datasets` wrote what is there: the folder of `save_to_disk`, or a file of Arrow."""
    return path.suffix == ".arrow" or any((path / name).is_file() for name in SAVED_DATASET)


def source_of(path: str) -> str:
    """The source that reads `path`: hf for a saved dataset or an Arrow file, else by endings; jsonl where
    there is nothing. Tables of text next to files of another source are about those. UserError IDLM-0209 for
    a folder or pattern with files of several other sources."""
    if not path.strip():
        return "jsonl"
    if is_saved(Path(path)):
        return "hf"
    files = [Path(path)]
    with contextlib.suppress(UserError):
        files = [*search(path, ANY_FILE).paths]
    kinds = SUFFIXES | {"hf": ((".arrow",),)}
    found = [name for name, groups in kinds.items() if any(_taken(files, group) for group in groups)]
    found = [name for name in found if name != "csv"] or found
    if len(found) > 1:
        raise UserError(
            "IDLM-0209",
            f"{path} has files of several kinds: {', '.join(found)}",
            fix="choose one with data.source, or mix them as data.sources",
        )
    return found[0] if found else "jsonl"


def identity_of(paths: Sequence[Path]) -> list[list[Any]]:
    """Name, size, time of change and a hash of sampled blocks of every file: hashing a large corpus whole
    would take longer than reading its cache. A change that keeps all of them is not noticed."""
    facts: list[list[Any]] = []
    for path in paths:
        with reading(path):
            status = path.stat()
            facts.append([path.name, status.st_size, status.st_mtime_ns, _sampled_hash(path, status.st_size)])
    return facts


def content_digest(paths: Sequence[Path]) -> str:
    """Return the sha256 of the sizes and sampled blocks of files, wherever they lie and whenever written."""
    facts = [[size, digest] for _, size, _, digest in identity_of(paths)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _sampled_hash(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for index in range(NUM_SAMPLED):
            file.seek(max(0, (size - SAMPLED_BYTES) * index // (NUM_SAMPLED - 1)))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()


def without_nulls(value: Any) -> Any:
    """Return a value of a table without the nulls of its structures, at every depth: a null there stands for
    a key that the row lacks. Items of lists are values of their own and stay."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
