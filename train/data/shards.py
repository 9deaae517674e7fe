"""Finished parts of a build of the data cache, from which an interrupted build continues.

A shard holds the results (`Encoded`) of consecutive records. `idlm.publish.publish` writes it whole or not
at all, and its manifest is verified before use, so that half-written or damaged shards are never used. Its
content follows from the key of the cache alone: two processes that build the same cache may write the same
shards.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from idlm.checkpoint import read_json, verify
from idlm.errors import UserError
from idlm.publish import publish

log = logging.getLogger(__name__)
SHARD_TOKENS = 1 << 25
"""128 MiB of packed tokens, about two minutes of one process; a build of fewer tokens writes no shard."""
RECORDS, LENGTHS, TOKENS = "records.json", "lengths.bin", "tokens.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The packed samples of one record, or the code, message and fix of its UserError."""

    file: int
    place: int
    origin: str
    samples: tuple[np.ndarray, ...] = ()
    error: tuple[str, str, str] | None = None


@dataclass(slots=True)
class Shards:
    """The shards in `directory`, in order; `num_kept` counts finished ones."""

    directory: Path
    num_kept: int = 0
    _waiting: list[Encoded] = field(default_factory=list)
    _num_waiting_tokens: int = 0

    def kept(self) -> Iterator[Encoded]:
        """Yield the results of verified shards; the first damaged one and all after it are removed.

        Call `add` only after this has ended.
        """
        for index in itertools.count():
            shard = self._path(index)
            if not shard.is_dir():
                break
            try:
                verify(shard, sealed=True)
            except UserError as error:
                log.warning("a part of the data cache is damaged and is tokenised again: %s", error.message)
                break
            self.num_kept = index + 1
            yield from _read(shard)
        for later in itertools.takewhile(Path.is_dir, map(self._path, itertools.count(self.num_kept))):
            shutil.rmtree(later)

    def add(self, done: Encoded) -> None:
        """Add the next result; a full shard is written."""
        self._waiting.append(done)
        self._num_waiting_tokens += sum(len(sample) for sample in done.samples)
        if self._num_waiting_tokens < SHARD_TOKENS:
            return
        with publish(self._path(self.num_kept)) as staging:
            _write(self._waiting, staging)
        self.num_kept += 1
        self._waiting.clear()
        self._num_waiting_tokens = 0

    def remove(self) -> None:
        """Remove all shards, once the cache is published or its data refused."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _path(self, index: int) -> Path:
        return self.directory / f"{index:06d}"


def _write(results: Iterable[Encoded], directory: Path) -> None:
    records, lengths = [], []
    with (directory / TOKENS).open("wb") as tokens:
        for one in results:
            records.append([one.file, one.place, one.origin, len(one.samples), one.error])
            for sample in one.samples:
                lengths.append(len(sample))
                tokens.write(sample.tobytes())
    (directory / LENGTHS).write_bytes(np.asarray(lengths, dtype=np.int64).tobytes())
    (directory / RECORDS).write_text(json.dumps({"records": records}), encoding="utf-8")


def _read(directory: Path) -> Iterator[Encoded]:
    lengths = np.fromfile(directory / LENGTHS, dtype=np.int64)
    tokens = np.fromfile(directory / TOKENS, dtype=np.uint32)
    samples = iter(np.split(tokens, np.cumsum(lengths)[:-1]))
    for file, place, origin, num_samples, error in read_json(directory / RECORDS)["records"]:
        yield Encoded(
            file=file,
            place=place,
            origin=origin,
            samples=tuple(itertools.islice(samples, num_samples)),
            error=None if error is None else tuple(error),
        )
