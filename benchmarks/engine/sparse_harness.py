"""Engines of the arms of the sparse-attention benchmark, their lower bounds and their parity gate.

An arm is exact attention or one accelerator, in the real engine and its graphs. Contexts count as computed
and their KV is random, so that 128K tokens need no prefill. A trace makes every block take the same number of
passes, and every sequence is at another step of its block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.engine.block_harness import WARM_UP_PASSES, BlockArm, BlockMeasured, SteadyBlocks, pass_cost
from benchmarks.engine.decoding.harness import Load, slot_bytes, weights_of
from benchmarks.engine.decoding.trace import Trace
from idlm.infer.accelerators.prefix import EVERYTHING
from idlm.infer.models.loader import LoadedModel
from idlm.infer.models.moe import Experts
from idlm.infer.sparse.accelerator import ACCELERATORS

SPARSE = ("mage", "quest", "sparsed")
ARMS = ("exact", "exact_unsplit", *SPARSE)
NO_SPLITS = 1 << 20
"""Blocks of slots below which a walk is not split: none is."""
RESERVED_BYTES = 7 << 30
"""For graphs, logits, and what accelerators take beside KV, when the largest batch is sought."""
SLACK = 1024
"""Slots of a sequence for tokens of passes in progress."""
GATE_PASSES = 2
GATE_LIMIT = 0.02
"""Relative root mean square of the difference between logits at full budget and those of exact attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseArm(BlockArm):
    """One of `ARMS` with `k` slots, in blocks that take `num_passes` passes. `exact_share`: of sparsed."""

    k: int = 1024
    exact_layers: int = 2
    num_passes: int = 32
    exact_share: float = 0.2

    def decoder_options(self) -> dict[str, Any]:
        """Those of a block that takes its quota."""
        # Named in full: `slots=True` makes a class anew, which a bare super() does not know.
        return {**BlockArm.decoder_options(self), "steps": self.num_passes}

    def accelerators(self) -> Mapping[str, Any]:
        """The accelerator of this name; none for exact attention."""
        if self.name not in SPARSE:
            return {}
        kind = ACCELERATORS.get(self.name)
        options = {"exact_share": self.exact_share} if self.name == "sparsed" else {}
        return {self.name: kind.Config(k=self.k, exact_layers=self.exact_layers, **options)}


def trace_of_passes(num_passes: int, size: int) -> Trace:
    """Any `num_passes` passes in a row decide `size` positions."""
    ends = [size * (place + 1) // num_passes for place in range(num_passes)]
    decided = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return Trace(
        name=f"{num_passes} passes", num_drafts=size - 1, accepted=tuple(count - 1 for count in decided)
    )


class SteadyContexts(SteadyBlocks):
    """`SteadyBlocks` whose arm may walk contexts without splits. The first blocks, of which a part is fixed,
    end before a round is timed: then every sequence emits whole blocks, one after another.
    """

    def start_and_warm_up(self) -> None:
        """Start all requests and run them into their second blocks."""
        assert isinstance(self.arm, SparseArm)
        runner: Any = self.engine._parts.runner
        if self.arm.name == "quest":
            # Nothing has stored the context's keys, so nothing has summarised them: ties would be listed.
            bounds = runner._stack.kv.bounds
            bounds.largest.normal_().abs_()
            bounds.least.normal_().abs_().neg_()
        self.start_requests()
        self.run_passes(self.arm.num_passes + WARM_UP_PASSES)
        self.drain()

    @contextlib.contextmanager
    def toggled(self) -> Iterator[None]:
        """One program per KV head and tile for `exact_unsplit`: the kind of baseline of MAGE's paper."""
        with super().toggled():
            if self.arm.name != "exact_unsplit" or not torch.cuda.is_available():
                yield
                return
            from idlm.kernels.paged_attention import planning

            chosen = planning.choose_launch
            planning.choose_launch = lambda *given, **named: replace(
                chosen(*given, **named), min_blocks=NO_SPLITS
            )
            try:
                yield
            finally:
                planning.choose_launch = chosen


def steady_contexts(model: LoadedModel, arm: SparseArm, load: Load, *, num_blocks: int) -> SteadyContexts:
    """An engine whose rounds take `num_blocks` blocks of every sequence."""
    trace = trace_of_passes(arm.num_passes, arm.stride)
    return SteadyContexts(model, arm, load, trace, num_blocks * arm.num_passes)


def tpob_ms(measured: BlockMeasured) -> float:
    """Time per output block of a sequence, over the fastest round."""
    num_blocks = [tokens / measured.width / measured.load.concurrency for tokens in measured.tokens]
    assert min(num_blocks) > 0, f"{measured.tokens=}: no block became clean in a round"
    return min(1e3 * seconds / num for seconds, num in zip(measured.seconds, num_blocks, strict=True))


def largest_batch(model: LoadedModel, context: int, num_tokens: int) -> int:
    """Sequences whose KV fits beside graphs and buffers."""
    if model.device.type != "cuda":
        return 2
    free = torch.cuda.mem_get_info(model.device)[0] - RESERVED_BYTES
    return max(1, free // ((context + num_tokens + SLACK) * slot_bytes(model)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Lower bounds by bytes and products, ms: of a pass that sees everything, of one that sees lists, and of
    reading the keys of sparse layers once more.
    """

    exact_ms: float
    sparse_ms: float
    rank_ms: float

    def block_ms(self, arm: SparseArm) -> float | None:
        """Of a block of one arm; None for baselines that no bound is given for."""
        if not arm.accelerators():
            return arm.num_passes * self.exact_ms
        if arm.name != "mage":
            return None
        return self.exact_ms + self.rank_ms + (arm.num_passes - 1) * self.sparse_ms


def floor_of(model: LoadedModel, arm: SparseArm, load: Load, *, stream: float, product: float) -> Floor:
    """Bounds at the rates that were measured: a linear or an attention takes its bytes or its products."""
    batch, num_layers = load.concurrency, model.spec.num_layers
    rows = batch * arm.stride
    item_bytes = sum(weight.numel() * weight.element_size() for weight in weights_of(model))
    linears = max(
        item_bytes / stream,
        pass_cost(model, num_sequences=batch, rows=rows, slots=0).linears(rows, rows) / product,
    )

    def attention(slots: float) -> float:
        cost = pass_cost(model, num_sequences=batch, rows=rows, slots=slots)
        return max(cost.kv_bytes / stream, cost.attention_flops / product)

    sparse_share = 1 - arm.exact_layers / num_layers
    everything = attention(load.context + arm.stride)
    listed = attention(min(arm.k, load.context) + arm.stride)
    key_bytes = batch * load.context * slot_bytes(model) / 2 * sparse_share
    return Floor(
        exact_ms=1e3 * (linears + everything),
        sparse_ms=1e3 * (linears + sparse_share * listed + (1 - sparse_share) * everything),
        rank_ms=1e3 * key_bytes / stream,
    )


def parity_error(model: LoadedModel, arm: SparseArm, load: Load) -> float:
    """How far the logits of a block's second pass, over lists of all slots, are from those of exact
    attention: root mean square of the difference over that of the logits. 1 if that pass has no lists. Rows
    go to the experts that they chose with exact attention: rounding would choose others, and what those
    compute says nothing of lists.
    """
    full = replace(arm, k=EVERYTHING, graphs=False, num_inflight_steps=0, exact_share=1 / arm.num_passes)
    routes: list[tuple[torch.Tensor, torch.Tensor]] = []
    with routing(routes, replays=False):
        expected, _ = _second_logits(model, replace(full, name="exact"), load)
    with routing(routes, replays=True):
        found, is_listed = _second_logits(model, full, load)
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    return float(error) if is_listed else 1.0


@contextlib.contextmanager
def routing(routes: list[tuple[torch.Tensor, torch.Tensor]], *, replays: bool) -> Iterator[None]:
    """Note the experts of all rows and their weights, layer by layer; or take them from there, in order."""
    original = Experts.route

    def recorded(self: Experts, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        routes.append(original(self, *given))
        return routes[-1]

    def replayed(self: Experts, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return routes.pop(0)

    Experts.route = replayed if replays else recorded  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Experts.route = original  # type: ignore[method-assign]


def _second_logits(model: LoadedModel, arm: SparseArm, load: Load) -> tuple[torch.Tensor, bool]:
    """Logits of the second pass over the first blocks, and whether all sequences see lists in it. The first
    pass of all arms is the same.
    """
    torch.manual_seed(0)
    steady = steady_contexts(model, arm, load, num_blocks=1)
    # Random draws could differ in a last bit and then in everything that follows: the keys must not.
    dice = torch.Generator(device=model.device).manual_seed(0)
    runner: Any = steady.engine._parts.runner
    for cached in (runner._cache.keys, runner._cache.values):
        cached.normal_(generator=dice)
    seen: list[torch.Tensor] = []
    is_listed = [False]
    forward, make_plan = runner.forward, runner._plan_attention

    def watched_plan(table: Any, plan: Any, lists: Any = None) -> Any:
        is_listed[0] = lists is not None and bool(lists.listed_B.all())
        return make_plan(table, plan, lists)

    def watched(plan: Any) -> Any:
        wanted = forward(plan)
        seen.append(wanted.logits().float())
        return wanted

    runner.forward, runner._plan_attention = watched, watched_plan
    steady.start_requests()
    steady.run_passes(GATE_PASSES)
    found = seen[GATE_PASSES - 1], is_listed[0]
    steady.abort_all()
    return found
