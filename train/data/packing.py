"""Which samples train, which share a packed row, and what happens to samples that are too long.

Rows are filled best-fit-decreasing inside pools, which are small enough to be planned in milliseconds and
large enough to leave little padding. An endless source fills a fixed number of rows per pool; a finite one is
planned once, from lengths alone. Each epoch visits its rows in another order: samples of one row do not see
each other, so packing them again would gain nothing. Rows are pure functions of (data, seed, item), without
state to save."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from idlm.errors import UserError
from idlm.train.data.base import Source
from idlm.train.data.cache import CountedSource, pack, prompt_key
from idlm.train.data.layout import Sample
from idlm.train.objectives.base import Objective

if TYPE_CHECKING:
    from idlm.train.config.schema import EvalConfig

T = TypeVar("T")
ROWS_PER_POOL, POOL_SAMPLES = 32, 1024
"""Of an endless source, and of a finite one."""


class Recent(Generic[T]):
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[int, T] = OrderedDict()

    def get(self, number: int, make: Callable[[int], T]) -> T:
        """Return the value of `number`, made by `make(number)` where it is not cached."""
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
        self._pools: Recent[list[dict[int, Sample]]] = Recent(4)

    def members(self, item: int) -> dict[int, Sample]:
        """The samples of a row by their indices."""
        pool, row = divmod(item, ROWS_PER_POOL)
        return self._pools.get(pool, self._plan)[row]

    def row(self, item: int) -> list[Sample]:
        return [*self.members(item).values()]

    def _used(self, index: int) -> Sample | None:
        """Sample `index` within the limits, None where it is dropped."""
        sample = self.source.sample(index)
        if self.limits.fits(sample):
            return sample
        parts = self.limits.parts(sample)
        return sample.piece(*parts[0]) if parts else None

    def _plan(self, pool: int) -> list[dict[int, Sample]]:
        capacity = self.limits.row_length
        volume = ROWS_PER_POOL * capacity
        samples: dict[int, Sample] = {}
        costs: list[int] = []
        total = 0
        for index in range(pool * volume, (pool + 1) * volume):
            if (sample := self._used(index)) is not None:
                samples[index] = sample
                costs.append(self.limits.num_rows(sample))
                total += costs[-1]
                if total >= volume:
                    break
        if not samples:
            raise UserError(
                "IDLM-0205",
                f"each of {volume} samples in turn is too long for train.max_length or train.row_length",
                fix="raise train.max_length and train.row_length",
            )
        rows = best_fit_decreasing(costs, capacity, max_bins=ROWS_PER_POOL)
        rows.extend([] for _ in range(ROWS_PER_POOL - len(rows)))
        order = np.random.default_rng([pool, capacity]).permutation(ROWS_PER_POOL)
        found = [*samples.items()]
        return [dict(found[number] for number in sorted(rows[row])) for row in order]


def plan_file(costs: np.ndarray, capacity: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle a file and pack it pool by pool in O(n log n); `costs` int64 [n]: rows of each sample. Returns
    int64 arrays: row k holds the indices `members[offsets[k] : offsets[k + 1]]` into `costs`."""
    order = np.random.default_rng(seed).permutation(len(costs))
    members, sizes = [], []
    for start in range(0, len(order), POOL_SAMPLES):
        pool = order[start : start + POOL_SAMPLES]
        bins = best_fit_decreasing(costs[pool].tolist(), capacity)
        members.append(pool[np.concatenate([np.asarray(indices) for indices in bins])])
        sizes.append(np.asarray([len(indices) for indices in bins]))
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), *sizes]).cumsum()
    return np.concatenate(members), offsets


class FileRows:
    """Packed rows of a finite source, `len` per epoch, planned before data workers start, which share it.

    A unit is what is packed, a whole sample or a part of one: `units`, int64 [units, 4], has its sample,
    start, stop and rows. `num_lost`: targets that no unit has. `left_out`, bool [num_samples], marks samples
    that are not used; raises UserError IDLM-0205 where no sample fits."""

    def __init__(
        self, source: Source, limits: LengthLimits, *, seed: int, left_out: np.ndarray | None = None
    ) -> None:
        self.source, self.limits, self.seed = source, limits, seed
        self.lengths, self.num_targets, _ = measure(source)
        costs = limits.objective.num_rows(self.lengths, self.num_targets)
        is_wanted = np.ones(len(costs), dtype=bool) if left_out is None else ~left_out
        is_overlong = is_wanted & ((self.lengths > limits.max_length) | (costs > limits.row_length))
        fitting = np.flatnonzero(is_wanted & ~is_overlong)
        parts, num_trained = self._parts(np.flatnonzero(is_overlong))
        whole = np.stack([fitting, np.zeros_like(fitting), self.lengths[fitting], costs[fitting]], axis=1)
        self.units = np.concatenate([whole, parts])
        self.num_lost = int(self.num_targets[is_overlong].sum()) - num_trained
        self.num_cut = len(np.unique(parts[:, 0]))
        self.num_dropped = int(is_wanted.sum()) - len(fitting) - self.num_cut
        if not len(self.units):
            raise UserError(
                "IDLM-0205",
                f"all {is_wanted.sum()} samples{'' if left_out is None else ' of this part (eval.holdout)'} "
                f"are longer than train.max_length={limits.max_length} or need more than "
                f"train.row_length={limits.row_length} rows",
                fix="raise train.max_length and train.row_length, or set train.overlong=truncate",
            )
        self._members, self._offsets = plan_file(self.units[:, 3], limits.row_length, seed=seed)
        self._orders: Recent[np.ndarray] = Recent(2)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def padding_share(self) -> float:
        return 1 - float(self.units[:, 3].sum()) / (len(self) * self.limits.row_length)

    def members(self, item: int) -> list[int]:
        """Sample indices of the packed row `item` of the run; a split sample may occur several times."""
        return self._units(item)[:, 0].tolist()

    def row(self, item: int) -> list[Sample]:
        """The samples, or parts of samples, in the packed row `item` of the run."""
        units = self._units(item).tolist()
        return [self.source.sample(index).piece(start, stop) for index, start, stop, _ in units]

    def _units(self, item: int) -> np.ndarray:
        epoch, index = divmod(item, len(self))
        seed = [self.seed, epoch]
        order = self._orders.get(epoch, lambda _: np.random.default_rng(seed).permutation(len(self)))
        row = order[index]
        return self.units[self._members[self._offsets[row] : self._offsets[row + 1]]]

    def _parts(self, overlong: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the units of samples that are too long, and how many targets they have."""
        parts, num_targets = [], 0
        # Samples that are dropped need not be read.
        for index in [] if self.limits.overlong == "drop" else overlong.tolist():
            sample = self.source.sample(index)
            for start, stop in self.limits.parts(sample):
                piece = sample.piece(start, stop)
                num_targets += piece.num_targets
                parts.append((index, start, stop, self.limits.num_rows(piece)))
        return np.asarray(parts, dtype=np.int64).reshape(-1, 4), num_targets


def measure(source: Source) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, targets and prompt keys of all samples, int64 [num_samples], read where they are not cached."""
    if isinstance(source, CountedSource):
        return source.lengths, source.num_targets, source.prompt_keys
    assert source.num_samples is not None, "an endless source has no lengths"
    samples = [source.sample(index) for index in range(source.num_samples)]
    facts = [(len(sample), sample.num_targets, prompt_key(pack(sample))) for sample in samples]
    lengths, num_targets, keys = np.asarray(facts, dtype=np.int64).reshape(-1, 3).T
    return lengths, num_targets, keys


WANTED, SHARE_OF_FEW, TOO_FEW = 16, 0.1, 8
"""Samples that are held out at least, as far as that share of a small file allows; of fewer than 8, one for
evaluations and none for the report alone."""


def held_out_flags(config: EvalConfig, source: Source, *, seed: int) -> np.ndarray | None:
    """Return which samples are held out, bool [num_samples]; None where none are: of an endless source,
    with eval.path, eval.split or eval.holdout=0, and of data that is too little, or has one prompt.

    A hash of the prompt that their record opens with chooses them. So turns of one conversation, several
    answers to one prompt and copies of a record stay on one side, and the choice depends on the content
    alone: not on the order of records, and hardly on records that are added."""
    is_separate = config.path is not None or config.split is not None
    if is_separate or source.num_samples is None or not config.holdout:
        return None
    num = source.num_samples
    if num < TOO_FEW and config.every is None:
        return None
    keys, group_of, sizes = np.unique(measure(source)[2], return_inverse=True, return_counts=True)
    wanted = max(1, round(config.holdout * num), min(WANTED, int(SHARE_OF_FEW * num)))
    maximum = min(num - 1, max(wanted, num // 2))
    order = np.argsort(keys ^ np.random.default_rng(seed).integers(np.iinfo(np.int64).max))
    is_chosen, total = np.zeros(len(keys), dtype=bool), 0
    for group in order:
        if total >= wanted:
            break
        # A prompt that most of the data answers is not held out.
        if total + sizes[group] <= maximum:
            is_chosen[group] = True
            total += int(sizes[group])
    return is_chosen[group_of.reshape(-1)] if total else None
