"""Engines of the eviction benchmark, whose passes replay a trace, and what a window of their passes costs.

Every sequence is at another step of its block. A window begins and ends with an empty queue of passes; at
both ends the positions that each lane has decided must be those of the trace, so that no arm decides fewer
tokens a pass unseen.

Random weights neither mark a mask as decodable nor decide what a model would. So the trace's deltas replace
what FOCUS measured, after both importance kernels have run, and its positions replace the confidence of what
was drawn, after the head and the sampling kernels, on the device and without a wait of the host; budget,
selection, compaction and the strategy then run on them. The launches that replace (about a dozen a pass)
count against us. Lanes begin at different blocks of the trace. L blocks of the trace, P passes, W positions,
Z lanes, B sequences."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.engine.block_harness import BlockArm, SteadyBlocks, logits_of_pass, relative_error
from benchmarks.engine.decoding.harness import Load, SteadyEngine
from benchmarks.engine.decoding.replay import STEP_BETWEEN_LANES
from benchmarks.engine.eviction_trace import (
    FOCUS,
    FULL,
    BlockTrace,
    RowCounts,
    UnmaskTrace,
    rows_of,
    rules_of,
)
from idlm.infer.accelerators.focus import FocusPass
from idlm.infer.decoders.block import BlockDecoder
from idlm.infer.models.loader import LoadedModel
from idlm.infer.parts import WarmUp
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.sparse.accelerator import ACCELERATORS
from idlm.infer.state.batch import PassRows, lane_of

THRESHOLD = 0.5
"""Of the decoder: between the confidences 0 and 1 that a replay gives."""


class UnmaskingReplay:
    """The blocks of one arm of a trace on a device."""

    def __init__(self, blocks: tuple[BlockTrace, ...], size: int, device: torch.device) -> None:
        # One more pass, in which nothing is decided: blocks that began with a prompt's tail take longer.
        self._num_passes = 1 + max(len(block.decided) for block in blocks)
        self._size, self._num_blocks = size, len(blocks)
        shape = (len(blocks), self._num_passes, size)
        deltas_LPW, decided_LPW = torch.zeros(shape), torch.zeros(shape, dtype=torch.float64)
        for block, deltas_PW, decided_PW in zip(blocks, deltas_LPW, decided_LPW, strict=True):
            for number, (masks, decided) in enumerate(zip(block.masks(size), block.decided, strict=True)):
                deltas_PW[number, masks] = torch.tensor(block.deltas[number])
                decided_PW[number, list(decided)] = 1.0
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
        done_PW = self.decided_LPW[self.block(lane, start), :num_passes]
        return [bool(flag) for flag in done_PW.sum(dim=0) > 0]

    def select(self, original: Any, focus: FocusPass, first_BPW: Tensor, second_BPW: Tensor) -> Any:
        """`FocusPass._select` by the trace's deltas."""
        view = focus.view
        index_B = self._index(view.plan.lanes_B, view.active)
        first_BPW.zero_()
        second_BPW.zero_()[:, 0] = self._deltas_XW[index_B].to(second_BPW.dtype)
        return original(focus, first_BPW, second_BPW)

    def propose(
        self, original: Any, decoder: BlockDecoder, table: Any, batch: Any, plan: Any, *more: Any
    ) -> Any:
        """`BlockDecoder._propose` with the trace's positions as those that pass the threshold."""
        proposed, *others = original(decoder, table, batch, plan, *more)
        confidence_BW = self._decided_XW[self._index(plan.lanes_B, plan.active)]
        return (proposed._replace(confidence_BW=confidence_BW.to(proposed.confidence_BW.dtype)), *others)

    def _index(self, lanes_B: Tensor, active: Any) -> Tensor:
        passes_B = active.num_passes_B.clamp(max=self._num_passes - 1)
        return self.block(lanes_B, active.starts_B) * self._num_passes + passes_B


@contextlib.contextmanager
def replaying_blocks(replay: UnmaskingReplay) -> Iterator[None]:
    select, propose = FocusPass._select, BlockDecoder._propose

    def selecting(self: FocusPass, *given: Tensor) -> Any:
        return replay.select(select, self, *given)

    def proposing(self: BlockDecoder, *given: Any) -> Any:
        return replay.propose(propose, self, *given)

    with patch.object(FocusPass, "_select", selecting), patch.object(BlockDecoder, "_propose", proposing):
        yield


NO_EVICTION = 1e9
WARM_UP_BLOCKS = 2
SETTLING_TOKENS = 512
"""Tokens of a sequence before the window, in graphs of passes that drop rows: rooms follow the mean of 64
passes, and the first ones need more. Sequences begin as many tokens before their context (at most half of
it), so that the window begins there.
"""
FEW_SEQUENCES = 16
"""With so few, the room of the head varies as well: full blocks settle as long."""
WARM_SETTLING_TOKENS = 192
"""The same with graphs captured in advance, which hold the first passes with little padding."""
MAX_WARM_ROUNDS = 8
"""Rounds before the measured ones, until one captures no graph."""
MAX_STRAYS = 0.01
"""Share of lanes."""
GATE_PASSES = 2
GATE_LIMIT = 0.02
"""Relative root mean square of the difference between logits at a budget of the block and of full blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionArm(BlockArm):
    """Full blocks, or FOCUS with these options (`alpha` None: full blocks)."""

    alpha: float | None = None
    commit: str = "clean"
    stability: str = "neighbour"

    def decoder_options(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "threshold": THRESHOLD, "fused_commit": self.fused}

    def accelerators(self) -> Mapping[str, Any]:
        if self.alpha is None:
            return {}
        options = {"alpha": self.alpha, "commit": self.commit, "stability": self.stability}
        return {"focus": ACCELERATORS.get("focus").Config(**options)}

    @property
    def replayed(self) -> str:
        """The arm of the trace that it replays: without eviction the one of full blocks."""
        return FULL if self.alpha in (None, NO_EVICTION) else FOCUS


@dataclass(slots=True, kw_only=True)
class Window:
    """Sums over the measured rounds of one arm. `num_pairs` (sequence, pass) decided `num_tokens` in the
    passes of the trace (`num_traced`); the others waited or only stored a block. `num_captured` graphs of the
    rounds, `num_settling` of the traffic before them, in which every shape that was padded is captured at the
    end, as by a server without requests. Rows are `requested` for, and `computed` with padding."""

    batch: int
    seconds: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_traced: int = 0
    num_pairs: int = 0
    num_waits: int = 0
    num_captured: int = 0
    warm_up: WarmUp = WarmUp()
    num_settling: int = 0
    requested: PassRows = PassRows(fed=0, retained=0, head=0)
    computed: PassRows = PassRows(fed=0, retained=0, head=0)

    @property
    def step_ms(self) -> float:
        """Median over rounds of the time of a pass."""
        return median(1e3 * seconds / num for seconds, num in zip(self.seconds, self.passes, strict=True))

    @property
    def traced_share(self) -> float:
        return self.num_traced / (self.batch * sum(self.passes))

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / (self.batch * sum(self.passes))

    @property
    def waiting_share(self) -> float:
        """Share of the pairs of sequence and pass in which the sequence exceeded the capacity."""
        return self.num_waits / max(1, self.num_pairs)

    @property
    def padding_share(self) -> float:
        """Rows computed after layer 1 beyond those that were requested."""
        return self.computed.retained / max(1, self.requested.retained) - 1

    def tokens_per_second(self, traced: float) -> float:
        """Tokens of a mean pass of the whole trace (`traced`) in the time of a median one: so the part of the
        trace that a window happens to hold does not count."""
        return 1e3 * self.batch * traced * self.traced_share / self.step_ms


class SteadyTrace(SteadyBlocks):
    """A steady engine whose blocks are those of a trace."""

    def __init__(self, model: LoadedModel, arm: EvictionArm, load: Load, trace: UnmaskTrace) -> None:
        blocks = trace.blocks[arm.replayed]
        self.replay_of_blocks = UnmaskingReplay(blocks, trace.block_size, model.device)
        settles = arm.graphs and (arm.alpha is not None or load.concurrency <= FEW_SEQUENCES)
        maximum = load.context // 2 // arm.stride * arm.stride
        tokens = SETTLING_TOKENS if arm.warmup == "off" else WARM_SETTLING_TOKENS
        self._num_settling = min(tokens, maximum) if settles else 0
        load = replace(load, context=load.context - self._num_settling)
        self._num_missed = 0
        SteadyEngine.__init__(self, model, arm, load)

    @property
    def warm_up_tokens(self) -> int:
        """The first block, of which a part is fixed, and the tokens after it that choose the shapes."""
        return WARM_UP_BLOCKS * self.arm.stride + self._num_settling

    @contextlib.contextmanager
    def toggled(self) -> Iterator[None]:
        """The trace in place of what random weights measure and choose."""
        with super().toggled(), replaying_blocks(self.replay_of_blocks):
            yield

    def reach_steady_state(self, num_passes: int) -> None:
        """Start all requests and decode until every sequence has left the block of its prompt, and a round of
        `num_passes` passes captures no graph."""
        self.start_requests()
        self.run_tokens(self.warm_up_tokens)
        while any(one.num_known == len(one.prompt_ids) for one in self.engine.scheduler.running):
            self.run_passes(1)
        self.drain()
        for _ in range(MAX_WARM_ROUNDS):
            captured = self.num_captured()
            self.run_passes(num_passes)
            self.drain()
            if self.num_captured() == captured:
                break
        step = self.engine._parts.step
        while self.arm.graphs and isinstance(step, StaticStep) and step.captures and step.capture_missed():
            self._num_missed += 1

    def window(self, rounds: int, num_passes: int) -> Window:
        """Start all requests, warm up, and measure `rounds` of `num_passes` passes, one after the other."""
        found = Window(batch=self.load.concurrency)
        with self.toggled():
            self.reach_steady_state(num_passes)
            before, counts = self._positions(), row_counts_of(self.engine)
            captured = self.num_captured()
            found.num_settling = captured + self._num_missed
            found.warm_up = self.engine._parts.warm_up
            for _ in range(rounds):
                seconds, _, passes = self.timed(lambda: self.run_passes(num_passes))
                found.seconds.append(seconds)
                found.passes.append(passes)
            self._note(found, before, counts)
            found.num_captured = self.num_captured() - captured
            self.abort_all()
        return found

    def _note(self, found: Window, before: dict[int, tuple[int, int, int]], counts: tuple[Any, ...]) -> None:
        for lane, (start, passes, tokens) in self._positions().items():
            first_start, first_passes, first_tokens = before[lane]
            found.num_tokens += tokens - first_tokens
            found.num_traced += self.replay_of_blocks.passes_between(
                lane, (first_start, first_passes), (start, passes)
            )
        pairs, waits, *rows = (
            now - then for now, then in zip(row_counts_of(self.engine), counts, strict=True)
        )
        found.num_pairs, found.num_waits = pairs, waits
        found.requested, found.computed = (
            PassRows(fed=fed, retained=retained, head=head) for fed, retained, head in (rows[:3], rows[3:])
        )

    def _positions(self) -> dict[int, tuple[int, int, int]]:
        """By lane: where its block begins, the passes over it so far, and all tokens decided so far. What has
        been decided in the block must be that of the trace (a near tie of deltas may send a lane astray)."""
        decoder, size = self.engine.decoder, self.arm.stride
        assert isinstance(decoder, BlockDecoder)
        known_Z = self.engine.table.num_known_Z.tolist()
        passes_Z = decoder.blocks.num_passes_Z.tolist()
        decided_ZW = decoder.blocks.is_decided_ZW.tolist()
        found, num_strays = {}, 0
        for lane in (lane_of(request) for request in self.engine.scheduler.running):
            start = known_Z[lane] // size * size
            assert known_Z[lane] == start, f"{lane=}: the window begins in the block of the prompt"
            expected = self.replay_of_blocks.decided_before(lane, start, passes_Z[lane])
            num_strays += decided_ZW[lane] != expected
            found[lane] = (start, passes_Z[lane], start + sum(decided_ZW[lane]))
        assert num_strays <= MAX_STRAYS * len(found), f"{num_strays=}: not the positions of the trace"
        return found


def row_counts_of(engine: Any) -> tuple[int, ...]:
    counts = engine.row_counts
    rows = ((each.fed, each.retained, each.head) for each in (counts.requested, counts.computed))
    return (counts.num_pairs, counts.num_waits, *itertools.chain(*rows))


def implied_rows(trace: UnmaskTrace, arm: EvictionArm) -> RowCounts:
    evicts, size = arm.replayed == FOCUS, trace.block_size
    rules = rules_of(size, evicts=evicts, alpha=trace.alpha, commit=arm.commit)
    return rows_of(trace.blocks[arm.replayed], rules, evicts=evicts)


def parity_error(model: LoadedModel, arm: EvictionArm, load: Load, trace: UnmaskTrace) -> float:
    """Relative error of the logits of a block's second pass with a budget of the whole block, against those
    of full blocks."""
    full = replace(arm, alpha=None, graphs=False, num_inflight_steps=0)
    everything = replace(full, alpha=NO_EVICTION, stability="off")
    expected, found = (
        logits_of_pass(SteadyTrace(model, each, load, trace), GATE_PASSES) for each in (full, everything)
    )
    return relative_error(found, expected)
