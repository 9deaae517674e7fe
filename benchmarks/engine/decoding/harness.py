"""A model of random weights, an engine whose sequences start in mid-answer, and steady decoding.

The engine is the real one, with its scheduler, steps, graphs and steps in progress. Only the start of a
sequence differs: its context counts as computed, and the KV there is random."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

import torch

from benchmarks.engine.decoding.replay import Replay, Trace, replaying
from benchmarks.models import assembled, free_bytes, slot_bytes, weight_bytes
from idlm.contracts import SamplingParams
from idlm.devices import free_cached_memory
from idlm.infer.decoders.base import DECODERS, max_rows
from idlm.infer.decoders.selector import PathSelector
from idlm.infer.engine import Engine
from idlm.infer.models.base import TensorNames
from idlm.infer.models.dense import DenseLayer, DenseTrunk
from idlm.infer.models.loader import LoadedModel
from idlm.infer.models.low_rank import LowRank
from idlm.infer.parts import EngineParts
from idlm.infer.runtime.graphs.warm_up import warm_up
from idlm.selector import SELECTOR_WIDTH, PathWeights

PAGE_SIZE = 16
NUM_INFLIGHT_STEPS = 4
WARM_UP_TOKENS = 24
SETTLING_PASSES, MAX_TURNS = 50, 4
MEMORY_TOKENS = 160
"""Further tokens of a sequence than those of a round, for memory."""
SHARE_OF_MEMORY = 0.9
PENALTIES: dict[str, Any] = {"presence_penalty": 1.5, "repetition_penalty": 1.05}
SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "T1": SamplingParams(temperature=1),
    "qwen3": SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
}


@functools.lru_cache(maxsize=2)
def _low_ranks(trunk: DenseTrunk, rank: int, num_adapters: int) -> list[torch.nn.ModuleDict]:
    """Random A and B of all projections, by layer. Graphs of several engines read the same ones."""
    found = []
    for layer in trunk.layers:
        assert isinstance(layer, DenseLayer)
        made = torch.nn.ModuleDict()
        for name, (_, sizes, weight, bias) in layer.projections(TensorNames()).items():
            made[name] = low = LowRank(sizes, weight, bias, rank=rank, scalings=(2.0,) * num_adapters)
            for matrix in (pair for number in range(num_adapters) for pair in low.matrices(number, rank)):
                matrix.normal_(std=matrix.shape[-1] ** -0.5 / 4)
        found.append(made)
    return found


@contextlib.contextmanager
def adapted(model: LoadedModel, rank: int, num_adapters: int = 1) -> Iterator[None]:
    """Put gated LoRAs with random A and B on all projections of the model inside this context."""
    trunk = model.trunk
    low_ranks = _low_ranks(trunk, rank, num_adapters) if rank else [None] * len(trunk.layers)
    for layer, low_rank in zip(trunk.layers, low_ranks, strict=True):
        assert isinstance(layer, DenseLayer)
        layer.lora = low_rank
    trunk.num_adapters = num_adapters if rank else 0
    try:
        yield
    finally:
        if rank:
            with adapted(model, 0):
                pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to decode; `graphs`, `num_inflight_steps`, `deterministic` and `warmup` are engine settings.
    `adapter`: the rank of a gated adapter, 0 for none; requests take `num_adapters` of them in turn."""

    name: str
    decoder: str = "isd"
    strategy: str = "branch"
    stride: int = 4
    adaptive: bool = False
    adapter: int = 0
    num_adapters: int = 1
    graphs: bool = True
    num_inflight_steps: int = NUM_INFLIGHT_STEPS
    deterministic: bool = False
    warmup: Literal["auto", "full", "off"] = "off"
    penalised: bool = False
    """Whether requests have `PENALTIES`."""
    selector: bool = False
    """Whether drafts come from a selector of random weights."""

    @property
    def settling_tokens(self) -> int:
        """Tokens that a sequence emits at most until the controller of an adaptive arm has settled."""
        return SETTLING_PASSES * self.stride if self.adaptive else 0

    @property
    def shown_strategy(self) -> str:
        return "adaptive" if self.adaptive else self.strategy

    def further_adapters(self) -> list[str]:
        """Names of adapters besides the first."""
        return [str(number) for number in range(1, self.num_adapters)]

    def decoder_options(self) -> dict[str, Any]:
        if self.decoder == "ar":
            return {}
        return {"stride": self.stride, "rejection_strategy": self.strategy, "adaptive": self.adaptive}

    def accelerators(self) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency` sequences with `context` computed tokens each, that emit `num_tokens` each in a round."""

    concurrency: int
    context: int
    num_tokens: int
    sampling: SamplingParams


@dataclass(slots=True, kw_only=True)
class Measured:
    """Rounds of one arm under one load; seconds, tokens of all sequences and passes of each. `ar`: the rounds
    of AR in turn with them."""

    arm: Arm
    load: Load
    width: int
    ar: Measured | None = None
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)

    def add(self, seconds: float, tokens: int, passes: int) -> None:
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        self.passes.append(passes)

    def step_ms(self) -> float:
        """Median over rounds of the time of a pass."""
        return median([1e3 * seconds / num for seconds, num in zip(self.seconds, self.passes)])

    def tokens_per_second(self) -> float:
        """Tokens of a mean pass in the time of a median one, so that the trace averages out."""
        return 1e3 * self.tokens_per_forward() * self.load.concurrency / self.step_ms()

    def tokens_per_forward(self, rounds: slice = slice(None)) -> float:
        return sum(self.tokens[rounds]) / sum(self.passes[rounds]) / self.load.concurrency


class SteadyEngine:
    """An engine whose `Load` can be started repeatedly; its CUDA graphs stay. `traces`: what the rounds
    replay, one after the other."""

    def __init__(self, model: LoadedModel, arm: Arm, load: Load, *traces: Trace) -> None:
        self.arm, self.load, self._model, self._traces = arm, load, model, traces
        with self.toggled():
            self.engine = Engine(_parts(model, arm, load, self._max_length()))
        runner: Any = self.engine._parts.runner
        for name in ("keys", "values"):
            getattr(runner._cache, name).normal_()
        self.replay = None
        if traces and arm.decoder != "ar":
            self.replay = Replay(traces[0], load.concurrency + 1, self.engine.table.device)
        rng = torch.Generator().manual_seed(load.concurrency)
        self._prompts = [
            torch.randint(0, model.spec.vocab_size - 1, (length,), generator=rng).tolist()
            for length in self._lengths()
        ]
        self._num_rounds = self._num_measured = 0

    def _lengths(self) -> list[int]:
        return [self.load.context + 1] * self.load.concurrency

    @property
    def warm_up_tokens(self) -> int:
        """Tokens per sequence until passes of every shape are captured."""
        return WARM_UP_TOKENS

    def _max_length(self) -> int:
        slack = (self.arm.num_inflight_steps + 3) * self.arm.stride
        longest = max(self.warm_up_tokens + self.load.num_tokens, self.arm.settling_tokens)
        return self.load.context + 1 + longest + 2 * slack

    def measure(self, into: Measured) -> None:
        """Run one round: start all requests, warm up, then time between two empty queues of passes. A round
        of an adaptive arm that captured a graph, for a mode that was not tried before, is run again."""
        with self.toggled(), replaying(self.replay):
            for _ in range(MAX_TURNS if self.arm.adaptive else 1):
                self.reach_steady_state(0)
                captured = self.num_captured()
                found = self.timed(lambda: self.run_tokens(self.load.num_tokens))
                self.abort_all()
                if self.num_captured() == captured:
                    break
            into.add(*found)
            self._num_measured += 1

    def timed(self, run: Callable[[], int]) -> tuple[float, int, int]:
        """Seconds, tokens and passes of `run`, which returns tokens, between two empty queues of passes."""
        before, start = self.passes(), time.perf_counter()
        num_tokens = run() + self.drain()
        seconds, after = time.perf_counter() - start, self.passes()
        counts = [after[name] - count for name, count in before.items() if name in after]
        # An engine short of memory runs fewer sequences a pass, so its pass is none of this load.
        assert len(before) == self.load.concurrency and min(counts) >= 0.9 * max(counts), "memory is short"
        return seconds, num_tokens, max(counts)

    def reach_steady_state(self, num_passes: int) -> None:
        """Start all requests and warm up; shapes that follow traffic: until `num_passes` capture no graph.
        The first round of an adaptive arm comes after passes of other requests, so that its contexts are as
        long as those of other arms."""
        if self.arm.adaptive and not self._num_rounds:
            self.start_requests()
            self.run_passes(SETTLING_PASSES)
            self.abort_all()
        if self.replay is not None:
            trace = self._traces[self._num_measured % len(self._traces)]
            self.replay.restart(self._num_rounds - self.arm.adaptive, trace)
        self.start_requests()
        self.run_tokens(self.warm_up_tokens)
        self.drain()

    def start_requests(self, *, max_tokens: int = 1 << 20) -> None:
        """Add all requests, with contexts that count as computed."""
        params = replace(self.load.sampling, max_tokens=max_tokens, ignore_eos=True, seed=self._num_rounds)
        if self.arm.penalised:
            params = replace(params, **PENALTIES)
        kv_policy = self.engine.decoder.kv_policy
        names = [None, *self.arm.further_adapters()]
        for number, prompt in enumerate(self._prompts):
            own = replace(params, adapter=names[number % len(names)])
            self.engine.add_request(name := f"{self._num_rounds}-{number}", prompt, own)
            num_computed = kv_policy.num_computable(len(prompt)) - kv_policy.num_lookahead_tokens
            self.engine._active[name][0].num_computed = num_computed
        self._num_rounds += 1

    def abort_all(self) -> None:
        for request_id in list(self.engine._active):
            self.engine.abort(request_id)
        self.drain()

    def run_tokens(self, num_tokens: int) -> int:
        """Step until the sequences have emitted `num_tokens` each on average; returns the total."""
        count = 0
        while count < num_tokens * self.load.concurrency:
            assert self.engine.scheduler.running or not count, f"{count=}: the answers have ended"
            count += sum(len(event.token_ids) for event in self.engine.step())
        return count

    def run_passes(self, num_passes: int) -> int:
        return sum(len(event.token_ids) for _ in range(num_passes) for event in self.engine.step())

    def drain(self) -> int:
        """Wait for the steps in progress; returns the number of tokens they emitted."""
        self.engine._collect(max_inflight=0)
        return sum(len(event.token_ids) for event in self.engine.take_events())

    def num_captured(self) -> int:
        return int(self.engine.metrics()["graphs_captured_in_traffic"])

    def passes(self) -> dict[str, int]:
        """Forward passes of each running request since it was added."""
        return {request.request_id: request.num_forwards for request in self.engine.scheduler.running}

    @contextlib.contextmanager
    def toggled(self) -> Iterator[None]:
        """Changes of an arm while its engine is built and runs: graphs keep what they were captured with."""
        rank, num_adapters = self.arm.adapter, self.arm.num_adapters
        with adapted(self._model, rank, num_adapters) if rank else contextlib.nullcontext():
            yield


def _parts(model: LoadedModel, arm: Arm, load: Load, max_length: int) -> EngineParts:
    chosen = DECODERS.get(arm.decoder)
    decoder = chosen(chosen.Config(**arm.decoder_options()), model.semantics)
    if arm.selector:
        shapes = (model.spec.vocab_size, SELECTOR_WIDTH), (SELECTOR_WIDTH, model.spec.width)
        weights = (torch.randn(*shapes[i], device=model.device).to(model.dtype) for i in (0, 0, 1))
        decoder.selector = PathSelector(PathWeights(*weights), model.trunk)
    lane_pages = -(-(max_length - 1 + max_rows(decoder, max_length)) // PAGE_SIZE)
    captures = arm.graphs and model.device.type == "cuda"
    parts = assembled(
        model,
        decoder,
        arm.accelerators(),
        max_num_seqs=load.concurrency,
        max_length=max_length,
        page_size=PAGE_SIZE,
        num_pages=lane_pages * load.concurrency,
        num_inflight_steps=arm.num_inflight_steps,
        prefix_cache=False,
        graphs="on" if arm.graphs else "off",
        deterministic=arm.deterministic,
        warmup=arm.warmup,
        attention="triton" if captures else "auto",
        adapters=dict.fromkeys(arm.further_adapters(), ""),
    )
    return parts if arm.warmup == "off" else replace(parts, warm_up=warm_up(parts))


def memory_of(model: LoadedModel, arm: Arm, load: Load) -> float:
    """Bytes of all KV, of the logits of a pass and their probabilities, and of the drafts' probabilities."""
    stride = 1 if arm.decoder == "ar" else arm.stride
    num_tokens = max(load.num_tokens + MEMORY_TOKENS, arm.settling_tokens)
    num_slots = load.concurrency * (load.context + num_tokens)
    width = stride * stride if arm.strategy == "branch" or arm.adaptive else 2 * stride - 1
    probs = load.concurrency * model.spec.vocab_size * (8 * width + 8 * (stride - 1))
    return num_slots * slot_bytes(model) + probs


def fits(model: LoadedModel, arm: Arm, load: Load) -> bool:
    free_cached_memory()
    return memory_of(model, arm, load) < SHARE_OF_MEMORY * free_bytes(model)


def floor_ms(model: LoadedModel, load: Load, bytes_per_second: float) -> float:
    """Time to stream all weights, and all KV at the middle of a round."""
    kv_bytes = load.concurrency * (load.context + load.num_tokens / 2) * slot_bytes(model)
    return 1e3 * (weight_bytes(model) + kv_bytes) / bytes_per_second
