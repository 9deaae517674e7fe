"""A static toy of the rows side: of a block's masks only the first half goes on after the first layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from idlm.infer.sparse.accelerator import (
    ACCELERATORS,
    BlockMemory,
    PassView,
    RowsAccelerator,
    RowSelection,
    RowsPass,
)
from idlm.kernels.row_compaction import by_row


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstHalfConfig:
    """No options."""


class FirstHalfPass(RowsPass):
    """A block's first pass keeps all rows, so that each has keys and values in all layers; the others keep
    what is decided and half of the masks, rounded up."""

    def __init__(self, view: PassView, memory: BlockMemory) -> None:
        super().__init__(view)
        self._memory, self._has_begun_B = memory, memory.is_current(view)

    def select_rows(self, layer: int, q_RNH: Tensor) -> RowSelection | None:
        if layer > 0:
            return None
        is_mask_BW = self.view.is_mask_BW
        is_first_BW = 2 * is_mask_BW.cumsum(1) <= is_mask_BW.sum(1, keepdim=True) + 1
        keep_BW = ~is_mask_BW | is_first_BW | ~self._has_begun_B[:, None]
        return RowSelection(keep_R=by_row(keep_BW, self.view.rows_BW, len(q_RNH), other=True))

    def finish(self) -> None:
        self._memory.claim(self.view, self.view.is_working_B & ~self.view.waits_B)


@ACCELERATORS.register("first_half")
class FirstHalf(RowsAccelerator):
    name: ClassVar[str] = "first_half"
    Config: ClassVar[type] = FirstHalfConfig
    is_static: ClassVar[bool] = True

    def allocate(self) -> None:
        self.memory = BlockMemory(self.spec.num_lanes, self.spec.device)

    def reset(self, lanes: list[int]) -> None:
        self.memory.reset(lanes)

    def begin(self, view: PassView) -> FirstHalfPass:
        return FirstHalfPass(view, self.memory)
