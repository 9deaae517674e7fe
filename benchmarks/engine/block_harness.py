"""An engine that decodes by block diffusion in steady state, every sequence at a step of its own block, and a
replayed trace of how many positions each pass decides.

Random weights decide one position a pass, or all at once. So which positions are decided is left to the real
strategy (the most confident first), and how many is read from a trace by lane, block and pass: every arm sees
the same one, however its passes are laid out. Everything else runs as it is. Reading the trace costs two
small launches per pass, which count against us.
Shapes: Z lanes, P slots of a lane, B sequences, S passes of the trace.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.decoding.harness import Arm, Load, Measured, Seats
from benchmarks.engine.decoding.replay import STEP_BETWEEN_LANES
from benchmarks.engine.decoding.trace import Trace
from idlm.infer.decoders.block import BlockDecoder
from idlm.infer.models.loader import LoadedModel
from idlm.infer.state.batch import StepPlan, lane_of
from idlm.infer.state.sequence_state import SequenceState

WARM_UP_PASSES = 8
ALL_THE_SAME = 1.0
"""No confidence is above this threshold, so that the quota alone says how many are decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockArm(Arm):
    """Full blocks of `stride` positions. `fused`: a clean block is stored by the pass that begins another."""

    decoder: str = "block"
    strategy: str = "low_confidence_dynamic"
    stride: int = 32
    fused: bool = True

    def decoder_options(self) -> dict[str, Any]:
        """Any threshold would do: nothing is decided by it, but it is looked at."""
        return {"strategy": self.strategy, "threshold": ALL_THE_SAME, "fused_commit": self.fused}


@dataclass(slots=True, kw_only=True)
class BlockMeasured(Measured):
    """`rows`: numbers of rows that passes were laid out with, padding included."""

    rows: set[int] = field(default_factory=set)

    def rows_per_pass(self) -> float:
        """That are no padding: blocks in work, and clean blocks that are stored, as many as are emitted."""
        active = self.load.concurrency * self.width
        return active + sum(self.tokens) / sum(self.passes)


class UnmaskReplay:
    """A trace, laid out for every lane and slot on a device, and where the decoder asks for it."""

    def __init__(self, trace: Trace, decoder: BlockDecoder, table: SequenceState) -> None:
        self._decided = [1 + count for count in trace.accepted]
        num_lanes, length = len(table.num_known_Z), table.max_length + 2 * decoder.shape.size
        decided_S = torch.tensor(self._decided)
        lane_Z1, place_P = torch.arange(num_lanes)[:, None], torch.arange(length)
        self._decided_ZP = decided_S[self._place(lane_Z1, place_P)].to(table.device)
        self.rows: set[int] = set()
        decoder._quota = self.quota  # type: ignore[method-assign]

    def quota(self, plan: StepPlan) -> Tensor:
        """How many positions of each sequence this pass decides, as far as there are."""
        assert plan.active is not None
        self.rows.add(len(plan.token_ids_R))
        return self._decided_ZP[plan.lanes_B, plan.active.starts_B + plan.active.num_passes_B]

    def _place(self, lane: Any, place: Any) -> Any:
        """Where the trace says it, of tensors and of plain integers; `place`: the block's first slot and one
        more for each pass.
        """
        return (STEP_BETWEEN_LANES * lane + place) % len(self._decided)

    def passes_of(self, lane: int, start: int, num_open: int) -> int:
        """Denoising passes that the trace takes for a block with so many masks."""
        num_passes = 0
        while num_open > 0:
            num_open -= self._decided[self._place(lane, start + num_passes)]
            num_passes += 1
        return num_passes


class BlockSeats(Seats):
    """`load.num_tokens` of each sequence is room, not a goal: rounds are so many passes."""

    def __init__(self, model: LoadedModel, arm: BlockArm, load: Load, trace: Trace, num_passes: int) -> None:
        self._num_passes = num_passes
        super().__init__(model, arm, load, None)
        decoder = self.engine.decoder
        assert isinstance(decoder, BlockDecoder)
        self.unmasking = UnmaskReplay(trace, decoder, self.engine.table)

    def _lengths(self) -> list[int]:
        """The context, and fixed tokens of the first block: a different number of each, so that blocks end in
        different passes from the start.
        """
        size, num = self.arm.stride, self.load.concurrency
        assert self.load.context % size == 0, f"{self.load.context=} is no multiple of the block {size}"
        return [self.load.context + number * size // num for number in range(num)]

    def settle(self) -> None:
        """Seats are taken and the first passes over."""
        self.sit()
        self.run_passes(WARM_UP_PASSES)
        self.drain()

    def measure(self, into: Measured) -> None:
        """One round: seats taken, warmed up, then timed from and to an empty queue of passes."""
        assert isinstance(into, BlockMeasured)
        with self._toggles():
            self.settle()
            before = self.num_passes()
            begun = time.perf_counter()
            num_tokens = self.run_passes(self._num_passes) + self.drain()
            seconds = time.perf_counter() - begun
            into.seconds.append(seconds)
            into.tokens.append(num_tokens)
            into.passes.append(self.num_passes() - before)
            into.rows |= self.unmasking.rows
            self.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What whole answers took: passes of all sequences, as many as the trace says, tokens, seconds."""

    num_passes: int
    num_expected: int
    num_tokens: int
    seconds: float

    @property
    def tokens_per_forward(self) -> float:
        """Of a sequence."""
        return self.num_tokens / self.num_passes

    @property
    def expected_tokens_per_forward(self) -> float:
        """By the trace."""
        return self.num_tokens / self.num_expected


def whole_answers(model: LoadedModel, arm: BlockArm, load: Load, trace: Trace) -> Answers:
    """Decode `load.num_tokens` of every sequence, behind a round that captures the graphs."""
    seats = BlockSeats(model, arm, load, trace, num_passes=0)
    with seats._toggles():
        _answers(seats, load.num_tokens)
        return _answers(seats, load.num_tokens)


def _answers(seats: BlockSeats, max_tokens: int) -> Answers:
    seats.sit(max_tokens=max_tokens)
    expected, passes, tokens = 0, 0, 0
    begun = time.perf_counter()
    while seats.engine.has_work:
        events = seats.engine.step()
        if not expected:
            expected = sum(
                _expected(seats, lane_of(request), len(request.prompt_ids), max_tokens)
                for request in seats.engine.scheduler.running
            )
        for event in events:
            if event.completion is not None:
                passes += event.completion.num_forwards
                tokens += len(event.completion.token_ids)
    seconds = time.perf_counter() - begun
    return Answers(num_passes=passes, num_expected=expected, num_tokens=tokens, seconds=seconds)


def _expected(seats: BlockSeats, lane: int, num_known: int, num_left: int) -> int:
    """Passes of an answer of `num_left` tokens on a lane, by the trace; without fused commits one more for
    every block but the last, which nobody stores.
    """
    arm, num_passes = seats.arm, 0
    assert isinstance(arm, BlockArm)
    while num_left > 0:
        num_fixed = num_known % arm.stride
        num_open = arm.stride - num_fixed
        num_passes += seats.unmasking.passes_of(lane, num_known - num_fixed, num_open)
        num_known, num_left = num_known + num_open, num_left - num_open
        num_passes += num_left > 0 and not arm.fused
    return num_passes
