"""Builds the parts of an engine from a checkpoint directory and checked options: start reading at `build`."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from idlm.devices import require_gpu
from idlm.errors import UserError
from idlm.infer.accelerators.base import EngineSpec
from idlm.infer.decoders.base import Decoder, choose_decoder, max_rows, rows_by_mode
from idlm.infer.eos import eos_ids
from idlm.infer.memory.base import MEMORY_MANAGERS, MemoryManager
from idlm.infer.models import fp8
from idlm.infer.models.loader import LoadedModel, Outline, load_outline, read_outline
from idlm.infer.models.shards import ALONE, Shards
from idlm.infer.options import EngineOptions, decoder_config
from idlm.infer.runtime.cuda_graphs import StaticStep
from idlm.infer.runtime.memory_check import check_memory, memory_demand, translate_memory_errors
from idlm.infer.runtime.model_runner import EagerStep, Runner, Step, StepResult, head_shape, set_deterministic
from idlm.infer.runtime.stride_controller import StrideController
from idlm.infer.scheduler import Scheduler
from idlm.infer.settings import EngineSettings
from idlm.infer.sparse.stack import NO_ACCELERATORS, AcceleratorStack, stack_of
from idlm.infer.state.batch import Schedule
from idlm.infer.state.kv_cache import KV_STORES
from idlm.infer.state.kv_policy import KVWritePolicy
from idlm.infer.state.page_pool import PagePool
from idlm.infer.state.prefix_cache import PrefixCache
from idlm.infer.state.sequence_state import SequenceState
from idlm.infer.stop_strings import IncrementalDetokenizer
from idlm.kernels.paged_attention import problems as attention_problems
from idlm.kernels.paged_attention.backends import AUTO
from idlm.log import get_logger
from idlm.text.chat import encode_prompt
from idlm.text.detokenizer import Detokenizer, answer_text
from idlm.text.tokenizer import check_vocabulary, load_tokenizer

PAGE_SIZE = 16
MIN_LANE_BYTES = 256
"""Estimated bytes of one lane's counters on the device and of its bookkeeping on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What `Engine` is made of. Without a `tokenizer` (None), prompts and answers are token ids only.

    `stride_controller` is None if the decoder has one mode only.
    """

    settings: EngineSettings
    model: LoadedModel
    tokenizer: Any
    eos_ids: tuple[int, ...]
    decoder: Decoder
    table: SequenceState
    pool: PagePool
    scheduler: Scheduler
    stride_controller: StrideController | None
    runner: Runner
    stack: AcceleratorStack
    step: Callable[[Schedule], StepResult]

    @property
    def is_lossy(self) -> bool:
        """Whether answers may follow another distribution than that of the checkpoint and its decoder."""
        return self.settings.is_lossy or self.stack.is_lossy or self.decoder.exactness != "exact"

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a text prompt, through the chat template if the tokenizer has one.

        Raises UserError IDLM-0414 without a tokenizer.
        """
        if self.tokenizer is None:
            raise UserError(
                "IDLM-0414", "the checkpoint has no tokenizer files", fix="give prompts as token ids"
            )
        if not prompt:
            return []
        template, max_tokens = self.settings.chat_template, self.settings.max_length
        return list(encode_prompt(self.tokenizer, prompt, template=template, max_tokens=max_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer; empty without a tokenizer."""
        return "" if self.tokenizer is None else answer_text(self.tokenizer, token_ids)

    def detokenizer(self) -> IncrementalDetokenizer:
        """A new incremental detokenizer; its pieces add up to what `decode` returns."""
        return Detokenizer(self.tokenizer)


def build(path: str | Path, options: EngineOptions, shards: Shards = ALONE) -> EngineParts:
    """Load the model of a checkpoint directory, choose its decoder, and allocate what the engine needs.

    With tensor parallelism each rank builds its own shard, and rank 0 alone loads a tokenizer.
    """
    path, settings = Path(path), options.settings
    device = shards.device(resolve_device(settings.device))
    fp8.check_device(device, is_wanted=settings.is_lossy)
    # What the checkpoint's small files refuse is refused before weights are read.
    outline = read_outline(
        path, dtype=settings.dtype, mask_token_id=settings.mask_token_id, base=settings.base, shards=shards
    )
    chosen = choose_decoder(options.decoder, outline.semantics)
    config = options.decoder_config or decoder_config(chosen, options.decoder_options)
    decoder = chosen(config, outline.semantics)
    model = _load(outline, settings, device, shards)
    tokenizer = None if shards.rank else _tokenizer(path, model)
    settings = dataclasses.replace(
        settings,
        max_length=_max_length(settings, model),
        page_size=_page_size(settings, decoder.kv_policy.block_size),
    )
    _check_mask_row(settings, model, decoder)
    stack = _stack(settings, model, decoder, dataclasses.asdict(config), options.accelerators)
    return _assemble(settings, model, tokenizer, decoder, eos_ids(model, tokenizer), shards, stack)


def _load(outline: Outline, settings: EngineSettings, device: torch.device, shards: Shards) -> LoadedModel:
    model = load_outline(outline, device=device, shards=shards)
    if settings.weights == "fp8":
        fp8.quantise(model.trunk)
    return model


def _tokenizer(path: Path, model: LoadedModel) -> Any:
    """The tokenizer in `path` (an adapter may bring its own), else the model's; None if there is none."""
    tokenizer = load_tokenizer(path) or load_tokenizer(model.directory)
    if tokenizer is not None:
        check_vocabulary(tokenizer, model.spec.vocab_size)
    return tokenizer


def _check_mask_row(settings: EngineSettings, model: LoadedModel, decoder: Decoder) -> None:
    """Raise UserError IDLM-0606 if the embedding of MASK is not finite: attention would spread it."""
    mask_token_id = model.semantics.mask_token_id
    assert settings.max_length is not None
    if mask_token_id is None or max_rows(decoder, settings.max_length) == 1:
        return
    row_D = model.trunk.embed[mask_token_id] if model.trunk.mask_row is None else model.trunk.mask_row
    if not bool(row_D.isfinite().all()):
        raise UserError(
            "IDLM-0606",
            f"the embedding row of mask_token_id={mask_token_id} has values that are not finite",
            fix="give the id that the checkpoint was trained with, or decoder=ar, which needs no mask",
        )


def _assemble(
    settings: EngineSettings,
    model: LoadedModel,
    tokenizer: Any,
    decoder: Decoder,
    eos_ids: tuple[int, ...],
    shards: Shards = ALONE,
    stack: AcceleratorStack = NO_ACCELERATORS,
) -> EngineParts:
    assert settings.max_length is not None
    device, dtype, max_length = model.trunk.embed.device, model.trunk.embed.dtype, settings.max_length
    num_lanes, kv_dtype = _num_lanes(settings), _kv_dtype(settings, model)
    _check_lanes(settings, decoder, device)
    with translate_memory_errors(device):
        decoder.allocate(num_lanes, max_length, model.spec.vocab_size, dtype=dtype, device=device)
        memory = MEMORY_MANAGERS.get(settings.memory)()
        pool = _pool(settings, model, decoder, stack, shards, memory)
        stack.allocate_pages(pool.num_pages)
        cache = KV_STORES[decoder.kv_policy.kind](
            (
                model.spec.num_layers,
                pool.num_pages * pool.page_size,
                model.local.num_kv_heads,
                model.spec.head_dim,
            ),
            dtype=kv_dtype,
            device=device,
            scales=None if kv_dtype == dtype else model.kv_scales,
        )
        table = SequenceState(num_lanes, max_length, device)
    attention = _attention(settings, model, kv_dtype)
    settings = _resolve_graphs(settings, attention, model, stack.eager)
    set_deterministic(model, settings.deterministic)
    runner = Runner(model, cache, pool, attention=attention, stack=stack, memory=memory)
    return EngineParts(
        settings=settings,
        model=model,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        decoder=decoder,
        table=table,
        pool=pool,
        scheduler=Scheduler(
            pool,
            num_lanes=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            num_rows=functools.partial(max_rows, decoder),
            max_emitted=max(mode.stride for mode in decoder.modes),
            kv_policy=decoder.kv_policy,
        ),
        stride_controller=None
        if len(decoder.modes) == 1
        else StrideController(decoder.modes, rows_by_mode(decoder, max_length), decoder.tokens_per_forward),
        runner=runner,
        stack=stack,
        step=_step(settings, Step(decoder=decoder, table=table, runner=runner)),
    )


def _num_lanes(settings: EngineSettings) -> int:
    """Lanes of the device tables: one per running sequence, and one for the padding of static shapes."""
    return settings.max_num_seqs + 1


def _check_lanes(settings: EngineSettings, decoder: Decoder, device: torch.device) -> None:
    """Raise UserError IDLM-0405 if the token ids and page numbers of all lanes cannot fit in memory."""
    assert settings.max_length is not None
    max_pages = -(-_max_slots(settings, decoder) // settings.slots_per_page)
    lane_bytes = MIN_LANE_BYTES + 8 * (settings.max_length + 1 + max_pages)
    what = f"the tokens of max_num_seqs={settings.max_num_seqs} sequences of max_length={settings.max_length}"
    check_memory(what, _num_lanes(settings) * lane_bytes, device)


def _kv_dtype(settings: EngineSettings, model: LoadedModel) -> torch.dtype:
    return torch.float8_e4m3fn if settings.kv_cache == "fp8" else model.dtype


def _max_slots(settings: EngineSettings, decoder: Decoder) -> int:
    assert settings.max_length is not None
    return decoder.kv_policy.num_slots(settings.max_length, max_rows(decoder, settings.max_length))


def _stack(
    settings: EngineSettings,
    model: LoadedModel,
    decoder: Decoder,
    options: dict[str, Any],
    configs: Mapping[str, Any],
) -> AcceleratorStack:
    """The accelerators from their `configs` by name; `options` are those of the decoder."""
    kv_policy, local = decoder.kv_policy, model.local
    spec = EngineSpec(
        decoder=decoder.name,
        decoder_options=options,
        block_size=kv_policy.block_size if kv_policy.kind == "block" else None,
        is_shifted=model.semantics.logit_shift,
        num_layers=local.num_layers,
        num_heads=local.num_heads,
        num_kv_heads=local.num_kv_heads,
        head_dim=local.head_dim,
        dtype=model.dtype,
        kv_dtype=_kv_dtype(settings, model),
        num_lanes=_num_lanes(settings),
        max_slots=_max_slots(settings, decoder),
        page_size=settings.slots_per_page,
        device=model.device,
        tensor_parallel=settings.tensor_parallel,
        deterministic=settings.deterministic,
        graphs=settings.graphs,
    )
    return stack_of(configs, spec)


def _pool(
    settings: EngineSettings,
    model: LoadedModel,
    decoder: Decoder,
    stack: AcceleratorStack,
    shards: Shards,
    memory: MemoryManager,
) -> PagePool:
    """The pool of KV pages; the memory manager decides how many, after accelerators allocated their state."""
    demand = memory_demand(settings, model, decoder, _kv_dtype(settings, model), stack.allocate())
    if settings.num_pages is not None:
        check_memory(f"num_pages={settings.num_pages}", settings.num_pages * demand.page_bytes, model.device)
    return PagePool(
        num_pages=settings.num_pages or shards.least(memory.plan(demand).num_pages),
        page_size=settings.slots_per_page,
        num_lanes=_num_lanes(settings),
        max_slots=_max_slots(settings, decoder),
        device=model.device,
        cache=_prefix_cache(settings, model, decoder.kv_policy),
    )


def _attention(settings: EngineSettings, model: LoadedModel, kv_dtype: torch.dtype) -> str:
    """The back end of paged attention: the one asked for, or for "auto" the first that supports the model.

    Raises UserError IDLM-0422 with the reasons of every back end tried.
    """
    names = AUTO[model.device.type] if settings.attention == "auto" else (settings.attention,)
    reasons = {}
    for name in names:
        reasons[name] = attention_problems(
            name,
            head_shape(model, kv_dtype),
            device=model.device,
            deterministic=settings.deterministic,
        )
        if not reasons[name]:
            return name
    tried = "; ".join(f"{name}: {', '.join(found)}" for name, found in reasons.items())
    asked = f"attention={settings.attention}, kv_cache={settings.kv_cache}"
    asked += ", deterministic=true" * settings.deterministic
    raise UserError(
        "IDLM-0422",
        f"{asked} is not available for this model here: {tried}",
        fix="use attention=auto on a GPU",
    )


def _resolve_graphs(
    settings: EngineSettings, attention: str, model: LoadedModel, eager: list[str]
) -> EngineSettings:
    """Settings with `graphs` "on" or "off" and a number of `num_inflight_steps`.

    `eager` names the accelerators whose steps have dynamic shapes, which CUDA graphs cannot capture.
    """
    is_cuda, graphs = model.device.type == "cuda", settings.graphs
    waits = f"attention={attention}" * (attention != "triton")
    if graphs == "auto":
        graphs = "on" if is_cuda and not waits and not eager else "off"
        if is_cuda and not waits and eager:
            get_logger(__name__).info(
                "graphs=off: CUDA graphs cannot capture steps of accelerator %s", ", ".join(eager)
            )
    if graphs == "on" and is_cuda and waits:
        raise UserError(
            "IDLM-0424",
            f"graphs=on captures kernels that never wait for the host; {waits} would wait",
            fix="give attention=triton, or graphs=off",
        )
    ahead = 4 if is_cuda and graphs == "on" else 0
    return dataclasses.replace(
        settings,
        graphs=graphs,
        num_inflight_steps=ahead if settings.num_inflight_steps is None else settings.num_inflight_steps,
    )


def _step(settings: EngineSettings, step: Step) -> EagerStep | StaticStep:
    """Runs a schedule: with eager shapes, or with static shapes (in CUDA graphs on a GPU)."""
    if settings.graphs == "off":
        return EagerStep(step)
    captures = step.table.device.type == "cuda"
    return StaticStep(step, spare_lane=settings.max_num_seqs, captures=captures)


def _prefix_cache(settings: EngineSettings, model: LoadedModel, policy: KVWritePolicy) -> PrefixCache | None:
    """The prefix cache of this engine; None if it is off, if nothing is stored, or if pages split blocks.

    KV of a block depends on tokens after the end of such a page; `_page_size` warns about it.
    """
    if not settings.prefix_cache or policy.kind == "none" or settings.slots_per_page % policy.block_size:
        return None
    namespace = (str(model.directory), model.architecture, str(model.dtype), str(model.device))
    return PrefixCache((*namespace, settings.weights, settings.kv_cache), page_size=settings.slots_per_page)


def _page_size(settings: EngineSettings, block_size: int) -> int:
    """Slots per page: the setting, or the fewest whole blocks of `block_size` that hold `PAGE_SIZE` slots."""
    page_size = settings.page_size
    if page_size is None:
        return -(-PAGE_SIZE // block_size) * block_size
    if settings.prefix_cache and page_size % block_size:
        warnings.warn(
            f"page_size={page_size} ends inside a block of {block_size}, so KV cannot be shared and "
            f"the prefix cache is off; give page_size={-(-page_size // block_size) * block_size}, or "
            "prefix_cache=false",
            stacklevel=4,
        )
    return page_size


def resolve_device(device: str) -> torch.device:
    """The torch device of a name; "auto" is the first GPU if there is one, else the CPU.

    Raises UserError IDLM-0417 for a name that no engine runs on.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved: torch.device | None = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in AUTO:
        problem = f"device={device!r} is not a device that the engine runs on"
        raise UserError("IDLM-0417", problem, fix="use auto, cpu or cuda:0")
    require_gpu(device, key="device")
    return resolved


def _max_length(settings: EngineSettings, model: LoadedModel) -> int:
    context, trained = model.spec.max_positions, model.spec.trained_length
    if trained is not None and settings.max_length is not None and settings.max_length > trained:
        warnings.warn(
            f"max_length={settings.max_length} is more than the {trained} tokens that the model was trained "
            "with: beyond them answers get worse",
            stacklevel=2,
        )
    if settings.max_length is not None and settings.max_length > context:
        raise UserError(
            "IDLM-0420",
            f"max_length={settings.max_length} is more than the {context} positions of the model",
            fix=f"give max_length <= {context}",
        )
    return settings.max_length or trained or context
