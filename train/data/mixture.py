"""Several finite sources as one, by weights: files of different shapes, each with a cache of its own.

A weight is a share of the samples. An epoch visits every sample of the source that lasts longest for its
share once, and those of the others as often as their shares need: `all_exhausted` of datasets'
`interleave_datasets`, with the counts that it has on average. Which samples of a source get one visit more
than the rest follows from the seed and is the same in every epoch. Packing shuffles all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from idlm.errors import UserError
from idlm.train.data.cache import NUM_EXAMPLES, CachedSource
from idlm.train.data.layout import Sample


@runtime_checkable
class CountedSource(Protocol):
    """A finite source that knows its samples without reading them: one cache, or a mixture of several.
    `prompt_keys` [num_samples]: a hash of the prompt that each sample's record opens with."""

    num_samples: int | None
    header: dict[str, Any]
    lengths: np.ndarray
    num_targets: np.ndarray
    prompt_keys: np.ndarray

    def sample(self, index: int) -> Sample: ...

    def digest(self) -> str: ...


class MixedSource:
    """`weights` [sources], above 0, need not add up to 1. UserError IDLM-0238: two sources are the same."""

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
        merged: dict[str, Any] = {
            name: sum(header[name] for header in headers) for name in ("num_records", "num_skipped")
        }
        for name in ("names", "files", "left_out", "skipped_examples"):
            merged[name] = [value for header in headers for value in header.get(name, ())]
        merged["skipped_examples"] = merged["skipped_examples"][:NUM_EXAMPLES]
        merged |= {name: {} for name in ("shapes", "ignored", "endings", "notes")}
        for header in headers:
            for name in ("shapes", "ignored"):
                for key, num in header[name].items():
                    merged[name][key] = merged[name].get(key, 0) + num
            for name in ("endings", "notes"):
                for key, (num, example) in header[name].items():
                    merged[name].setdefault(key, [0, example])[0] += num
        merged["num_supervised"] = int(self.num_targets.sum())
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
