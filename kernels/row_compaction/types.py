"""Arguments and results of compaction.

B sequences, R rows, I rows that are left, W positions of a block, X wanted rows, H rows of the head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor


class PackedRows(NamedTuple):
    """Rows packed over sequences: b owns rows cu_rows_B1[b] : cu_rows_B1[b + 1], padding follows. int64 but
    for the bool `is_mask_R` (None: there are no masks).

    A sequence's rows are in the order of their slots: those before the block that it works on, then rows of
    the block. `mapping_R`: the physical slot of each row, -1 for none. `origin_R`: a number that each row
    keeps."""

    cu_rows_B1: Tensor
    sequence_R: Tensor
    token_ids_R: Tensor
    positions_R: Tensor
    slots_R: Tensor
    limits_R: Tensor
    branch_starts_R: Tensor
    mapping_R: Tensor
    origin_R: Tensor
    is_mask_R: Tensor | None


class Drop(NamedTuple):
    """What remains. `rows_BW` int64: the row at each position of a block, -1: none. `keep_R` bool, read at
    these rows: whether they remain; rows before a block always do, and all of the block of `needs_all_B`
    (bool). `limits_R` int64: block rows of other sequences see no slot from there on; None: nothing changes.
    `scheduled_B` int64: the first rows of a sequence, of those that remain, that the host scheduled; None:
    all before its block. `waits_B` (bool): sequences that did not fit earlier in this pass."""

    rows_BW: Tensor
    keep_R: Tensor
    needs_all_B: Tensor
    waits_B: Tensor
    limits_R: Tensor | None = None
    scheduled_B: Tensor | None = None


class RowCapacity(NamedTuple):
    """A pass of `capacity` rows, no fewer than are scheduled. What scheduled ones leave, those sequences take
    first that have the largest `num_waits_B` (int64), of these those that need the fewest rows."""

    capacity: int
    num_waits_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedWanted:
    """Row h of the head is row `index_H[h]` of those that are left, and wanted row `origin_H[h]` (None: row
    h); padding is 0 in both. `numbers_X` int64: the row of the head of each wanted row, -1: dropped, or
    beyond the capacity. `waits_B` (bool): sequences beyond it, now or before; `demand_B` int64: rows of the
    head that each requested, 0 if it waited before."""

    index_H: Tensor
    origin_H: Tensor | None
    numbers_X: Tensor
    waits_B: Tensor
    demand_B: Tensor

    def cut(self, num_rows: int) -> RetainedWanted:
        """The first rows of the head, of which the others are padding."""
        assert self.origin_H is not None
        return replace(self, index_H=self.index_H[:num_rows], origin_H=self.origin_H[:num_rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """`rows` left, `numbers_I` (their numbers before, 0 for padding), the row at each position `rows_BW`, the
    sequences that did not fit `waits_B` (bool), and the rows that each requested `demand_B` (int64)."""

    rows: PackedRows
    numbers_I: Tensor
    rows_BW: Tensor
    waits_B: Tensor
    demand_B: Tensor

    def cut(self, num_rows: int) -> Compacted:
        """The first rows, of which the others are padding."""
        columns = self.rows._asdict().items()
        cut = {name: x[:num_rows] for name, x in columns if name != "cu_rows_B1" and x is not None}
        return replace(self, rows=self.rows._replace(**cut), numbers_I=self.numbers_I[:num_rows])
