"""An engine that decodes by block diffusion in steady state, and a trace of the positions a pass decides.

Every sequence is at its own step of its block. Random weights decide one position a pass, or all at once, so
the real strategy chooses which positions are decided (the most confident first), and a trace by lane, block
and pass sets how many. Every arm sees the same trace, however its passes are laid out. Everything else runs
unchanged. Reading the trace costs two small launches per pass, which count against us.
Shapes: Z lanes, P slots of a lane, B sequences, S passes of the trace."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.decoding.harness import Arm, Load, Measured, SteadyEngine
from benchmarks.engine.decoding.replay import STEP_BETWEEN_LANES, Trace
from benchmarks.models import slot_bytes, weights_of
from idlm.devices import free_cached_memory
from idlm.infer.decoders.block import BlockDecoder
from idlm.infer.models.loader import LoadedModel
from idlm.infer.state.batch import StepPlan, lane_of
from idlm.infer.state.sequence_state import SequenceState

WARM_UP_PASSES = 8
NEVER_PASSED = 1.0
"""No confidence exceeds this threshold, so the quota alone sets how many positions are decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockArm(Arm):
    """Full blocks of `stride` positions. `fused`: the pass that begins a block stores the previous one."""

    decoder: str = "block"
    strategy: str = "low_confidence_dynamic"
    stride: int = 32
    fused: bool = True

    def decoder_options(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "threshold": NEVER_PASSED, "fused_commit": self.fused}


@dataclass(slots=True, kw_only=True)
class BlockMeasured(Measured):
    """`rows`: the numbers of rows that passes had, with padding."""

    rows: set[int] = field(default_factory=set)

    def rows_per_pass(self) -> float:
        """Mean number of rows without padding: active blocks, and the clean blocks that are stored."""
        active = self.load.concurrency * self.width
        return active + sum(self.tokens) / sum(self.passes)


class UnmaskReplay:
    """A trace, expanded for every lane and slot on the device, that replaces the decoder's quota."""

    def __init__(self, trace: Trace, decoder: BlockDecoder, table: SequenceState) -> None:
        self._decided = [1 + count for count in trace.accepted]
        num_lanes, length = len(table.num_known_Z), table.max_length + 2 * decoder.shape.size
        decided_S = torch.tensor(self._decided)
        lane_Z1, index_P = torch.arange(num_lanes)[:, None], torch.arange(length)
        self._decided_ZP = decided_S[self._index(lane_Z1, index_P)].to(table.device)
        self.rows: set[int] = set()
        decoder._quota = self.quota  # type: ignore[method-assign]

    def quota(self, plan: StepPlan) -> Tensor:
        """How many positions of each sequence this pass decides at most, [B]."""
        assert plan.active is not None
        self.rows.add(len(plan.token_ids_R))
        return self._decided_ZP[plan.lanes_B, plan.active.starts_B + plan.active.num_passes_B]

    def _index(self, lane: Any, index: Any) -> Any:
        """Index into the trace, of tensors or integers; `index`: the block's first slot plus the pass."""
        return (STEP_BETWEEN_LANES * lane + index) % len(self._decided)

    def passes_of(self, lane: int, start: int, num_open: int) -> int:
        """Number of denoising passes that the trace needs for a block with `num_open` masks."""
        num_passes = 0
        while num_open > 0:
            num_open -= self._decided[self._index(lane, start + num_passes)]
            num_passes += 1
        return num_passes


class SteadyBlocks(SteadyEngine):
    """A steady engine whose rounds have `num_passes` passes; `load.num_tokens` is only room for tokens."""

    def __init__(self, model: LoadedModel, arm: BlockArm, load: Load, trace: Trace, num_passes: int) -> None:
        self._num_passes = num_passes
        super().__init__(model, arm, load)
        decoder = self.engine.decoder
        assert isinstance(decoder, BlockDecoder)
        self.unmasking = UnmaskReplay(trace, decoder, self.engine.table)

    def _lengths(self) -> list[int]:
        """Lengths of the prompts: the context, and a different number of tokens of the first block for each
        sequence, so that blocks end in different passes from the start."""
        size, num = self.arm.stride, self.load.concurrency
        assert self.load.context % size == 0, f"{self.load.context=} is no multiple of the block {size}"
        return [self.load.context + number * size // num for number in range(num)]

    def start_and_warm_up(self) -> None:
        self.start_requests()
        self.run_passes(WARM_UP_PASSES)
        self.drain()

    def measure(self, into: Measured) -> None:
        """Run one round: start all requests, warm up, then time between two empty queues of passes."""
        assert isinstance(into, BlockMeasured)
        with self.toggled():
            self.start_and_warm_up()
            into.add(*self.timed(lambda: self.run_passes(self._num_passes)))
            into.rows |= self.unmasking.rows
            self.abort_all()

    def free(self) -> None:
        self.engine._worker.free_cached_memory()
        del self.engine
        free_cached_memory()


def logits_of_pass(steady: SteadyBlocks, number: int) -> Tensor:
    """Logits of the pass of this number (from 1) over the first blocks, fp32, on keys that all arms have."""
    runner: Any = steady.engine._parts.runner
    # Random draws could differ in a last bit and then in everything that follows: the keys must not.
    rng = torch.Generator(device=steady.engine.table.device).manual_seed(0)
    for cached in (runner._cache.keys, runner._cache.values):
        cached.normal_(generator=rng)
    seen: list[Tensor] = []
    forward = runner.forward

    def watched(plan: Any) -> Any:
        wanted = forward(plan)
        seen.append(wanted.logits().float())
        return wanted

    runner.forward = watched
    with steady.toggled():
        steady.start_requests()
        steady.run_passes(number)
        steady.abort_all()
    return seen[number - 1]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of what is expected."""
    assert found.shape == expected.shape, f"{found.shape=} {expected.shape=}"
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Cost of whole answers: passes of all sequences, the passes that the trace expects, tokens, seconds."""

    num_passes: int
    num_expected: int
    num_tokens: int
    seconds: float

    @property
    def tokens_per_forward(self) -> float:
        return self.num_tokens / self.num_passes

    @property
    def expected_tokens_per_forward(self) -> float:
        return self.num_tokens / self.num_expected


def whole_answers(model: LoadedModel, arm: BlockArm, load: Load, trace: Trace) -> Answers:
    """Decode `load.num_tokens` of every sequence, after a round that captures the graphs."""
    steady = SteadyBlocks(model, arm, load, trace, num_passes=0)
    with steady.toggled():
        _answers(steady, load.num_tokens)
        return _answers(steady, load.num_tokens)


def _answers(steady: SteadyBlocks, max_tokens: int) -> Answers:
    steady.start_requests(max_tokens=max_tokens)
    expected, passes, tokens = 0, 0, 0
    start = time.perf_counter()
    while steady.engine.has_work:
        events = steady.engine.step()
        if not expected:
            expected = sum(
                _expected(steady, lane_of(request), len(request.prompt_ids), max_tokens)
                for request in steady.engine.scheduler.running
            )
        for event in events:
            if event.completion is not None:
                passes += event.completion.num_forwards
                tokens += len(event.completion.token_ids)
    seconds = time.perf_counter() - start
    return Answers(num_passes=passes, num_expected=expected, num_tokens=tokens, seconds=seconds)


def _expected(steady: SteadyBlocks, lane: int, num_known: int, num_left: int) -> int:
    """Passes that the trace expects for an answer of `num_left` tokens on a lane. Without fused commits every
    block but the last, which is never stored, takes one more."""
    arm, num_passes = steady.arm, 0
    assert isinstance(arm, BlockArm)
    while num_left > 0:
        num_fixed = num_known % arm.stride
        num_open = arm.stride - num_fixed
        num_passes += steady.unmasking.passes_of(lane, num_known - num_fixed, num_open)
        num_known, num_left = num_known + num_open, num_left - num_open
        num_passes += num_left > 0 and not arm.fused
    return num_passes


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """FLOPs and bytes of one pass. `row_flops`, `head_flops`: linears, per row and per row with logits."""

    row_flops: float
    head_flops: float
    attention_flops: float
    kv_bytes: float

    def linears(self, num_rows: float, num_head_rows: float) -> float:
        return self.row_flops * num_rows + self.head_flops * num_head_rows


def pass_cost(model: LoadedModel, *, num_sequences: int, rows: float, slots: float) -> PassCost:
    """Cost of a pass over `rows` rows that see `slots` slots each."""
    *weights, head = weights_of(model)
    spec = model.local
    return PassCost(
        row_flops=2.0 * sum(weight.numel() for weight in weights),
        head_flops=2.0 * head.numel(),
        attention_flops=4.0 * spec.num_layers * spec.num_heads * spec.head_dim * rows * slots,
        kv_bytes=float(num_sequences * slots * slot_bytes(model)),
    )
