"""A trace that no model recorded: `trace=synthetic`, drawn with a fixed seed, for every block size.

A block is a line of tokens that become decodable from left to right, a few at a time: before each pass one
mask becomes decodable, one more with probability `MORE`, and so on; with probability `AHEAD` it is not the
leftmost one but one a few places to the right. A pass decides all that are decodable. So blocks of 32 take
15.0 +- 0.5 rows for each token without eviction, and 3.25 +- 0.1 with it, unfrozen commits included (ShareGPT
in table 5 of FOCUS: 15.02 and 3.12). A decodable mask's delta is `SIGNAL` higher than that of others; the
leftmost mask's is `LEAD` higher, the next one's `FALL` times that, and so on, as those next in line gain too
(noise: normal, 1). In the FOCUS arm the rules are applied pass by pass, and what they leave out is not
decided: it stays decodable, and is decided later.
"""

from __future__ import annotations

import random

import torch

from benchmarks.engine.unmasking.rows import BlockRules, RowRules
from benchmarks.engine.unmasking.trace import FOCUS, FULL, BlockTrace, UnmaskTrace, with_blocks

SYNTHETIC = "synthetic"
SEED, NUM_BLOCKS = 17, 192
MORE, AHEAD, REACH = 0.555, 0.04, 3
SIGNAL, LEAD, FALL = 10.0, 20.0, 0.75
ALPHA, THRESHOLD = 1.5, 0.9


def synthetic_trace(block_size: int, *, num_blocks: int = NUM_BLOCKS) -> UnmaskTrace:
    """The drawn trace for blocks of `block_size`, the same in every process."""
    return UnmaskTrace(
        name=SYNTHETIC,
        block_size=block_size,
        threshold=THRESHOLD,
        alpha=ALPHA,
        source=f"drawn, seed {SEED} (benchmarks/engine/unmasking/synthetic.py)",
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
    """All blocks of an arm, pass by pass."""
    rules = RowRules(alpha=ALPHA) if evicts else RowRules(evicts=False, stability="off")
    state, blocks = BlockRules([0] * num_blocks, size, rules), [_Block(n, size) for n in range(num_blocks)]
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
    return with_blocks((block.decided, block.deltas) for block in blocks)
