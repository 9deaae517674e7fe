"""Rows of one decoding step as data: a chain of tokens to verify and groups of masks that hang on it.

All row numbers, positions and slots are relative to the pending token (row 0). A `RowLayout` says what is fed
and, for every count `a` of accepted drafts, which rows the next drafts are drawn from. A `DraftLayout` has
one such layout for every buffer of drafts that a sequence may hold, stacked so that planning and advancing
are table look-ups without branches. A sequence may change its mode, hence its layouts, after any step.
Shapes: Y draft buffers, W rows of the widest layout, A = num_masks + 1 possible counts of accepted drafts,
J = num_masks drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from idlm.kernels.sampling import LayoutTables
from idlm.kernels.step_rows import MASK, RowTable

NO_ROW = -1


@dataclass(frozen=True, slots=True)
class DraftBuffer:
    """The drafts that a sequence holds. `from_verify_rows`: they were drawn from verification rows after a
    rejection, not from masks.
    """

    num_drafts: int
    from_verify_rows: bool = False

    def index(self, max_drafts: int) -> int:
        """Its index in `draft_buffers(max_drafts)`."""
        return self.num_drafts + (max_drafts if self.from_verify_rows and self.num_drafts else 0)


def draft_buffers(max_drafts: int) -> list[DraftBuffer]:
    """Every buffer of at most so many drafts; the empty one is the first."""
    counts = range(1, max_drafts + 1)
    return [
        DraftBuffer(0),
        *(DraftBuffer(count) for count in counts),
        *(DraftBuffer(count, True) for count in counts),
    ]


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """`[pending, draft_1 .. draft_m]` followed by groups of `num_masks` masks.

    Group g hangs on chain row `mask_parents[g]`: its masks see everything up to that row and each other,
    causally. `draft_rows[a]`: the rows that the next drafts are drawn from, in order, after exactly `a`
    accepted drafts; they fill the buffer `next_buffers[a]`.
    """

    num_drafts: int
    num_masks: int
    mask_parents: tuple[int, ...]
    draft_rows: tuple[tuple[int, ...], ...]
    next_buffers: tuple[DraftBuffer, ...]

    def __post_init__(self) -> None:
        assert len(self.draft_rows) == len(self.next_buffers) == self.num_drafts + 1, f"{self=}"
        assert all(0 <= parent <= self.num_drafts for parent in self.mask_parents), f"{self=}"

    @property
    def width(self) -> int:
        """Number of rows."""
        return 1 + self.num_drafts + self.num_masks * len(self.mask_parents)

    def group(self, index: int) -> tuple[int, ...]:
        """Rows of mask group `index`."""
        return mask_rows(self.num_drafts, self.num_masks, index)

    @cached_property
    def rows(self) -> tuple[tuple[int, int, int, int], ...]:
        """Per row: chain index or MASK, position, limit (exclusive), start of the row's own branch."""
        chain = [(depth, depth, depth + 1, depth + 1) for depth in range(self.num_drafts + 1)]
        masks = []
        for index, parent in enumerate(self.mask_parents):
            group = self.group(index)
            masks += [(MASK, parent + 1 + place, parent + 1, group[0]) for place in range(self.num_masks)]
        return tuple(chain + masks)


def mask_rows(num_drafts: int, num_masks: int, group: int) -> tuple[int, ...]:
    """Row numbers of a mask group after a chain of `num_drafts` drafts."""
    first = 1 + num_drafts + group * num_masks
    return tuple(range(first, first + num_masks))


class DraftLayout:
    """Layouts by draft buffer, padded and stacked as int64 tensors on the engine's device."""

    def __init__(self, layouts: list[RowLayout], device: torch.device) -> None:
        self.layouts = layouts
        self.max_width = max(layout.width for layout in layouts)
        max_drafts = len(layouts) // 2
        # Of all modes that sequences may come from.
        self.max_stride = max_drafts + 1

        def stack(rows: Iterable[Sequence[int]], width: int, fill: int = 0) -> Tensor:
            padded = [[*row, *[fill] * (width - len(row))] for row in rows]
            return torch.tensor(padded, dtype=torch.int64, device=device)

        source_YW, position_YW, limit_YW, branch_YW = (
            stack(([row[field] for row in layout.rows] for layout in layouts), self.max_width)
            for field in range(4)
        )
        self.rows = RowTable(
            width_Y=torch.tensor([layout.width for layout in layouts], device=device),
            source_YW=source_YW,
            position_YW=position_YW,
            limit_YW=limit_YW,
            branch_YW=branch_YW,
        )
        counts = range(max_drafts + 1)
        draft_rows = (y.draft_rows[a] if a <= y.num_drafts else () for y in layouts for a in counts)
        next_layouts = ([buffer.index(max_drafts) for buffer in y.next_buffers] for y in layouts)
        shape = (len(layouts), max_drafts + 1, max_drafts)
        self.tables = LayoutTables(
            num_drafts_Y=torch.tensor([layout.num_drafts for layout in layouts], device=device),
            draft_rows_YAJ=stack(draft_rows, max_drafts, NO_ROW).view(shape),
            next_layouts_YA=stack(next_layouts, max_drafts + 1),
        )
