"""A model of random weights, an engine around it whose sequences start in mid-answer, and steady decoding.

The engine is the real one: its scheduler, steps, graphs, flights and books. Only how a sequence begins is
ours: its context counts as computed, and the KV there is random.
Shapes: R rows of a pass, D input width of a projection.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.engine.decoding.replay import Replay, replaying
from benchmarks.engine.decoding.trace import Trace
from benchmarks.stream import Timer
from idlm.contracts import SamplingParams
from idlm.infer import build as parts_builder
from idlm.infer.build import EngineSettings
from idlm.infer.decoders.base import DECODERS, max_rows
from idlm.infer.engine import Engine
from idlm.infer.models.base import FAMILIES, TensorNames
from idlm.infer.models.dense import DenseLayer, DenseTrunk, LowRank
from idlm.infer.models.loader import LoadedModel
from idlm.kernels.sampling import op as sampling_op
from idlm.semantics import Semantics

PAGE_SIZE = 16
RUN_AHEAD = 4
WARM_UP_TOKENS = 24
ADAPTIVE_WARM_UP_TOKENS = 160
SHARE_OF_MEMORY = 0.9
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    },
    "qwen3-0.6b": {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "max_position_embeddings": 2048,
    },
}
SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "T1": SamplingParams(temperature=1),
    "qwen3": SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
}
MAX_STRIDE = 32


def random_model(name: str, *, device: str, dtype: torch.dtype, block_size: int | None = None) -> LoadedModel:
    """The trunk of `MODELS[name]`, made on the device: matrices normal with variance 1 / columns, norms 1.
    With `block_size` a block-causal one, else one that was converted for strides up to `MAX_STRIDE`.
    """
    config = {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **MODELS[name],
    }
    spec = FAMILIES.get("Qwen3ForCausalLM").spec(config)
    trunk = DenseTrunk(spec, device=torch.device(device), dtype=dtype)
    generator = torch.Generator(device=device).manual_seed(0)
    for parameter_name, weight in trunk.named_parameters():
        if "norm" in parameter_name:
            weight.data.fill_(1.0)
        elif weight.ndim < 2:
            weight.data.zero_()
        else:
            weight.data.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    mask_id = spec.vocab_size - 1
    return LoadedModel(
        trunk=trunk,
        spec=spec,
        local=spec,
        semantics=Semantics(mask_token_id=mask_id, stride=MAX_STRIDE)
        if block_size is None
        else Semantics(mask_token_id=mask_id, causality="block", block_size=block_size, logit_shift=False),
        architecture="Qwen3ForCausalLM",
        dtype=dtype,
        device=torch.device(device),
        directory=Path(name),
    )


@contextlib.contextmanager
def adapted(model: LoadedModel, rank: int) -> Iterator[None]:
    """A gated LoRA of random A and B on all projections of the model, for the time being."""
    for layer in model.trunk.layers:
        assert isinstance(layer, DenseLayer)
        layer.lora = torch.nn.ModuleDict()
        for name, (_, sizes, weight, bias) in layer.projections(TensorNames()).items():
            low = LowRank(sizes, weight, bias, rank=rank, scaling=2.0)
            for matrix in (*low.a, *low.b):
                matrix.normal_(std=matrix.shape[-1] ** -0.5 / 4)
            layer.lora[name] = low
    model.trunk.is_adapted = True
    try:
        yield
    finally:
        model.trunk.is_adapted = False
        for layer in model.trunk.layers:
            assert isinstance(layer, DenseLayer)
            layer.lora = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to decode. `graphs`, `num_inflight_steps`, `attention`: engine settings; `is_fused`: sampling and
    verification by our kernels, else in plain torch (fp64), which waits for the host.
    """

    name: str
    decoder: str = "isd"
    strategy: str = "branch"
    stride: int = 4
    adaptive: bool = False
    graphs: bool = True
    num_inflight_steps: int = RUN_AHEAD
    is_fused: bool = True
    attention: str = "auto"
    deterministic: bool = False

    def decoder_options(self) -> dict[str, Any]:
        """For the decoder's Config."""
        if self.decoder == "ar":
            return {}
        return {"stride": self.stride, "rejection_strategy": self.strategy, "adaptive": self.adaptive}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`concurrency` sequences, each with `context` tokens behind it, that emit `num_tokens` in a round."""

    concurrency: int
    context: int
    num_tokens: int
    sampling: SamplingParams


@dataclass(slots=True, kw_only=True)
class Measured:
    """Rounds of one arm under one load; seconds, tokens of all sequences and passes of each round."""

    arm: Arm
    load: Load
    width: int
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)

    def step_ms(self) -> float:
        """Median over rounds of the time of a pass."""
        return median([1e3 * seconds / num for seconds, num in zip(self.seconds, self.passes)])

    def tokens_per_second(self) -> float:
        """Those of an average pass in the time of a median one: the luck of the trace evens out."""
        return 1e3 * self.tokens_per_forward() * self.load.concurrency / self.step_ms()

    def tokens_per_forward(self) -> float:
        """Of a sequence, over all rounds."""
        return sum(self.tokens) / sum(self.passes) / self.load.concurrency


class Seats:
    """An engine whose `Load` can be started again and again; its graphs stay."""

    def __init__(self, model: LoadedModel, arm: Arm, load: Load, trace: Trace | None) -> None:
        self.arm, self.load, self._model = arm, load, model
        with self._toggles():
            self.engine = Engine(_parts(model, arm, load, self._max_length()))
        for name in ("keys", "values"):
            getattr(self.engine._parts.runner._cache, name).normal_()
        device = self.engine.table.device
        is_replayed = trace is not None and arm.decoder != "ar"
        lanes = load.concurrency + 1
        self.replay = Replay(trace, lanes, device) if trace is not None and is_replayed else None
        dice = torch.Generator().manual_seed(load.concurrency)
        self._prompts = [
            torch.randint(0, model.spec.vocab_size - 1, (length,), generator=dice).tolist()
            for length in self._lengths()
        ]
        self._num_rounds = 0

    def _lengths(self) -> list[int]:
        """Of the prompts: the context, and the pending token behind it."""
        return [self.load.context + 1] * self.load.concurrency

    @property
    def warm_up_tokens(self) -> int:
        """Per sequence: passes of every shape were captured and, if need be, tried."""
        return ADAPTIVE_WARM_UP_TOKENS if self.arm.adaptive else WARM_UP_TOKENS

    def _max_length(self) -> int:
        slack = (self.arm.num_inflight_steps + 3) * self.arm.stride
        return self.load.context + 1 + self.warm_up_tokens + self.load.num_tokens + 2 * slack

    def measure(self, into: Measured) -> None:
        """One round: seats taken, warmed up, then timed from and to an empty queue of passes."""
        with self._toggles(), replaying(self.replay):
            self.sit()
            self.run_tokens(self.warm_up_tokens)
            self.drain()
            before = self.num_passes()
            begun = time.perf_counter()
            num_tokens = self.run_tokens(self.load.num_tokens) + self.drain()
            seconds = time.perf_counter() - begun
            into.seconds.append(seconds)
            into.tokens.append(num_tokens)
            into.passes.append(self.num_passes() - before)
            self.leave()

    def sit(self, *, max_tokens: int = 1 << 20) -> None:
        """Everybody sits down with a context that counts as computed."""
        params = replace(self.load.sampling, max_tokens=max_tokens, ignore_eos=True, seed=self._num_rounds)
        kv_policy = self.engine.decoder.kv_policy
        for number, prompt in enumerate(self._prompts):
            self.engine.add_request(f"{self._num_rounds}-{number}", prompt, params)
            num_computed = kv_policy.num_computable(len(prompt)) - kv_policy.num_lookahead_tokens
            self.engine.scheduler.waiting[-1].num_computed = num_computed
        self._num_rounds += 1

    def leave(self) -> None:
        """Everybody goes."""
        for request_id in list(self.engine._active):
            self.engine.abort(request_id)
        self.drain()

    def run_tokens(self, num_tokens: int) -> int:
        """Steps until the sequences have emitted so many each, on average; returns how many in all."""
        count = 0
        while count < num_tokens * self.load.concurrency:
            assert self.engine.scheduler.running or not count, f"{count=}: the answers have ended"
            count += sum(len(event.token_ids) for event in self.engine.step())
        return count

    def run_passes(self, num_passes: int) -> int:
        """So many steps; returns the tokens."""
        return sum(len(event.token_ids) for _ in range(num_passes) for event in self.engine.step())

    def drain(self) -> int:
        """Wait for the passes on their way; returns their tokens."""
        self.engine._book(0)
        events, self.engine._events = self.engine._events, []
        return sum(len(event.token_ids) for event in events)

    def num_passes(self) -> int:
        """Passes that the first sequence was in."""
        return self.engine.scheduler.running[0].num_forwards

    @contextlib.contextmanager
    def _toggles(self) -> Iterator[None]:
        original = sampling_op.has_kernels
        if not self.arm.is_fused:
            sampling_op.has_kernels = lambda device: False
        try:
            yield
        finally:
            sampling_op.has_kernels = original


def _parts(model: LoadedModel, arm: Arm, load: Load, max_length: int) -> parts_builder.EngineParts:
    chosen = DECODERS.get(arm.decoder)
    decoder = chosen(chosen.Config(**arm.decoder_options()), model.semantics)
    lane_pages = -(-(max_length - 1 + max_rows(decoder, max_length)) // PAGE_SIZE)
    captures = arm.graphs and model.device.type == "cuda"
    settings = EngineSettings(
        device=str(model.device),
        max_num_seqs=load.concurrency,
        max_length=max_length,
        page_size=PAGE_SIZE,
        num_pages=lane_pages * load.concurrency,
        num_inflight_steps=arm.num_inflight_steps,
        prefix_cache=False,
        graphs="on" if arm.graphs else "off",
        deterministic=arm.deterministic,
        attention="triton" if captures and arm.attention == "auto" else arm.attention,
    )
    return parts_builder._assemble(settings, model, None, decoder, ())


def memory_of(model: LoadedModel, arm: Arm, load: Load) -> float:
    """Bytes of everybody's KV, of the logits of a pass with what becomes of them, and of the drafts' laws."""
    stride = 1 if arm.decoder == "ar" else arm.stride
    num_slots = load.concurrency * (load.context + load.num_tokens + ADAPTIVE_WARM_UP_TOKENS)
    width = stride * stride if arm.strategy == "branch" or arm.adaptive else 2 * stride - 1
    probs = load.concurrency * model.spec.vocab_size * (8 * width + 8 * (stride - 1))
    return num_slots * slot_bytes(model) + probs


def fits(model: LoadedModel, arm: Arm, load: Load) -> bool:
    """Whether a GPU has as much free memory."""
    if model.device.type != "cuda":
        return True
    gc.collect()
    torch.cuda.empty_cache()
    return memory_of(model, arm, load) < SHARE_OF_MEMORY * torch.cuda.mem_get_info()[0]


def slot_bytes(model: LoadedModel) -> int:
    """Keys and values of one token."""
    spec = model.local
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * model.dtype.itemsize


def weights_of(model: LoadedModel) -> list[Tensor]:
    """The matrices that every pass reads, in order; the input embedding is not one of them."""
    layers = [
        (layer.qkv, layer.o, layer.gate_up, layer.down)
        for layer in model.trunk.layers
        if isinstance(layer, DenseLayer)
    ]
    return [*(weight for layer in layers for weight in layer), model.trunk.head]


def floor_ms(model: LoadedModel, load: Load, bytes_per_second: float) -> float:
    """The stream of all weights and of everybody's KV at the middle of a round."""
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights_of(model))
    num_slots = load.concurrency * (load.context + load.num_tokens / 2)
    return 1e3 * (num_bytes + num_slots * slot_bytes(model)) / bytes_per_second


def linears_ms(model: LoadedModel, num_rows: int, *, rounds: int, num_head_rows: int | None = None) -> float:
    """All linears of a pass by stock `F.linear`, replayed as one graph. `num_head_rows`: rows whose logits
    are wanted, None for all.
    """
    *weights, head = weights_of(model)
    inputs_RD = {
        width: torch.randn(num_rows, width, device=model.device, dtype=model.dtype)
        for width in {weight.shape[1] for weight in (*weights, head)}
    }

    def library() -> None:
        for weight in weights:
            F.linear(inputs_RD[weight.shape[1]], weight)
        F.linear(inputs_RD[head.shape[1]][:num_head_rows], head)

    if model.device.type == "cuda":
        return Timer(rounds=rounds, bytes_per_us=0.0).us_per_call([library]) / 1e3
    begun = time.perf_counter()
    library()
    return 1e3 * (time.perf_counter() - begun)
