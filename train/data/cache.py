"""Tokenised samples on disk: parts that are written whole, verified, and read through a memory map.

A cache is a folder of parts 000000, 000001, ..., of which the last is marked. `idlm.publish.publish` writes
a part whole or not at all, so that a build that was stopped continues after its last part. Content follows
from the key of the cache alone: processes that build the same cache write the same parts. Any part may be
deleted at any time. The files of a part are
    tokens.bin    uint32: token id; the highest bit marks supervised tokens
    samples.bin   int64 [samples, 5]: file, line, tokens, supervised tokens after the first token, prompt key
    data.json     `Counts` up to the end of the part, ids that occur in it, sha256 of each block of its tokens
All files but `tokens.bin` are hashed when the cache is opened, and its blocks when they are first read: a
large cache opens quickly and a damaged one is never trained on."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from idlm.checkpoint import MANIFEST, read_json, verify
from idlm.errors import UserError
from idlm.log import note_progress
from idlm.publish import publish
from idlm.train.data.layout import Sample

log = logging.getLogger(__name__)
FORMAT = "idlm-data-5"
TOKENS, SAMPLES, HEADER = "tokens.bin", "samples.bin", "data.json"
DTYPES = {TOKENS: np.uint32, SAMPLES: np.int64}
FILE, NUMBER, LENGTH, NUM_TARGETS, PROMPT, NUM_COLUMNS = range(6)
"""Columns of samples.bin."""
BLOCK_TOKENS = 1 << 14
SUPERVISED_BIT = np.uint32(1 << 31)
NUM_EXAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One record, before (`record`) and after it is encoded: its packed samples (see `pack`) or its error.

    `number` is the line in file `file`; `shape` is "" where the record has none. `ignored`: keys of the
    record and of its turns that hold something and are not read. `notes`: what else is to be reported of the
    record, in sentences that many records share."""

    file: int
    number: int
    origin: str
    shape: str = ""
    samples: tuple[np.ndarray, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: UserError | None = None
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Counts:
    """What is counted from the first record on; `endings` has (count, example) of last supervised tokens,
    `notes` the same of the notes on records, `ignored` the records that have a key that is not read."""

    num_records: int = 0
    num_skipped: int = 0
    skipped_examples: list[str] = field(default_factory=list)
    shapes: dict[str, int] = field(default_factory=dict)
    ignored: dict[str, int] = field(default_factory=dict)
    num_samples: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    endings: dict[str, list[Any]] = field(default_factory=dict)
    notes: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, done: Encoded) -> None:
        self.num_records += 1
        if done.shape:
            self.shapes[done.shape] = self.shapes.get(done.shape, 0) + 1
        for key in done.ignored:
            self.ignored[key] = self.ignored.get(key, 0) + 1
        if done.error is not None:
            self.num_skipped += 1
            example = f"{done.error.code}: {done.error.message}"
            self.skipped_examples += [example][: NUM_EXAMPLES - len(self.skipped_examples)]
        for note in done.notes:
            self.notes.setdefault(note, [0, done.origin])[0] += 1
        for packed in done.samples:
            supervised = packed >= SUPERVISED_BIT
            self.num_samples += 1
            self.num_tokens += len(packed)
            self.num_supervised += int(supervised.sum())
            last = int(packed[supervised][-1] & ~SUPERVISED_BIT)
            self.endings.setdefault(str(last), [0, done.origin])[0] += 1


def pack(sample: Sample) -> np.ndarray:
    """Return ids and supervision flags of a sample in one uint32 array."""
    return sample.token_ids.astype(np.uint32) | np.where(sample.supervised, SUPERVISED_BIT, np.uint32(0))


def prompt_key(packed: np.ndarray) -> int:
    """Return a hash of the tokens before the first supervised one, equal for samples with the same prompt; of
    all tokens where there is no prompt."""
    num_prompt = int((packed >= SUPERVISED_BIT).argmax())
    content = packed[:num_prompt] if num_prompt > 1 else packed
    return int.from_bytes(hashlib.blake2b(content.tobytes(), digest_size=8).digest()) >> 1


def holds_mask(origin: str, token_id: int) -> UserError:
    return UserError(
        "IDLM-0206",
        f"{origin} contains the mask token (id {token_id})",
        fix="remove the mask token's text from the data, or choose another model.mask_token_id",
    )


def cache_key(facts: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *facts]).encode()).hexdigest()


def part_folder(directory: Path, index: int) -> Path:
    return directory / f"{index:06d}"


def write_part(
    part: Path, results: Sequence[Encoded], counts: Counts, *, names: Sequence[str], is_last: bool
) -> None:
    """Publish the part of consecutive records; `counts` go up to its end, `names` are those of the files."""
    rows = [
        (
            done.file,
            done.number,
            len(packed),
            (packed[1:] >= SUPERVISED_BIT).sum(),
            prompt_key(done.samples[0]),
        )
        for done in results
        for packed in done.samples
    ]
    packed = [np.zeros(0, dtype=np.uint32), *(packed for done in results for packed in done.samples)]
    tokens = np.concatenate(packed)
    ids = tokens & ~SUPERVISED_BIT
    is_used = np.zeros(int(ids.max(initial=0)) + 1, dtype=bool)
    is_used[ids] = True
    blocks = (tokens[start : start + BLOCK_TOKENS] for start in range(0, len(tokens), BLOCK_TOKENS))
    header = {
        **asdict(counts),
        "names": list(names),
        "is_last": is_last,
        "used_ids": np.flatnonzero(is_used).tolist(),
        "blocks": [hashlib.sha256(block.data).hexdigest() for block in blocks],
    }
    with publish(part) as staging:
        (staging / TOKENS).write_bytes(tokens.data)
        (staging / SAMPLES).write_bytes(np.asarray(rows, dtype=np.int64).tobytes())
        (staging / HEADER).write_text(json.dumps(header), encoding="utf-8")


def intact_parts(directory: Path) -> list[dict[str, Any]]:
    """Return the headers of the parts before the first that is missing or damaged, which is removed. Reads
    and verifies all of their content."""
    headers: list[dict[str, Any]] = []
    while (part := part_folder(directory, len(headers))).is_dir():
        try:
            verify(part, sealed=True)
        except UserError as error:
            log.warning("a part of the data cache is damaged and is tokenised again: %s", error.message)
            shutil.rmtree(part)
            break
        note_progress()
        headers.append(read_json(part / HEADER))
    return headers


class CachedSource:
    """The samples of a cache; `header` is that of its last part. Tokens stay on disk, lengths in memory.
    `prompt_keys` [num_samples]: a hash of the prompt that each sample's record opens with."""

    def __init__(self, directory: Path, headers: Sequence[dict[str, Any]]) -> None:
        self.directory, self.header = directory, headers[-1]
        self.num_samples: int | None = int(self.header["num_samples"])
        self._used_ids = [header["used_ids"] for header in headers]
        self._blocks = [header["blocks"] for header in headers]
        self._checked: set[tuple[int, int]] = set()
        self._maps: dict[tuple[int, str], np.ndarray] = {}
        tables = [self._table(part) for part in range(len(headers))]
        self.lengths = np.concatenate([table[:, LENGTH] for table in tables])
        self.num_targets = np.concatenate([table[:, NUM_TARGETS] for table in tables])
        self.prompt_keys = np.concatenate([table[:, PROMPT] for table in tables])
        self._offsets = np.concatenate([np.zeros(1, dtype=np.int64), self.lengths.cumsum()])
        self._first = np.cumsum([0, *map(len, tables)])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the memory maps: another process opens the files itself."""
        return self.__dict__ | {"_maps": {}}

    def sample(self, index: int) -> Sample:
        """Read sample `index`; UserError IDLM-0236 where the file is damaged there."""
        part, _ = self._find(index)
        start = int(self._offsets[index] - self._offsets[self._first[part]])
        packed = self._read(part, start, start + int(self.lengths[index]))
        return Sample(
            token_ids=(packed & ~SUPERVISED_BIT).astype(np.int64),
            supervised=packed >= SUPERVISED_BIT,
            origin=f"sample {index} ({self.origin(index)})",
        )

    def origin(self, index: int) -> str:
        part, number = self._find(index)
        row = self._table(part)[number]
        return f"{self.header['names'][row[FILE]]}:{row[NUMBER]}"

    def digest(self) -> str:
        """Return the sha256 of all tokens and flags, from the manifests; of several parts that of theirs."""
        parts = [part_folder(self.directory, index) for index in range(len(self._blocks))]
        found = [str(read_json(part / MANIFEST)["files"][TOKENS]["sha256"]) for part in parts]
        return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()

    def refuse_token(self, token_id: int) -> None:
        """Raise UserError IDLM-0206, naming the record, where `token_id` occurs."""
        for part, used in enumerate(self._used_ids):
            if token_id in used:
                hits = np.flatnonzero((self._map(part, TOKENS) & ~SUPERVISED_BIT) == token_id)
                number = self._offsets[self._first[part]] + hits[0]
                index = int(np.searchsorted(self._offsets, number, side="right")) - 1
                raise holds_mask(self.origin(index), token_id)

    def _find(self, index: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._first, index, side="right")) - 1
        return part, index - int(self._first[part])

    def _map(self, part: int, name: str) -> np.ndarray:
        path, dtype = part_folder(self.directory, part) / name, DTYPES[name]
        known = self._maps.get((part, name))
        # What is cut from a file that is mapped would end the process with a signal.
        if known is not None and path.exists() and path.stat().st_size < known.nbytes:
            raise _damaged(path, "is shorter than when it was opened")
        if known is None:
            # An empty file cannot be mapped.
            is_empty = not path.stat().st_size
            self._maps[part, name] = np.zeros(0, dtype) if is_empty else np.memmap(path, dtype, mode="r")
        return self._maps[part, name]

    def _table(self, part: int) -> np.ndarray:
        return self._map(part, SAMPLES).reshape(-1, NUM_COLUMNS)

    def _read(self, part: int, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of a part; hash their blocks that this process has not read before."""
        tokens = self._map(part, TOKENS)
        for block in range(start // BLOCK_TOKENS, (stop - 1) // BLOCK_TOKENS + 1):
            if (part, block) in self._checked:
                continue
            content = tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
            if hashlib.sha256(content.data).hexdigest() != self._blocks[part][block]:
                path = part_folder(self.directory, part) / TOKENS
                raise _damaged(path, f"block {block} of {BLOCK_TOKENS} tokens, differs from its hash")
            self._checked.add((part, block))
        return np.array(tokens[start:stop])


def _damaged(path: Path, problem: str) -> UserError:
    return UserError(
        "IDLM-0236",
        f"the data cache is damaged: {path}, {problem}",
        fix=f"delete the folder {path.parent}; the next start builds it again from the data",
    )


def open_cache(directory: Path) -> CachedSource | None:
    """Return the cache in `directory`, None where it is not complete; UserError names what is damaged."""
    headers: list[dict[str, Any]] = []
    while not headers or not headers[-1]["is_last"]:
        part = part_folder(directory, len(headers))
        if not part.is_dir():
            return None
        verify(part, sizes_only=(TOKENS,))
        headers.append(read_json(part / HEADER))
    return CachedSource(directory, headers)


class MixedSource:
    """Several caches as one source: files of different shapes, by weights.

    A weight is a share of the samples. An epoch visits every sample of the source that lasts longest for its
    share once, and those of the others as often as their shares need: `all_exhausted` of datasets'
    `interleave_datasets`, with the counts that it has on average. Which samples of a source get one visit
    more than the rest follows from the seed and is the same in every epoch. Packing shuffles all of them.

    `weights` [sources], above 0, need not add up to 1. UserError IDLM-0238: two sources are the same."""

    def __init__(self, sources: Sequence[CachedSource], weights: Sequence[float], *, seed: int) -> None:
        self.sources, self.weights = sources, weights
        _refuse_equal(sources)
        sizes = np.asarray([source.num_samples for source in sources])
        shares = np.asarray(weights) / sum(weights)
        counts = np.rint((sizes / shares).max() * shares).astype(np.int64)
        visits = [
            _visits(int(size), int(count), seed=[seed, number])
            for number, (size, count) in enumerate(zip(sizes, counts, strict=True))
        ]
        self._source = np.repeat(np.arange(len(sources)), counts)
        self._index = np.concatenate(visits)
        self.num_samples: int | None = len(self._index)
        columns = list(zip(sources, visits, strict=True))
        self.lengths = np.concatenate([source.lengths[chosen] for source, chosen in columns])
        self.num_targets = np.concatenate([source.num_targets[chosen] for source, chosen in columns])
        self.prompt_keys = np.concatenate([source.prompt_keys[chosen] for source, chosen in columns])
        self.header = self._merged_header(counts / sizes)

    def sample(self, index: int) -> Sample:
        return self.sources[self._source[index]].sample(int(self._index[index]))

    def digest(self) -> str:
        facts = [[source.digest() for source in self.sources], list(self.weights)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _merged_header(self, visits: np.ndarray) -> dict[str, Any]:
        """What the caches counted, over all of them; `visits` [sources] of a sample in an epoch."""
        headers = [source.header for source in self.sources]
        merged: dict[str, Any] = {"num_supervised": int(self.num_targets.sum())}
        for name in ("num_records", "num_skipped"):
            merged[name] = sum(header[name] for header in headers)
        for name in ("names", "files", "left_out", "skipped_examples"):
            merged[name] = [value for header in headers for value in header.get(name, ())]
        for name in ("shapes", "ignored"):
            merged[name] = sum((Counter(header[name]) for header in headers), Counter())
        for name in ("endings", "notes"):
            found = merged[name] = {}
            for key, (num, example) in (item for header in headers for item in header[name].items()):
                found.setdefault(key, [0, example])[0] += num
        shares = np.asarray(self.weights) / sum(self.weights)
        merged["mixture"] = [
            f"{share:.1%} of the samples from {source.header['names'][0]}"
            f"{' and more' if len(source.header['names']) > 1 else ''}, each {visit:.3g} times an epoch"
            for share, source, visit in zip(shares, self.sources, visits, strict=True)
        ]
        return merged


def _visits(size: int, count: int, *, seed: list[int]) -> np.ndarray:
    """Return which samples of a source an epoch visits, int64 [count]: all equally often, up to one more."""
    rest = np.random.default_rng(seed).permutation(size)[: count % size]
    return np.concatenate([np.tile(np.arange(size), count // size), np.sort(rest)])


def _refuse_equal(sources: Sequence[CachedSource]) -> None:
    known: dict[str, str] = {}
    for source in sources:
        name, digest = source.header["names"][0], source.digest()
        if digest in known:
            raise UserError(
                "IDLM-0238",
                f"data.sources holds the same samples twice: {known[digest]} and {name}",
                fix="give each source once, with a higher weight",
            )
        known[digest] = name


CountedSource = CachedSource | MixedSource
"""A finite source whose lengths need no reading of samples."""
