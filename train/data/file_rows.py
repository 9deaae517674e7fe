"""Packed rows of a finite source, planned once from lengths alone.

Each epoch visits the rows in another order: samples of one row do not see each other, so packing them again
would gain nothing. Rows are a pure function of (data, seed, item), without state to save."""

from __future__ import annotations

import numpy as np

from idlm.errors import UserError
from idlm.train.data.base import Source
from idlm.train.data.layout import Sample
from idlm.train.data.mixture import CountedSource
from idlm.train.data.packing import LengthLimits, Recent, best_fit_decreasing

POOL_SAMPLES = 1024


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
        self.lengths, self.num_targets = measure(source)
        costs = limits.objective.num_rows(self.lengths, self.num_targets)
        is_wanted = np.ones(len(costs), dtype=bool) if left_out is None else ~left_out
        is_overlong = is_wanted & ((self.lengths > limits.max_length) | (costs > limits.row_length))
        fitting = np.flatnonzero(is_wanted & ~is_overlong)
        parts, num_kept = self._parts(np.flatnonzero(is_overlong))
        whole = np.stack([fitting, np.zeros_like(fitting), self.lengths[fitting], costs[fitting]], axis=1)
        self.units = np.concatenate([whole, parts])
        self.num_lost = int(self.num_targets[is_overlong].sum()) - num_kept
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
        row = self._orders.get(epoch, self._order)[index]
        return self.units[self._members[self._offsets[row] : self._offsets[row + 1]]]

    def _order(self, epoch: int) -> np.ndarray:
        """Return the order in which an epoch visits the rows, int64 [rows]."""
        return np.random.default_rng([self.seed, epoch]).permutation(len(self))

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


def measure(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets of all samples, int64 [num_samples], read where they are not cached."""
    if isinstance(source, CountedSource):
        return source.lengths, source.num_targets
    assert source.num_samples is not None, "an endless source has no lengths"
    samples = [source.sample(index) for index in range(source.num_samples)]
    lengths = np.asarray([len(sample) for sample in samples], dtype=np.int64)
    return lengths, np.asarray([sample.num_targets for sample in samples], dtype=np.int64)
