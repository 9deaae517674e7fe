"""The rows that a trace implies: those fed, those behind layer 1 and those of the head, in every pass.

They follow from the rules of FOCUS, applied to the trace's deltas by the op that the engine's CPU path runs
(`kernels/block_eviction/plain.py`), all blocks at once.
L blocks (lanes of the rules), W places of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.engine.unmasking.trace import FOCUS, BlockTrace, UnmaskTrace
from idlm.kernels.block_eviction import Candidates
from idlm.kernels.block_eviction.plain import select_places


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """What an arm computes. `evicts`: rows are dropped behind layer 1; `stability`: when a decoded token is
    frozen ("off": never, "plain": once it has been computed again, "neighbour": and its right neighbour is
    decided); `commit`: a clean block's rows are all stored anew ("clean"), or those not frozen ("unfrozen").
    """

    evicts: bool = True
    stability: str = "neighbour"
    commit: str = "clean"
    alpha: float = 1.5


FULL_BLOCK = RowRules(evicts=False, stability="off")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Means over the passes of a trace, for one sequence: rows `fed` to layer 0, `kept` behind layer 1, of
    the `head` (masks that are kept), tokens decided; and `committed`: rows of clean blocks, which all layers
    compute. `passes`: of a block.
    """

    fed: float
    kept: float
    head: float
    tokens: float
    committed: float
    passes: float

    @property
    def prefix_per_token(self) -> float:
        """Rows of layers 0 and 1 for each token."""
        return (self.fed + self.committed) / self.tokens

    @property
    def suffix_per_token(self) -> float:
        """Rows behind layer 1 for each token."""
        return (self.kept + self.committed) / self.tokens


class BlockRules:
    """The state of blocks that are decided side by side, and the rules of FOCUS. `num_fixed`: how many first
    places of each hold tokens of a prompt.
    """

    def __init__(self, num_fixed: Sequence[int], size: int, rules: RowRules) -> None:
        self.rules = rules
        self.is_mask_LW = torch.arange(size) >= torch.tensor(num_fixed)[:, None]
        self.num_masks_L = self.is_mask_LW.sum(dim=1)
        self.frozen_LW, self.processed_LW = torch.zeros(2, len(num_fixed), size, dtype=torch.bool)
        self.num_passes = 0

    def keep(self, deltas_LW: Tensor) -> Tensor:
        """The places that go on in the next pass, bool [L, W]; those without a mask left keep all."""
        fed_LW = ~self.frozen_LW
        if not self.rules.evicts:
            return fed_LW
        decoded_L = self.num_masks_L - self.is_mask_LW.sum(dim=1)
        candidates = Candidates(
            is_mine_B=self.is_mask_LW.any(dim=1),
            is_mask_BW=self.is_mask_LW,
            is_maskable_BW=self.is_mask_LW,
            rows_BW=torch.where(fed_LW, 0, -1),
            lanes_B=torch.arange(len(deltas_LW)),
            processed_ZW=self.processed_LW,
            mean_decoded_B=(decoded_L.double() / max(1, self.num_passes)).clamp(min=1.0),
        )
        nothing_LPW = torch.zeros_like(deltas_LW)[:, None]
        return select_places(nothing_LPW, deltas_LW[:, None], candidates, alpha=self.rules.alpha).kept_BW

    def finish(self, kept_LW: Tensor, decided_LW: Tensor) -> None:
        """End a pass."""
        is_decided_LW = ~self.is_mask_LW
        right_LW = F.pad(is_decided_LW[:, 1:], (0, 1), value=True)
        if self.rules.stability != "off":
            is_ready_LW = right_LW if self.rules.stability == "neighbour" else torch.ones_like(right_LW)
            self.frozen_LW |= is_decided_LW & is_ready_LW
        self.processed_LW |= kept_LW
        self.is_mask_LW = self.is_mask_LW & ~decided_LW
        self.num_passes += 1


def rows_of(blocks: Sequence[BlockTrace], size: int, rules: RowRules) -> RowCounts:
    """Mean rows of a pass. The decided places must be among those kept: else the trace is not of such an
    arm.
    """
    sums, is_lost_L = _apply(blocks, size, rules)
    lost = is_lost_L.nonzero().flatten().tolist()
    assert not lost, f"blocks {lost[:4]} decide rows that are not kept"
    total = sum(len(block.decided) for block in blocks)
    return RowCounts(**{name: value / total for name, value in sums.items()}, passes=total / len(blocks))


def consistent(blocks: Sequence[BlockTrace], size: int, rules: RowRules) -> tuple[BlockTrace, ...]:
    """The blocks whose decided places the rules keep: rounded deltas, or sums of another device, may
    leave one out at a near tie.
    """
    _, is_lost_L = _apply(blocks, size, rules)
    return tuple(block for block, is_lost in zip(blocks, is_lost_L.tolist(), strict=True) if not is_lost)


def _apply(blocks: Sequence[BlockTrace], size: int, rules: RowRules) -> tuple[dict[str, int], Tensor]:
    """Sums of rows over all passes, and which blocks (bool) decide a place that is not kept."""
    state = BlockRules([block.num_fixed for block in blocks], size, rules)
    sums = dict.fromkeys(("fed", "kept", "head", "tokens", "committed"), 0)
    is_lost_L = torch.zeros(len(blocks), dtype=torch.bool)
    num_passes = [len(block.decided) for block in blocks]
    for number in range(max(num_passes)):
        is_on_L1 = torch.tensor([number < num for num in num_passes])[:, None]
        kept_LW = state.keep(deltas_of(blocks, size, number)) & is_on_L1
        decided_LW = _places(blocks, size, number)
        is_lost_L |= (decided_LW & ~kept_LW).any(dim=1)
        sums["fed"] += int((~state.frozen_LW & is_on_L1).sum())
        sums["kept"] += int(kept_LW.sum())
        sums["head"] += int((kept_LW & state.is_mask_LW).sum())
        sums["tokens"] += int(decided_LW.sum())
        before_LW = state.frozen_LW.clone()
        state.finish(kept_LW, decided_LW)
        state.frozen_LW = torch.where(is_on_L1, state.frozen_LW, before_LW)
    is_stored_LW = ~state.frozen_LW if rules.commit == "unfrozen" else torch.ones_like(state.frozen_LW)
    sums["committed"] = int(is_stored_LW.sum())
    return sums, is_lost_L


def trace_rows(trace: UnmaskTrace, arm: str, *, commit: str = "clean", **rules: object) -> RowCounts:
    """Mean rows of a pass of an arm, over its whole blocks."""
    chosen = RowRules(alpha=trace.alpha, commit=commit, **rules) if arm == FOCUS else FULL_BLOCK  # type: ignore[arg-type]
    return rows_of(trace.whole(arm), trace.block_size, chosen)


def deltas_of(blocks: Sequence[BlockTrace], size: int, number: int) -> Tensor:
    """Deltas [L, W] of a pass, fp32; 0 where there is no mask, and in blocks that are clean."""
    deltas_LW = torch.zeros(len(blocks), size)
    for deltas_W, block in zip(deltas_LW, blocks, strict=True):
        if number < len(block.decided):
            deltas_W[block.masks(size)[number]] = torch.tensor(block.deltas[number])
    return deltas_LW


def _places(blocks: Sequence[BlockTrace], size: int, number: int) -> Tensor:
    """Places [L, W] that a pass decides, bool."""
    decided_LW = torch.zeros(len(blocks), size, dtype=torch.bool)
    for decided_W, block in zip(decided_LW, blocks, strict=True):
        if number < len(block.decided):
            decided_W[list(block.decided[number])] = True
    return decided_LW
