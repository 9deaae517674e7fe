"""What passes over blocks decide, drawn with a fixed seed, and the rows and the least time that follow.

No model recorded the trace. A block is a line of tokens that become decodable from left to right, a few at a
time: before each pass one mask becomes decodable, one more with probability `MORE`, and so on; with
probability `AHEAD` it is not the leftmost one but one a few places to the right. A pass decides all that are
decodable. So blocks of 32 take 15.0 +- 0.5 rows for each token without eviction, and 3.25 +- 0.1 with it,
unfrozen commits included (ShareGPT in table 5 of FOCUS: 15.02 and 3.12). A decodable mask's delta is `SIGNAL`
higher than that of others; the leftmost mask's is `LEAD` higher, the next one's `FALL` times that, and so on,
as those next in line gain too (noise: normal, 1). In the FOCUS arm the rules are applied pass by pass, and
what they leave out is not decided: it stays decodable, and is decided later.

Rows follow from the rules of FOCUS, applied to the deltas by the op that the engine's CPU path runs
(`kernels/block_eviction/plain.py`), all blocks at once. The least time of a pass: linears take their products
at the rate of a large product, or the stream of their weights, whichever is longer, in three parts with rows
of their own (layer 0 and the queries, keys and values of layer 1; the layers behind; the head); attention
takes its products or the stream of keys and values. L blocks (lanes of the rules), W places of a block.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.models import slot_bytes, weights_of
from benchmarks.stream import Rates
from idlm.infer.models.loader import LoadedModel
from idlm.kernels.block_eviction import Candidates
from idlm.kernels.block_eviction.plain import select_positions

FULL, FOCUS = "full", "focus"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrace:
    """One block. `decided[i]` are the places that pass i decided, ascending; `deltas[i]` one number for each
    of the masks that it began with.
    """

    decided: tuple[tuple[int, ...], ...]
    deltas: tuple[tuple[float, ...], ...]

    def masks(self, size: int) -> list[list[int]]:
        """The masks that each pass begins with."""
        left, found = list(range(size)), []
        for places in self.decided:
            found.append(left)
            left = [place for place in left if place not in places]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmaskTrace:
    """The blocks of both arms."""

    name: str
    block_size: int
    alpha: float
    blocks: dict[str, tuple[BlockTrace, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """What an arm computes. `evicts`: rows are dropped behind layer 1; `stability`: when a decoded token is
    frozen ("off": never, "neighbour": once it has been computed again and its right neighbour is decided);
    `commit`: a clean block's rows are all stored anew ("clean"), or those not frozen ("unfrozen").
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
    compute.
    """

    fed: float
    kept: float
    head: float
    tokens: float
    committed: float

    @property
    def prefix_per_token(self) -> float:
        """Rows of layers 0 and 1 for each token."""
        return (self.fed + self.committed) / self.tokens

    @property
    def suffix_per_token(self) -> float:
        return (self.kept + self.committed) / self.tokens


class BlockRules:
    """The state of blocks that are decided side by side, and the rules of FOCUS."""

    def __init__(self, num_blocks: int, size: int, rules: RowRules) -> None:
        self.rules = rules
        self.is_mask_LW = torch.ones(num_blocks, size, dtype=torch.bool)
        self.num_masks_L = self.is_mask_LW.sum(dim=1)
        self.frozen_LW, self.processed_LW = torch.zeros(2, num_blocks, size, dtype=torch.bool)
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
        return select_positions(nothing_LPW, deltas_LW[:, None], candidates, alpha=self.rules.alpha).kept_BW

    def finish(self, kept_LW: Tensor, decided_LW: Tensor) -> None:
        is_decided_LW = ~self.is_mask_LW
        right_LW = F.pad(is_decided_LW[:, 1:], (0, 1), value=True)
        if self.rules.stability != "off":
            self.frozen_LW |= is_decided_LW & right_LW
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
    return RowCounts(**{name: value / total for name, value in sums.items()})


def _apply(blocks: Sequence[BlockTrace], size: int, rules: RowRules) -> tuple[dict[str, int], Tensor]:
    """Sums of rows over all passes, and which blocks (bool) decide a place that is not kept."""
    state = BlockRules(len(blocks), size, rules)
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


SEED, NUM_BLOCKS = 17, 192
MORE, AHEAD, REACH = 0.555, 0.04, 3
SIGNAL, LEAD, FALL = 10.0, 20.0, 0.75
ALPHA = 1.5


def synthetic_trace(block_size: int, *, num_blocks: int = NUM_BLOCKS) -> UnmaskTrace:
    """The drawn trace for blocks of `block_size`, the same in every process."""
    return UnmaskTrace(
        name="synthetic",
        block_size=block_size,
        alpha=ALPHA,
        blocks={arm: _blocks(block_size, num_blocks, evicts=arm == FOCUS) for arm in (FULL, FOCUS)},
    )


class _Block:
    """What is decodable in a block, by its own stream: both arms draw the same numbers in the same order."""

    def __init__(self, number: int, size: int) -> None:
        self._dice = random.Random(1_000_003 * SEED + number)
        self.masks = set(range(size))
        self.decodable: set[int] = set()
        self.decided: list[list[int]] = []
        self.deltas: list[list[float]] = []

    def begin(self) -> dict[int, float]:
        """Begin a pass: some masks become decodable; returns the delta of each mask."""
        dice, count = self._dice, 1
        while dice.random() < MORE:
            count += 1
        for _ in range(count):
            left = sorted(self.masks - self.decodable)
            place = dice.randrange(1, REACH + 1) if dice.random() < AHEAD else 0
            if left:
                self.decodable.add(left[min(place, len(left) - 1)])
        deltas = {}
        for rank, mask in enumerate(sorted(self.masks)):
            noise = dice.gauss(0.0, 1.0)
            deltas[mask] = SIGNAL * (mask in self.decodable) + LEAD * FALL**rank + noise
        return deltas

    def end(self, deltas: dict[int, float], kept: set[int]) -> list[int]:
        """End a pass that computed only `kept`; returns the places that it decided: at least one."""
        decided = sorted(self.decodable & kept) or [max(self.masks & kept, key=lambda mask: deltas[mask])]
        self.decided.append(decided)
        self.deltas.append([deltas[mask] for mask in sorted(self.masks)])
        self.masks -= set(decided)
        self.decodable -= set(decided)
        return decided


def _blocks(size: int, num_blocks: int, *, evicts: bool) -> tuple[BlockTrace, ...]:
    rules = RowRules(alpha=ALPHA) if evicts else FULL_BLOCK
    state, blocks = BlockRules(num_blocks, size, rules), [_Block(n, size) for n in range(num_blocks)]
    while any(block.masks for block in blocks):
        deltas = [block.begin() if block.masks else {} for block in blocks]
        deltas_LW, decided_LW = torch.zeros(num_blocks, size), torch.zeros(num_blocks, size, dtype=torch.bool)
        for deltas_W, each in zip(deltas_LW, deltas, strict=True):
            deltas_W[sorted(each)] = torch.tensor([each[mask] for mask in sorted(each)])
        kept_LW = state.keep(deltas_LW)
        for block, each, kept_W, decided_W in zip(blocks, deltas, kept_LW, decided_LW, strict=True):
            if block.masks:
                decided_W[block.end(each, set(kept_W.nonzero().flatten().tolist()))] = True
        state.finish(kept_LW, decided_LW)
    return tuple(
        BlockTrace(decided=tuple(map(tuple, block.decided)), deltas=tuple(map(tuple, block.deltas)))
        for block in blocks
    )


MATRICES = 4
"""Matrices of a layer in `weights_of`: the first is that of queries, keys and values."""


def limit_ms(model: LoadedModel, rows: RowCounts, *, batch: int, slots: float, rates: Rates) -> float:
    """Time of a mean pass of `batch` sequences that see `slots` slots each."""
    spec, item, stream, product = model.local, model.dtype.itemsize, rates.stream, rates.product
    *weights, head = [weight.numel() for weight in weights_of(model)]
    prefix = sum(weights[: MATRICES + 1])
    fed, kept = rows.fed + rows.committed, rows.kept + rows.committed
    parts = ((prefix, fed), (sum(weights) - prefix, kept), (head, rows.head))
    seconds = sum(max(2 * num * batch * each / product, num * item / stream) for num, each in parts)
    attended = fed + (spec.num_layers - 1) * kept
    flops = 4 * spec.num_heads * spec.head_dim * batch * attended * slots
    return 1e3 * (seconds + max(flops / product, batch * slots * slot_bytes(model) / stream))


def linear_flops(model: LoadedModel, rows: RowCounts, *, batch: int) -> float:
    """FLOPs of all linears of a mean pass without eviction."""
    *weights, head = [weight.numel() for weight in weights_of(model)]
    return 2.0 * batch * (sum(weights) * (rows.kept + rows.committed) + head * rows.head)
