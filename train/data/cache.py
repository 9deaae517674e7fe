"""Tokenised samples on disk: written once, verified when opened, read through a memory map.

A cache is a folder published by `idlm.publish.publish`, and may be deleted at any time:
    tokens.bin    uint32: token id; the highest bit marks supervised tokens
    offsets.bin   int64 [num_samples + 1]
    targets.bin   int32 [num_samples]: supervised tokens after the first token
    places.bin    int64 [num_samples, 2]: file and line
    used_ids.bin  int32, sorted: token ids that occur
    blocks.bin    sha256 of each block of tokens.bin
    data.json     counts and names
All files but `tokens.bin` are hashed when the cache is opened, and its blocks when they are first read: a
large cache opens quickly and a damaged one is never trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from idlm.checkpoint import MANIFEST, read_json
from idlm.errors import UserError
from idlm.train.data.layout import Sample
from idlm.train.loop.liveness import note_progress

FORMAT = "idlm-data-2"
HEADER = "data.json"
TOKENS, OFFSETS, TARGETS, PLACES, USED_IDS, BLOCKS = (
    f"{name}.bin" for name in ("tokens", "offsets", "targets", "places", "used_ids", "blocks")
)
BLOCK_TOKENS = 1 << 14
DIGEST_BYTES = 32
SUPERVISED_BIT = np.uint32(1 << 31)
SCANNED_TOKENS = 1 << 24


class CacheWriter:
    """Appends samples to the files of a cache, in constant memory. A context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.num_samples = self.num_tokens = self.num_supervised = 0
        self.endings: dict[int, list[Any]] = {}
        self._used = np.zeros(1 << 18, dtype=bool)
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> CacheWriter:
        self._files = {
            name: (self.directory / name).open("wb") for name in (TOKENS, OFFSETS, TARGETS, PLACES)
        }
        self._files[OFFSETS].write(np.zeros(1, dtype=np.int64).tobytes())
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()

    def append(self, packed: np.ndarray, *, file: int, place: int, origin: str) -> None:
        """Add the sample `packed` (see `pack`) of line `place` in file number `file`."""
        supervised = packed >= SUPERVISED_BIT
        token_ids = packed & ~SUPERVISED_BIT
        if token_ids.max() >= len(self._used):
            self._used = np.concatenate([self._used, np.zeros(int(token_ids.max()), dtype=bool)])
        self._used[token_ids] = True
        self.num_samples += 1
        self.num_tokens += len(packed)
        self.num_supervised += int(supervised.sum())
        self._files[TOKENS].write(packed.tobytes())
        self._files[OFFSETS].write(np.int64(self.num_tokens).tobytes())
        self._files[TARGETS].write(np.int32(supervised[1:].sum()).tobytes())
        self._files[PLACES].write(np.array([file, place], dtype=np.int64).tobytes())
        last = int(token_ids[np.flatnonzero(supervised)[-1]])
        self.endings.setdefault(last, [0, origin])[0] += 1

    def finish(self, header: dict[str, Any]) -> None:
        """Write the header and the hashes, which are known only at the end."""
        used_ids = np.flatnonzero(self._used).astype(np.int32)
        (self.directory / USED_IDS).write_bytes(used_ids.tobytes())
        self._files[TOKENS].flush()
        with (self.directory / TOKENS).open("rb") as tokens, (self.directory / BLOCKS).open("wb") as blocks:
            while block := tokens.read(4 * BLOCK_TOKENS):
                note_progress()
                blocks.write(hashlib.sha256(block).digest())
        counted = {
            "num_samples": self.num_samples,
            "num_tokens": self.num_tokens,
            "num_supervised": self.num_supervised,
            "endings": {str(token_id): ending for token_id, ending in self.endings.items()},
        }
        text = json.dumps({"format": FORMAT, **header, **counted}, indent=1)
        (self.directory / HEADER).write_text(text, encoding="utf-8")


def pack(sample: Sample) -> np.ndarray:
    """Return ids and supervision flags of a sample in one uint32 array."""
    return sample.token_ids.astype(np.uint32) | np.where(sample.supervised, SUPERVISED_BIT, np.uint32(0))


class CachedSource:
    """The samples of a cache; `header` is its `data.json`. Tokens stay on disk, lengths are in memory."""

    def __init__(self, directory: Path, header: dict[str, Any]) -> None:
        self.directory, self.header = directory, header
        self.num_samples: int | None = int(header["num_samples"])
        self.names: list[str] = header["names"]
        self.offsets = np.fromfile(directory / OFFSETS, dtype=np.int64)
        self.lengths = np.diff(self.offsets)
        self.num_targets = np.fromfile(directory / TARGETS, dtype=np.int32)
        self._tokens: np.ndarray | None = None
        self._places: np.ndarray | None = None
        self._block_digests = (directory / BLOCKS).read_bytes()
        self._is_checked = np.zeros(len(self._block_digests) // DIGEST_BYTES, dtype=bool)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the memory maps: another process opens the files itself."""
        return self.__dict__ | {"_tokens": None, "_places": None}

    def sample(self, index: int) -> Sample:
        """Read sample `index`; UserError IDLM-0236 where the file is damaged there."""
        if self._tokens is None:
            self._tokens = np.memmap(self.directory / TOKENS, dtype=np.uint32, mode="r")
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        self._check_blocks(self._tokens, start, stop)
        packed = np.array(self._tokens[start:stop])
        return Sample(
            token_ids=(packed & ~SUPERVISED_BIT).astype(np.int64),
            supervised=packed >= SUPERVISED_BIT,
            origin=f"sample {index} ({self.origin(index)})",
        )

    def _check_blocks(self, tokens: np.ndarray, start: int, stop: int) -> None:
        """Hash the blocks of tokens [start, stop) that this process has not read before."""
        for block in range(start // BLOCK_TOKENS, (stop - 1) // BLOCK_TOKENS + 1):
            if self._is_checked[block]:
                continue
            content = tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].tobytes()
            known = self._block_digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
            if hashlib.sha256(content).digest() != known:
                raise UserError(
                    "IDLM-0236",
                    f"the data cache is damaged: {self.directory / TOKENS}, block {block} of "
                    f"{BLOCK_TOKENS} tokens, differs from its hash",
                    fix=f"delete the folder {self.directory}; the next start builds it again from the data",
                )
            self._is_checked[block] = True

    def records(self) -> np.ndarray:
        """Return the number of each sample's record, [num_samples]: turns of a conversation share one."""
        return np.unique(self._where(), axis=0, return_inverse=True)[1].reshape(-1)

    def _where(self) -> np.ndarray:
        """Return file and line of all samples, int64 [num_samples, 2]."""
        if self._places is None:
            self._places = np.memmap(self.directory / PLACES, dtype=np.int64, mode="r").reshape(-1, 2)
        return self._places

    def origin(self, index: int) -> str:
        """Return `file:line` of a sample."""
        file, place = self._where()[index]
        return f"{self.names[file]}:{place}"

    def digest(self) -> str:
        """Return the sha256 of all tokens and flags, from the manifest."""
        files: dict[str, Any] = read_json(self.directory / MANIFEST)["files"]
        return str(files[TOKENS]["sha256"])

    def refuse_token(self, token_id: int) -> None:
        """Raise UserError IDLM-0206, naming the record, where `token_id` occurs."""
        used = np.fromfile(self.directory / USED_IDS, dtype=np.int32)
        if token_id not in used:
            return
        tokens = np.memmap(self.directory / TOKENS, dtype=np.uint32, mode="r")
        for start in range(0, len(tokens), SCANNED_TOKENS):
            hits = np.flatnonzero((tokens[start : start + SCANNED_TOKENS] & ~SUPERVISED_BIT) == token_id)
            if len(hits):
                index = int(np.searchsorted(self.offsets, start + hits[0], side="right")) - 1
                raise UserError(
                    "IDLM-0206",
                    f"{self.origin(index)} contains the mask token (id {token_id})",
                    fix="remove the mask token's text from the data, or choose another model.mask_token_id",
                )
        raise AssertionError(f"{token_id=} is in {USED_IDS} but nowhere in {TOKENS}")


def open_cache(directory: Path, key: str) -> CachedSource | None:
    """Return the cache in `directory`, None where there is none; ValueError says what is damaged."""
    if not directory.is_dir():
        return None
    try:
        files: dict[str, Any] = read_json(directory / MANIFEST)["files"]
        header = read_json(directory / HEADER)
        for name, entry in files.items():
            _check_file(
                directory / name, size=entry["size"], sha256=None if name == TOKENS else entry["sha256"]
            )
        num_tokens, num_samples = header["num_tokens"], header["num_samples"]
        expected = {
            TOKENS: 4 * num_tokens,
            BLOCKS: DIGEST_BYTES * -(-num_tokens // BLOCK_TOKENS),
            OFFSETS: 8 * (num_samples + 1),
            TARGETS: 4 * num_samples,
            PLACES: 16 * num_samples,
        }
        wrong = [name for name, size in expected.items() if files[name]["size"] != size]
        if wrong or header["format"] != FORMAT or header["key"] != key:
            raise ValueError(f"{HEADER} does not describe {', '.join(wrong) or 'this data'}")
        return CachedSource(directory, header)
    except (KeyError, TypeError, OSError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def cache_key(facts: Iterable[Any]) -> str:
    """Return the sha256 of plain data."""
    return hashlib.sha256(json.dumps([FORMAT, *facts]).encode()).hexdigest()


def _check_file(path: Path, *, size: int, sha256: str | None) -> None:
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes instead of {size}")
    if sha256 is not None:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise ValueError(f"the sha256 of {path.name} differs from the manifest")
