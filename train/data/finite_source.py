"""The packed rows of a finite source: which samples fit, what happens to those that do not, and who
shares a row.

Planned from the lengths alone, before data workers are started, so that they share the plan. A unit is
what is packed: a sample, its beginning, or one of the pieces it is split into.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import numpy as np

from idlm.errors import UserError
from idlm.train.data.base import MeasuredSource, Source
from idlm.train.data.layout import Sample
from idlm.train.data.packing import FilePlan, epoch_order, plan_file
from idlm.train.objectives.base import Objective

KEPT_ORDERS = 2


class FileRows:
    """`len` is the rows of an epoch; row k of the run is `units(k)`, for every k. `left_out`: bool
    [num_samples].
    """

    def __init__(
        self,
        source: Source,
        objective: Objective,
        *,
        max_length: int,
        row_length: int,
        overlong: str,
        seed: int,
        left_out: np.ndarray | None = None,
    ) -> None:
        self.source, self.objective, self.seed = source, objective, seed
        self.max_length, self.row_length = max_length, row_length
        self.lengths, self.num_targets = measure(source)
        costs = objective.num_rows_of(self.lengths, self.num_targets)
        is_wanted = np.ones(len(costs), dtype=bool) if left_out is None else ~left_out
        is_overlong = is_wanted & ((self.lengths > max_length) | (costs > row_length))
        if is_overlong.any() and overlong == "error":
            raise overlong_error(
                source.sample(int(is_overlong.argmax())),
                objective,
                max_length=max_length,
                row_length=row_length,
            )
        fitting = np.flatnonzero(is_wanted & ~is_overlong)
        spans = self._cut(np.flatnonzero(is_overlong), overlong)
        self.samples = np.concatenate([fitting, spans[:, 0]])
        self.starts = np.concatenate([np.zeros_like(fitting), spans[:, 1]])
        self.stops = np.concatenate([self.lengths[fitting], spans[:, 2]])
        self.costs = np.concatenate([costs[fitting], spans[:, 3]])
        self.num_kept_overlong = len(np.unique(spans[:, 0]))
        self.num_dropped = int(is_wanted.sum()) - len(fitting) - self.num_kept_overlong
        if not len(self.samples):
            raise UserError(
                "IDLM-0205",
                f"all {is_wanted.sum()} samples{'' if left_out is None else ' of this part (eval.holdout)'} "
                f"are longer than train.max_length={max_length} or need more than "
                f"train.row_length={row_length} rows",
                fix="raise train.max_length and train.row_length, or set train.overlong=truncate",
            )
        self.plan: FilePlan = plan_file(self.costs, row_length, seed=seed)
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def padding_share(self) -> float:
        """Share of an epoch's rows that hold nothing."""
        return 1 - float(self.costs.sum()) / (len(self.plan) * self.row_length)

    def units(self, item: int) -> list[int]:
        """The units of the run's row `item`."""
        epoch, place = divmod(item, len(self.plan))
        if epoch not in self._orders:
            if len(self._orders) >= KEPT_ORDERS:
                self._orders.clear()
            self._orders[epoch] = epoch_order(len(self.plan), seed=self.seed, epoch=epoch)
        return self.plan.row(int(self._orders[epoch][place]))

    def sample(self, unit: int) -> Sample:
        """The tokens of a unit."""
        whole = self.source.sample(int(self.samples[unit]))
        return whole.piece(int(self.starts[unit]), int(self.stops[unit]))

    def _cut(self, overlong_samples: np.ndarray, overlong: str) -> np.ndarray:
        """Int64 [num_units, 4]: sample, start, stop and cost of what becomes of samples that are too long."""
        spans: list[tuple[int, int, int, int]] = []
        if overlong != "drop":
            for index in overlong_samples.tolist():
                sample = self.source.sample(index)
                pieces = split(sample, self.fits, max_length=self.max_length)
                for start, stop in pieces[:1] if overlong == "truncate" else pieces:
                    piece = sample.piece(start, stop)
                    if piece.supervised[1:].any():
                        spans.append((index, start, stop, self.objective.num_rows(piece)))
        return np.asarray(spans, dtype=np.int64).reshape(-1, 4)

    def fits(self, piece: Sample) -> bool:
        """Whether a piece fits a row."""
        return self.objective.num_rows(piece) <= self.row_length


def split(sample: Sample, fits: Callable[[Sample], bool], *, max_length: int) -> list[tuple[int, int]]:
    """(start, stop) of consecutive pieces of at most `max_length` tokens, each as long as `fits` allows.

    Neighbours share one token, the last of a piece being context alone in the next: so every token but
    the very first is predicted once, by one piece.
    """
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


def measure(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """(lengths, num_targets) of all samples; reads them where the source has not counted them itself."""
    if isinstance(source, MeasuredSource):
        return source.lengths, source.num_targets
    assert source.num_samples is not None, "an endless source has no lengths"
    samples = [source.sample(index) for index in range(source.num_samples)]
    lengths = np.asarray([len(sample) for sample in samples], dtype=np.int64)
    return lengths, np.asarray([sample.supervised[1:].sum() for sample in samples], dtype=np.int64)


def overlong_error(sample: Sample, objective: Objective, *, max_length: int, row_length: int) -> UserError:
    """The UserError IDLM-0205 about a sample that does not fit."""
    length, num_rows = len(sample), objective.num_rows(sample)
    limits = (("train.max_length", length, max_length), ("train.row_length", num_rows, row_length))
    exceeded = [(key, needed, limit) for key, needed, limit in limits if needed > limit]
    raised = " and ".join(f"{key} to {needed} or more" for key, needed, _ in exceeded)
    return UserError(
        "IDLM-0205",
        f"{sample.origin} is too long: {length} tokens in {num_rows} rows, but "
        + ", ".join(f"{key}={limit}" for key, _, limit in exceeded),
        fix=f"raise {raised} (row_length may be null: as needed), or set train.overlong=drop, truncate or "
        "(for texts) split",
    )
