"""What passes over blocks decide, drawn with a fixed seed, and the rows and the least time that follow.

No model recorded the trace. A block is a line of tokens that become decodable from left to right, a few at a
time: before each pass one mask becomes decodable, one more with probability `MORE`, and so on; with
probability `JUMP` it is not the leftmost one but one a few positions to the right. A pass decides all that
are decodable. So blocks of 32 take 15.0 +- 0.5 rows for each token without eviction, and 3.25 +- 0.1 with it,
unfrozen commits included (ShareGPT in table 5 of FOCUS: 15.02 and 3.12). A decodable mask's delta is `SIGNAL`
higher than that of others; the leftmost mask's is `LEAD` higher, the next one's `FALL` times that, and so on,
as those next in line gain too (noise: normal, 1). In the FOCUS arm the rules are applied pass by pass, and
what they leave out is not decided: it stays decodable, and is decided later.

Rows follow from the rules of FOCUS, applied to the deltas by tests/focus_reference.py. The least time of a
pass: linears take their products at the rate of a large product, or the stream of their weights, whichever is
longer, in three parts with rows of their own (layer 0 and the queries, keys and values of layer 1; the layers
after it; the head); attention takes its products or the stream of keys and values."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.models import slot_bytes, weights_of
from benchmarks.stream import Rates
from idlm.infer.models.loader import LoadedModel
from tests.focus_reference import BlockState, FocusRules, Selection, fed_positions, note, select_by

FULL, FOCUS = "full", "focus"
SEED, NUM_BLOCKS = 17, 192
MORE, JUMP, REACH = 0.555, 0.04, 3
SIGNAL, LEAD, FALL = 10.0, 20.0, 0.75
ALPHA = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrace:
    """One block. `decided[i]` are the positions that pass i decided, ascending; `deltas[i]` one number for
    each of the masks that it began with."""

    decided: tuple[tuple[int, ...], ...]
    deltas: tuple[tuple[float, ...], ...]

    def masks(self, size: int) -> list[list[int]]:
        left, found = list(range(size)), []
        for indices in self.decided:
            found.append(left)
            left = [index for index in left if index not in indices]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmaskTrace:
    """The blocks of both arms."""

    name: str
    block_size: int
    alpha: float
    blocks: dict[str, tuple[BlockTrace, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Means over the passes of a trace, for one sequence: rows `fed` to layer 0, `retained` after layer 1, of
    the `head` (masks that are retained), tokens decided; and `committed`: rows of clean blocks, which all
    layers compute."""

    fed: float
    retained: float
    head: float
    tokens: float
    committed: float

    @property
    def prefix_per_token(self) -> float:
        return (self.fed + self.committed) / self.tokens

    @property
    def suffix_per_token(self) -> float:
        return (self.retained + self.committed) / self.tokens


def rules_of(size: int, *, evicts: bool, **more: Any) -> FocusRules:
    """The rules of FOCUS, or of full blocks, in which nothing is frozen."""
    return FocusRules(size=size, margin=0.0, **more | ({} if evicts else {"stability": "off"}))


def rows_of(blocks: Sequence[BlockTrace], rules: FocusRules, *, evicts: bool) -> RowCounts:
    """Mean rows of a pass. The decided positions must be among those retained: else the trace is not of such
    an arm."""
    sums = Counter[str]()
    for block in blocks:
        state = BlockState()
        for masks, decided, values in zip(block.masks(rules.size), block.decided, block.deltas, strict=True):
            selection = _select(state, masks, dict(zip(masks, values, strict=True)), rules, evicts=evicts)
            left, masked = set(selection.retained), set(masks)
            assert set(decided) <= left, f"{decided=}: it decides rows that are not retained"
            sums.update(fed=len(fed_positions(state, rules)), retained=len(left), head=len(left & masked))
            sums.update(tokens=len(decided), passes=1)
            note(state, masks, selection, len(decided), rules)
        sums["committed"] += rules.size - (len(state.frozen) if rules.commit == "unfrozen" else 0)
    num_passes = sums.pop("passes")
    return RowCounts(**{name: value / num_passes for name, value in sums.items()})


def _select(
    state: BlockState, masks: list[int], deltas: dict[int, float], rules: FocusRules, *, evicts: bool
) -> Selection:
    if evicts:
        return select_by(state, masks, masks, deltas, rules)
    everything = tuple(range(rules.size))
    return Selection(retained=everything, budget=rules.size, limit=rules.size)


def synthetic_trace(block_size: int, *, num_blocks: int = NUM_BLOCKS) -> UnmaskTrace:
    """The drawn trace for blocks of `block_size`, the same in every process."""
    blocks = {
        arm: tuple(_drawn(number, block_size, evicts=arm == FOCUS) for number in range(num_blocks))
        for arm in (FULL, FOCUS)
    }
    return UnmaskTrace(name="synthetic", block_size=block_size, alpha=ALPHA, blocks=blocks)


def _drawn(number: int, size: int, *, evicts: bool) -> BlockTrace:
    """One block, by its own stream: both arms draw the same numbers in the same order."""
    rng, rules, state = random.Random(1_000_003 * SEED + number), rules_of(size, evicts=evicts), BlockState()
    masks, decodable = list(range(size)), set[int]()
    all_decided, all_deltas = [], []
    while masks:
        count = 1
        while rng.random() < MORE:
            count += 1
        for _ in range(count):
            left = [mask for mask in masks if mask not in decodable]
            index = rng.randrange(1, REACH + 1) if rng.random() < JUMP else 0
            if left:
                decodable.add(left[min(index, len(left) - 1)])
        deltas = {}
        for rank, mask in enumerate(masks):
            noise = rng.gauss(0.0, 1.0)
            deltas[mask] = SIGNAL * (mask in decodable) + LEAD * FALL**rank + noise
        selection = _select(state, masks, deltas, rules, evicts=evicts)
        # A pass decides all that are decodable and retained, but one at least.
        chosen = set(selection.retained)
        decided = sorted(decodable & chosen) or [max(chosen.intersection(masks), key=deltas.__getitem__)]
        all_decided.append(tuple(decided))
        all_deltas.append(tuple(deltas.values()))
        note(state, masks, selection, len(decided), rules)
        masks = [mask for mask in masks if mask not in decided]
        decodable -= set(decided)
    return BlockTrace(decided=tuple(all_decided), deltas=tuple(all_deltas))


MATRICES = 4
"""Matrices of a layer in `weights_of`: the first is that of queries, keys and values."""


def limit_ms(model: LoadedModel, rows: RowCounts, *, batch: int, slots: float, rates: Rates) -> float:
    """Time of a mean pass of `batch` sequences that see `slots` slots each."""
    spec, item, stream, product = model.local, model.dtype.itemsize, rates.stream, rates.product
    *weights, head = [weight.numel() for weight in weights_of(model)]
    prefix = sum(weights[: MATRICES + 1])
    fed, retained = rows.fed + rows.committed, rows.retained + rows.committed
    parts = ((prefix, fed), (sum(weights) - prefix, retained), (head, rows.head))
    seconds = sum(max(2 * num * batch * each / product, num * item / stream) for num, each in parts)
    attended = fed + (spec.num_layers - 1) * retained
    flops = 4 * spec.num_heads * spec.head_dim * batch * attended * slots
    return 1e3 * (seconds + max(flops / product, batch * slots * slot_bytes(model) / stream))


def linear_flops(model: LoadedModel, rows: RowCounts, *, batch: int) -> float:
    *weights, head = [weight.numel() for weight in weights_of(model)]
    return 2.0 * batch * (sum(weights) * (rows.retained + rows.committed) + head * rows.head)
