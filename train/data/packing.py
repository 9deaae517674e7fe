"""Which samples share a packed row: best-fit-decreasing inside pools, a pure function of (seed, pool index).

A pool is small enough to be planned in milliseconds and large enough that rows end up nearly full. Generated
sources never end, so a pool fills a fixed number of rows. A file is packed once, and every epoch visits its
rows in another order: samples of one row never see each other, so nothing is gained by packing again, and
the row of any item is known without the epochs before it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from idlm.errors import UserError

POOL_SAMPLES = 1024


def best_fit_decreasing(
    costs: Sequence[int], capacity: int, *, max_bins: int | None = None
) -> list[list[int]]:
    """Bins of indices into `costs`, each with a total cost <= capacity; what fits no bin of `max_bins` is
    left out.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    bins: list[list[int]] = []
    space: list[tuple[int, int]] = []
    for index in order:
        cost = costs[index]
        assert 0 < cost <= capacity, f"{cost=} {capacity=}"
        place = bisect.bisect_left(space, (cost, -1))
        if place < len(space):
            remaining, chosen = space.pop(place)
        elif max_bins is None or len(bins) < max_bins:
            remaining, chosen = capacity, len(bins)
            bins.append([])
        else:
            continue
        bins[chosen].append(index)
        bisect.insort(space, (remaining - cost, chosen))
    return bins


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """Rows of an endless source. Pool p owns as many sample indices as it has token rows: no two pools share
    one.

    `cost_of(i)` is the number of rows sample i occupies, 0 for a sample that is dropped.
    """

    cost_of: Callable[[int], int]
    capacity: int
    rows_per_pool: int = 32

    def pool(self, index: int) -> list[list[int]]:
        """The `rows_per_pool` rows of a pool as lists of sample indices.

        Samples are drawn in order until they fill the rows by volume; the few that then fit nowhere are
        dropped, which an endless source can afford.
        """
        volume = self.rows_per_pool * self.capacity
        members: list[int] = []
        costs: list[int] = []
        total = 0
        for sample in range(index * volume, (index + 1) * volume):
            cost = self.cost_of(sample)
            if cost:
                members.append(sample)
                costs.append(cost)
                total += cost
            if total >= volume:
                break
        if not members:
            raise UserError(
                "IDLM-0205",
                f"each of {volume} samples in turn is too long for train.max_length or train.row_length",
                fix="raise train.max_length and train.row_length",
            )
        rows = best_fit_decreasing(costs, self.capacity, max_bins=self.rows_per_pool)
        rows.extend([] for _ in range(self.rows_per_pool - len(rows)))
        order = np.random.default_rng([index, self.capacity]).permutation(self.rows_per_pool)
        return [sorted(members[place] for place in rows[row]) for row in order]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """The rows of a file: row k holds the indices `members[offsets[k] : offsets[k + 1]]`, all int64."""

    members: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> list[int]:
        """The indices in one row."""
        found: list[int] = self.members[self.offsets[index] : self.offsets[index + 1]].tolist()
        return found


def plan_file(costs: np.ndarray, capacity: int, *, seed: int) -> FilePlan:
    """Pack all of a file: shuffled, cut into pools, every pool best-fit-decreasing. O(n log n), a few n
    integers.
    """
    order = np.random.default_rng(seed).permutation(len(costs))
    members, sizes = [], []
    for start in range(0, len(order), POOL_SAMPLES):
        pool = order[start : start + POOL_SAMPLES]
        bins = best_fit_decreasing(costs[pool].tolist(), capacity)
        members.append(pool[np.concatenate([np.asarray(places) for places in bins])])
        sizes.append(np.asarray([len(places) for places in bins]))
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), *sizes]).cumsum()
    return FilePlan(members=np.concatenate(members), offsets=offsets)


def epoch_order(num_rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits the rows, int64 [num_rows]."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
