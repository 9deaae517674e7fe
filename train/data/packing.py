"""Which samples share a packed row, and what happens to samples that are too long.

Rows are filled best-fit-decreasing inside pools, which are small enough to be planned in milliseconds and
large enough to leave little padding. An endless source, here, fills a fixed number of rows per pool; for a
file see `file_rows.py`. Both are pure functions of (data, seed, item), without state to save."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from idlm.errors import UserError
from idlm.train.data.base import Source
from idlm.train.data.layout import Sample
from idlm.train.objectives.base import Objective

T = TypeVar("T")
ROWS_PER_POOL = 32
OVERLONG_POLICIES = ("error", "drop", "truncate", "split")


class Recent(Generic[T]):
    """The last `limit` values that were made, by number."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[int, T] = OrderedDict()

    def get(self, number: int, make: Callable[[int], T]) -> T:
        """Return the value of `number`, made by `make(number)` where it is not kept."""
        if number not in self._values:
            self._values[number] = make(number)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)
        return self._values[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimits:
    """Samples have at most `max_length` tokens in `row_length` rows; `overlong` decides about others."""

    objective: Objective
    max_length: int
    row_length: int
    overlong: str

    def fits(self, sample: Sample) -> bool:
        """Return whether the sample is used whole."""
        return len(sample) <= self.max_length and self.num_rows(sample) <= self.row_length

    def num_rows(self, sample: Sample) -> int:
        return self.objective.num_rows(len(sample), sample.num_targets)

    def parts(self, sample: Sample) -> list[tuple[int, int]]:
        """(start, stop) of parts with a target of a sample that does not fit; IDLM-0205 for `error`."""
        if self.overlong == "error":
            raise self._error(sample)
        if self.overlong == "drop":
            return []
        parts = split(sample, self.fits, max_length=self.max_length)
        parts = parts[:1] if self.overlong == "truncate" else parts
        return [(start, stop) for start, stop in parts if sample.piece(start, stop).num_targets]

    def _error(self, sample: Sample) -> UserError:
        length, num_rows = len(sample), self.num_rows(sample)
        limits = (
            ("train.max_length", length, self.max_length),
            ("train.row_length", num_rows, self.row_length),
        )
        exceeded = [(key, needed, limit) for key, needed, limit in limits if needed > limit]
        raised = " and ".join(f"{key} to {needed} or more" for key, needed, _ in exceeded)
        return UserError(
            "IDLM-0205",
            f"{sample.origin} is too long: {length} tokens in {num_rows} rows, but "
            + ", ".join(f"{key}={limit}" for key, _, limit in exceeded),
            fix=f"raise {raised} (row_length may be null: as needed), or set train.overlong=drop, truncate "
            "or (for texts) split",
        )


def split(sample: Sample, fits: Callable[[Sample], bool], *, max_length: int) -> list[tuple[int, int]]:
    """(start, stop) of consecutive pieces of at most `max_length` tokens, each as long as `fits` allows. The
    last token of a piece is the first of the next, as context: every token but the first of the sample is
    predicted once."""
    pieces = []
    start = 0
    while start < len(sample) - 1:
        stops = range(start + 2, min(len(sample), start + max_length) + 1)
        stop = stops[-1]
        if not fits(sample.piece(start, stop)):
            first_bad = bisect.bisect_left(stops, True, key=lambda end: not fits(sample.piece(start, end)))
            stop = stops[max(0, first_bad - 1)]
        pieces.append((start, stop))
        start = stop - 1
    return pieces


def best_fit_decreasing(
    costs: Sequence[int], capacity: int, *, max_bins: int | None = None
) -> list[list[int]]:
    """Bins of indices into `costs`, each of total cost <= capacity; what fits no bin is left out."""
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    bins: list[list[int]] = []
    space: list[tuple[int, int]] = []
    for index in order:
        cost = costs[index]
        assert 0 < cost <= capacity, f"{cost=} {capacity=}"
        number = bisect.bisect_left(space, (cost, -1))
        if number < len(space):
            remaining, chosen = space.pop(number)
        elif max_bins is None or len(bins) < max_bins:
            remaining, chosen = capacity, len(bins)
            bins.append([])
        else:
            continue
        bins[chosen].append(index)
        bisect.insort(space, (remaining - cost, chosen))
    return bins


class StreamRows:
    """Packed rows of an endless source. Pool p owns as many sample indices as it has token rows, so that no
    two pools share one. Samples are drawn in order until they fill the pool's rows by volume; the few that
    then fit no row are dropped."""

    def __init__(self, source: Source, limits: LengthLimits) -> None:
        self.source, self.limits = source, limits
        self._pools: Recent[list[list[int]]] = Recent(4)
        # Planning makes the samples that are read right after it.
        self._samples: Recent[Sample | None] = Recent(4096)

    def members(self, item: int) -> list[int]:
        pool, row = divmod(item, ROWS_PER_POOL)
        return self._pools.get(pool, self._plan)[row]

    def row(self, item: int) -> list[Sample]:
        used = (self._samples.get(index, self._used) for index in self.members(item))
        return [sample for sample in used if sample is not None]

    def _used(self, index: int) -> Sample | None:
        """Sample `index` within the limits, None where it is dropped."""
        sample = self.source.sample(index)
        if self.limits.fits(sample):
            return sample
        parts = self.limits.parts(sample)
        return sample.piece(*parts[0]) if parts else None

    def _plan(self, pool: int) -> list[list[int]]:
        capacity = self.limits.row_length
        volume = ROWS_PER_POOL * capacity
        members: list[int] = []
        costs: list[int] = []
        total = 0
        for index in range(pool * volume, (pool + 1) * volume):
            sample = self._samples.get(index, self._used)
            if sample is not None:
                members.append(index)
                costs.append(self.limits.num_rows(sample))
                total += costs[-1]
                if total >= volume:
                    break
        if not members:
            raise UserError(
                "IDLM-0205",
                f"each of {volume} samples in turn is too long for train.max_length or train.row_length",
                fix="raise train.max_length and train.row_length",
            )
        rows = best_fit_decreasing(costs, capacity, max_bins=ROWS_PER_POOL)
        rows.extend([] for _ in range(ROWS_PER_POOL - len(rows)))
        order = np.random.default_rng([pool, capacity]).permutation(ROWS_PER_POOL)
        return [sorted(members[number] for number in rows[row]) for row in order]
