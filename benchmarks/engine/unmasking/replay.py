"""Replays a trace of unmasking in the engine's own passes, on the device, without a wait of the host.

Random weights neither mark a mask as decodable nor decide what a model would. So the trace's deltas replace
what FOCUS measured, after both importance kernels have run, and its places replace the confidence of what was
drawn, after the head and the sampling kernels; budget, selection, compaction and the strategy then run on
them. The launches that replace (about a dozen a pass) count against us. Lanes begin at different blocks of
the trace. In a block that begins with a part of a prompt the trace's places may be fixed or left out: a pass
then decides the leftmost mask it may. L blocks of the trace, P passes, W places, Z lanes, B sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.decoding.replay import STEP_BETWEEN_LANES
from benchmarks.engine.unmasking.rows import deltas_of
from benchmarks.engine.unmasking.trace import BlockTrace
from idlm.infer.accelerators.focus import FocusPass
from idlm.infer.decoders.block import BlockDecoder

THRESHOLD = 0.5
"""Of the decoder: between the confidences 0 and 1 that a replay gives."""


class UnmaskingReplay:
    """The blocks of one arm of a trace on a device."""

    def __init__(self, blocks: tuple[BlockTrace, ...], size: int, device: torch.device) -> None:
        # One more pass, in which nothing is decided: blocks that began with a prompt's tail take longer.
        self._num_passes = 1 + max(len(block.decided) for block in blocks)
        self._size, self._num_blocks = size, len(blocks)
        deltas_LPW = torch.stack([deltas_of(blocks, size, n) for n in range(self._num_passes)], dim=1)
        decided_LPW = torch.zeros(deltas_LPW.shape, dtype=torch.float64)
        for block, decided_PW in zip(blocks, decided_LPW, strict=True):
            for places, decided_W in zip(block.decided, decided_PW, strict=False):
                decided_W[list(places)] = 1.0
        self.num_passes_L = [len(block.decided) for block in blocks]
        self.decided_LPW = decided_LPW
        self._deltas_XW = deltas_LPW.flatten(0, 1).to(device)
        self._decided_XW = decided_LPW.flatten(0, 1).to(device)

    def block(self, lane: Any, start: Any) -> Any:
        """The trace's block for the block of a lane that begins at a position; of tensors or integers."""
        return (STEP_BETWEEN_LANES * lane + start // self._size) % self._num_blocks

    def passes_between(self, lane: int, before: tuple[int, int], after: tuple[int, int]) -> int:
        """Passes of a lane from one (start of its block, passes done) to a later one."""
        (start, done), (last, done_last) = before, after
        whole = sum(self.num_passes_L[self.block(lane, at)] for at in range(start, last, self._size))
        return whole - done + done_last

    def decided_before(self, lane: int, start: int, num_passes: int) -> list[bool]:
        """The places that the first passes of a block have decided."""
        done_PW = self.decided_LPW[self.block(lane, start), :num_passes]
        return [bool(flag) for flag in done_PW.sum(dim=0) > 0]

    def select(self, original: Any, focus: FocusPass, first_BPW: Tensor, second_BPW: Tensor) -> Any:
        """`FocusPass._select` by the trace's deltas."""
        view = focus.view
        place_B = self._place(view.plan.lanes_B, view.active)
        first_BPW.zero_()
        second_BPW.zero_()[:, 0] = self._deltas_XW[place_B].to(second_BPW.dtype)
        return original(focus, first_BPW, second_BPW)

    def propose(
        self, original: Any, decoder: BlockDecoder, table: Any, batch: Any, plan: Any, *more: Any
    ) -> Any:
        """`BlockDecoder._propose` with the trace's places as those that pass the threshold."""
        proposed, *others = original(decoder, table, batch, plan, *more)
        confidence_BW = self._decided_XW[self._place(plan.lanes_B, plan.active)]
        return (replace(proposed, confidence_BW=confidence_BW.to(proposed.confidence_BW.dtype)), *others)

    def _place(self, lanes_B: Tensor, active: Any) -> Tensor:
        """Index of each sequence's pass among all passes of the trace."""
        passes_B = active.num_passes_B.clamp(max=self._num_passes - 1)
        return self.block(lanes_B, active.starts_B) * self._num_passes + passes_B


@contextlib.contextmanager
def replaying_blocks(replay: UnmaskingReplay) -> Iterator[None]:
    """Replay in all engines of this process."""
    select, propose = FocusPass._select, BlockDecoder._propose

    def selecting(self: FocusPass, *given: Tensor) -> Any:
        return replay.select(select, self, *given)

    def proposing(self: BlockDecoder, *given: Any) -> Any:
        return replay.propose(propose, self, *given)

    FocusPass._select = selecting  # type: ignore[method-assign, assignment]
    BlockDecoder._propose = proposing  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FocusPass._select, BlockDecoder._propose = select, propose  # type: ignore[method-assign]
