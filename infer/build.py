"""Builds the parts of an engine from a checkpoint directory and checked options: start reading at `build`."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from idlm.checkpoint import read_json
from idlm.contracts import SamplingParams
from idlm.devices import is_out_of_memory, require_gpu
from idlm.errors import UserError, some_of
from idlm.infer.decoders.base import Decoder, KVWritePolicy, choose_decoder, max_rows, rows_by_mode
from idlm.infer.decoders.selector import PathSelector
from idlm.infer.memory.base import (
    MEMORY_MANAGERS,
    MemoryDemand,
    MemoryManager,
    MemoryPlan,
    Transient,
    plans_canvases,
)
from idlm.infer.models import fp8, moe
from idlm.infer.models.adapter import Adapter
from idlm.infer.models.base import ALONE, Shards
from idlm.infer.models.loader import LoadedModel, Outline, load_outline, read_outline, slot_share
from idlm.infer.mosaic.arena import open_arena
from idlm.infer.mosaic.canvas import canvas_shape
from idlm.infer.mosaic.canvas_runner import CanvasRunner, resolve_canvases
from idlm.infer.parts import EngineParts
from idlm.infer.runtime.deterministic import check_products, is_cheap, request_strict_products
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.graphs.pass_costs import MAX_SLOWDOWNS, WEIGHT_ROWS, PassCosts
from idlm.infer.runtime.graphs.pass_shape import PROMPT_BUCKETS, max_stored_rows
from idlm.infer.runtime.model_runner import EagerStep, PassRunner, Runner, Step, head_shape
from idlm.infer.runtime.stride_controller import StrideController
from idlm.infer.scheduler import Scheduler
from idlm.infer.settings import EngineOptions, EngineSettings, decoder_config
from idlm.infer.sparse.accelerator import EngineSpec
from idlm.infer.sparse.stack import AcceleratorStack, stack_of
from idlm.infer.state.page_pool import KVCache, PagePool, PrefixCache
from idlm.infer.state.sequence_state import SequenceState
from idlm.infer.structured.grammar import GrammarCompiler
from idlm.kernels.backend import memory_bytes
from idlm.kernels.paged_attention import problems as attention_problems
from idlm.kernels.paged_attention.op import AUTO
from idlm.log import get_logger
from idlm.selector import check_selector
from idlm.text.tokenizer import check_vocabulary, load_tokenizer, stop_token_ids

PAGE_SIZE = 16
LOADS = ((60 << 30, 256, 8192), (30 << 30, 128, 4096), (0, 64, 2048))
"""Defaults of a GPU by the least memory that it has: sequences that run at once, and prompt rows of a pass.
They need a warm-up: without one, each number of prompt rows is captured in traffic.
Arrivals that are stored in few rows take part in decoding late: of 256 sequences on an H200, 8,192 rows a
pass decode 27 % faster than 2,048."""
OTHER_LOAD = 64, 1024
"""Without a warm-up, on a CPU, and for decoders of blocks or canvases, whose rows fill a GPU."""
MIN_LANE_BYTES = 256
"""Estimated bytes of one lane's counters on the device and of its bookkeeping on the host."""
# Sizes beyond 64 bits raise a plain RuntimeError with one of these texts.
OVERFLOW_TEXTS = ("Storage size calculation overflowed", "invalid size")
MEMORY_FIX = "lower max_num_seqs, max_length or num_pages"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Sizes of one engine: a lane per running sequence and one for the padding of static shapes; canvases of
    a request without options; decoding rows of a pass, and KV slots of one sequence, at most."""

    num_lanes: int
    max_length: int
    num_canvases: int
    decoding_rows: int
    max_slots: int
    kv_dtype: torch.dtype


def _sizes(settings: EngineSettings, model: LoadedModel, decoder: Decoder) -> _Sizes:
    assert settings.max_length is not None
    policy, num_rows = decoder.kv_policy, max_rows(decoder, settings.max_length)
    num_canvases, page_size = decoder.num_canvases(SamplingParams()), settings.slots_per_page
    num_slots = policy.num_slots(settings.max_length, num_rows)
    return _Sizes(
        num_lanes=settings.max_sequences + 1,
        max_length=settings.max_length,
        num_canvases=num_canvases,
        decoding_rows=policy.max_rows(
            settings.max_sequences, num_canvases * num_rows, budget=settings.row_budget
        ),
        max_slots=(decoder.max_canvases - 1) * -(-num_slots // page_size) * page_size + num_slots,
        kv_dtype=torch.float8_e4m3fn if settings.kv_cache == "fp8" else model.dtype,
    )


def read_checkpoint(
    path: str | Path, options: EngineOptions, shards: Shards = ALONE
) -> tuple[Outline, Decoder]:
    """The checkpoint without its weights, and its decoder, both checked."""
    settings = options.settings
    outline = read_outline(
        path,
        dtype=settings.dtype,
        mask_token_id=settings.mask_token_id,
        base=settings.base,
        adapters=settings.adapters,
        rope_factor=settings.rope_factor,
        shards=shards,
    )
    chosen = choose_decoder(options.decoder, outline.semantics)
    config = options.decoder_config or decoder_config(chosen, options.decoder_options)
    decoder = chosen(config, outline.semantics)
    if len(outline.adapters) > 1:
        _check_drafts(outline.adapters, decoder)
    if decoder.takes_selector and outline.semantics.selector is not None:
        spec = outline.spec
        check_selector(outline.semantics.selector, Path(path), vocab_size=spec.vocab_size, width=spec.width)
    return outline, decoder


def _check_drafts(adapters: tuple[Adapter, ...], decoder: Decoder) -> None:
    """Raise UserError IDLM-0626 for several adapters that the decoder cannot draft with in one pass."""
    stride = max(mode.stride for mode in decoder.modes) if decoder.kv_policy.has_drafts else 1
    for adapter in adapters[1:]:
        trained = adapter.semantics.stride
        if trained < stride:
            raise UserError(
                "IDLM-0626",
                f"adapter {adapter.directory} was trained for stride {trained}, and {adapters[0].directory} "
                f"decodes at stride {stride}",
                fix=f"give decoder.stride={trained}, which all of them reach, or leave that adapter out",
            )
    selecting = [str(adapter.directory) for adapter in adapters if adapter.semantics.selector is not None]
    if selecting and decoder.takes_selector:
        raise UserError(
            "IDLM-0626",
            f"{some_of(selecting)} has a selector of drafts, which several adapters cannot share",
            fix="give decoder.selector=false, or serve it alone",
        )


def build(path: str | Path, options: EngineOptions, shards: Shards = ALONE) -> EngineParts:
    """Load the model of a checkpoint directory, choose its decoder, and allocate what the engine needs. Each
    rank of tensor parallelism builds its own shard."""
    path, settings = Path(path), options.settings
    device = shards.device(resolve_device(settings.device))
    if settings.deterministic is True:
        request_strict_products(device)
    if settings.is_lossy:
        fp8.check_device(device)
    # What the checkpoint's small files refuse is refused before weights are read.
    outline, decoder = read_checkpoint(path, options, shards)
    if outline.spec.moe is not None:
        moe.check_blocks(outline.spec.moe, feeds_parts=decoder.kv_policy.feeds_parts)
    if plans_canvases(MEMORY_MANAGERS.get(settings.memory)):
        settings = resolve_canvases(settings, decoder.kv_policy, outline, options.accelerators)
    shards = shards.linked(outline.spec.width, outline.dtype)
    model = load_outline(outline, device=device, shards=shards)
    if settings.weights == "fp8":
        fp8.quantise(model.trunk)
    if settings.deterministic is True:
        check_products(model)
    if decoder.takes_selector and model.semantics.selector is not None:
        decoder.selector = PathSelector.load(path, model.trunk)
    tokenizer = None if shards.rank else _tokenizer(path, model)
    max_length = _max_length(settings, model)
    page_size = _page_size(settings, decoder.kv_policy.block_size)
    settings = dataclasses.replace(settings, max_length=max_length, page_size=page_size)
    _check_mask_row(model, max_rows(decoder, max_length))
    end_ids = _eos_ids(model, tokenizer)
    parts = _assemble(settings, model, tokenizer, decoder, end_ids, shards, options.accelerators)
    if not settings.warms_up:
        return parts
    from idlm.infer.runtime.graphs.warm_up import warm_up

    return dataclasses.replace(parts, warm_up=warm_up(parts, shards=shards, assemble=_assemble))


def _assemble(
    settings: EngineSettings,
    model: LoadedModel,
    tokenizer: Any,
    decoder: Decoder,
    eos_ids: tuple[int, ...],
    shards: Shards = ALONE,
    accelerators: Mapping[str, Any] | None = None,
) -> EngineParts:
    """Allocate the state of sequences and the KV pool, and join them with model, decoder and scheduler."""
    settings = _with_loads(settings, model.device, decoder.kv_policy)
    if settings.deterministic == "auto":
        settings = dataclasses.replace(settings, deterministic=is_cheap(settings, model, decoder))
    model.trunk.linears.deterministic = settings.is_deterministic
    sizes = _sizes(settings, model, decoder)
    stack = None if not accelerators else stack_of(accelerators, _spec(settings, model, decoder, sizes))
    device, size, max_length = model.device, model.spec.vocab_size, sizes.max_length
    _check_lanes(settings, sizes, device)
    with translate_memory_errors(device):
        decoder.allocate(sizes.num_lanes, max_length, size, dtype=model.dtype, device=device)
        table = SequenceState(sizes.num_lanes, max_length, device, adapters=tuple(settings.adapters))
        memory = MEMORY_MANAGERS.get(settings.memory)()
        pool, planned = _pool(settings, model, decoder, sizes, stack, shards, memory)
        attention = _attention(settings, model, sizes.kv_dtype)
        runner: PassRunner
        if plans_canvases(memory):
            arena = open_arena(settings.memory_arena, device)
            runner = CanvasRunner(model, arena, pool, capacity=planned.workspace_bytes)
        else:
            cache = _kv_cache(model, decoder.kv_policy, sizes.kv_dtype, pool.num_pages * pool.page_size)
            options: dict[str, Any] = {"attention": attention, "stack": stack, "memory": memory}
            runner = Runner(model, pool, cache, gates_Z=table.gates_Z, **options)
    settings = _resolve_graphs(settings, attention, model, stack.eager if stack else [], decoder.kv_policy)
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
            num_lanes=settings.max_sequences,
            max_num_batched_tokens=settings.row_budget,
            num_rows=functools.partial(max_rows, decoder),
            max_emitted=max(mode.stride for mode in decoder.modes),
            kv_policy=decoder.kv_policy,
            decodes_again=stack is not None and stack.decodes_again,
            costs=_pass_costs(model, decoder, sizes, settings),
            max_slowdown=MAX_SLOWDOWNS[settings.schedule],
        ),
        stride_controller=_stride_controller(decoder, settings, model.semantics.acceptance),
        runner=runner,
        stack=stack,
        step=_step(settings, model, Step(decoder=decoder, table=table, runner=runner)),
        grammars=functools.cache(lambda: GrammarCompiler(tokenizer, model.spec.vocab_size, eos_ids)),
    )


def _pass_costs(
    model: LoadedModel, decoder: Decoder, sizes: _Sizes, settings: EngineSettings
) -> PassCosts | None:
    """Costs of passes before a warm-up measures them; None for decoders of whole canvases."""
    if decoder.kv_policy.kind == "none":
        return None
    # Passes read nearly all experts, and compute few for each row.
    experts = model.local.moe
    weight_rows = WEIGHT_ROWS * (1.0 if experts is None else experts.num_experts / experts.num_chosen)
    is_padded = settings.graphs == "on" and decoder.kv_policy.kind == "append"
    return PassCosts(
        by_rows=((weight_rows, weight_rows),),
        slot_rows=weight_rows * slot_share(model, sizes.kv_dtype.itemsize),
        # With several modes the narrowest counts, which many sequences use.
        sequence_rows=min(rows_by_mode(decoder, sizes.max_length)),
        graph_rows=PROMPT_BUCKETS[1:] if is_padded else (),
    )


def _stride_controller(
    decoder: Decoder, settings: EngineSettings, acceptance: tuple[float, ...]
) -> StrideController | None:
    """The choice among the decoder's modes; None if it has one."""
    if len(decoder.modes) == 1:
        return None
    assert settings.max_length is not None
    return StrideController(
        decoder.modes,
        rows_by_mode(decoder, settings.max_length),
        decoder.tokens_per_forward,
        acceptance=acceptance,
        max_slowdown=MAX_SLOWDOWNS[settings.schedule],
    )


def _with_loads(settings: EngineSettings, device: torch.device, policy: KVWritePolicy) -> EngineSettings:
    """Settings with numbers of sequences and of prompt rows, by the device's memory."""
    maximum, rows = OTHER_LOAD
    if device.type == "cuda" and policy.kind == "append" and settings.warms_up:
        total = memory_bytes(device)[1]
        maximum, rows = next(load[1:] for load in LOADS if total >= load[0])
    return dataclasses.replace(
        settings,
        max_num_seqs=settings.max_num_seqs or maximum,
        max_num_batched_tokens=settings.max_num_batched_tokens or rows,
    )


def _tokenizer(path: Path, model: LoadedModel) -> Any:
    """The tokenizer in `path` (an adapter may bring its own), else the model's; None if there is none."""
    tokenizer = load_tokenizer(path) or load_tokenizer(model.directory)
    if tokenizer is not None:
        check_vocabulary(tokenizer, model.spec.vocab_size)
    return tokenizer


def _eos_ids(model: LoadedModel, tokenizer: Any) -> tuple[int, ...]:
    """The stop ids of the checkpoint's semantics, else those that transformers uses and the tokenizer's: of
    config.json if generation_config.json is missing, or without a tokenizer has none. Raises IDLM-0216."""
    if model.semantics.stop_token_ids:
        return model.semantics.stop_token_ids
    path = model.directory / "generation_config.json"
    generation = read_json(path) if path.exists() else None
    if generation is None or (tokenizer is None and "eos_token_id" not in generation):
        return stop_token_ids(tokenizer, read_json(model.directory / "config.json"), source="config.json")
    return stop_token_ids(tokenizer, generation)


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


def _check_mask_row(model: LoadedModel, num_rows: int) -> None:
    """Raise UserError IDLM-0606 if an embedding of MASK is not finite: attention would spread it."""
    meaning, trunk = model.semantics, model.trunk
    if meaning.draft_input is None or num_rows == 1:
        return
    if meaning.noise_range:
        what, rows_VD = f"noise_range={[*meaning.noise_range]}", trunk.embed[slice(*meaning.noise_range)]
    else:
        what = f"mask_token_id={meaning.mask_token_id}"
        rows_VD = trunk.embed[meaning.mask_token_id] if trunk.mask_rows_LD is None else trunk.mask_rows_LD
    # A sum, which takes no memory for a flag of every number.
    if not bool(rows_VD.sum(dtype=torch.float64).isfinite()):
        raise UserError(
            "IDLM-0606",
            f"the embedding of {what} has values that are not finite",
            fix="give the ids that the checkpoint was trained with, or decoder=ar, which needs none",
        )


def _spec(settings: EngineSettings, model: LoadedModel, decoder: Decoder, sizes: _Sizes) -> EngineSpec:
    """The engine as accelerators see it."""
    budget, num_sequences = settings.row_budget, settings.max_sequences
    policy, local, others = decoder.kv_policy, model.local, model.spec.variant.others
    stored_rows = max_stored_rows(policy, budget=budget, num_sequences=num_sequences)
    return EngineSpec(
        decoder=decoder.name,
        decoder_options=asdict(decoder.config),
        block_size=policy.block_size if policy.kind == "block" else None,
        num_layers=local.num_layers,
        heads=head_shape(model, sizes.kv_dtype),
        device=model.device,
        routes_blocks=local.moe is not None and local.moe.capacity is not None,
        has_windows=others is not None and others.window is not None,
        semantics=model.semantics,
        num_lanes=sizes.num_lanes,
        max_slots=sizes.max_slots,
        max_rows=sizes.decoding_rows + stored_rows,
        page_size=settings.slots_per_page,
        num_slots=None if settings.num_pages is None else settings.num_pages * settings.slots_per_page,
        tensor_parallel=settings.tensor_parallel,
        deterministic=settings.is_deterministic,
        graphs=settings.graphs,
    )


def _check_lanes(settings: EngineSettings, sizes: _Sizes, device: torch.device) -> None:
    """Raise UserError IDLM-0405 if the token ids and page numbers of all lanes cannot fit in memory."""
    max_pages = -(-sizes.max_slots // settings.slots_per_page)
    lane_bytes = MIN_LANE_BYTES + 8 * (sizes.max_length + 1 + max_pages)
    what = f"the tokens of max_num_seqs={settings.max_sequences} sequences of max_length={sizes.max_length}"
    _check_memory(what, sizes.num_lanes * lane_bytes, device)


def _check_memory(what: str, num_bytes: int, device: torch.device) -> None:
    """Raise UserError IDLM-0405 if `what` takes more bytes than the whole memory of `device`."""
    total = memory_bytes(device)[1]
    if num_bytes > total:
        message = f"{what}: {num_bytes:,} bytes; {device} has {total:,}"
        raise UserError("IDLM-0405", message, fix=MEMORY_FIX)


@contextmanager
def translate_memory_errors(device: torch.device) -> Iterator[None]:
    """Within this context, a failed allocation raises UserError IDLM-0405."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError) as error:
        overflows = isinstance(error, OverflowError) or any(text in str(error) for text in OVERFLOW_TEXTS)
        if not overflows and not is_out_of_memory(error):
            raise
        message = f"KV pages and the state of sequences do not fit on {device}: {error}"
        raise UserError("IDLM-0405", message, fix=MEMORY_FIX) from error


def _pool(
    settings: EngineSettings,
    model: LoadedModel,
    decoder: Decoder,
    sizes: _Sizes,
    stack: AcceleratorStack | None,
    shards: Shards,
    memory: MemoryManager,
) -> tuple[PagePool, MemoryPlan]:
    """The pool of KV pages, as many as the memory manager decides. Accelerators allocate their state: that of
    lanes first, whose memory pages must not take."""
    spec, policy, page_size = model.local, decoder.kv_policy, settings.slots_per_page
    num_layers = 1 if policy.shares_layers else spec.num_layers
    slot_bytes = 2 * num_layers * spec.num_kv_heads * spec.head_dim * sizes.kv_dtype.itemsize
    canvas = canvas_shape(spec, model.dtype) if plans_canvases(memory) else None
    slot_bytes += 0 if canvas is None else canvas.x_bytes
    max_pages = -(-sizes.max_slots // page_size) * settings.max_sequences
    if policy.shares_layers:
        # Canvases of one pass, each of which may leave part of a page unused.
        num_canvases = sizes.num_canvases * settings.max_sequences
        max_pages = min(max_pages, -(-sizes.decoding_rows // page_size) + num_canvases)
    demand = MemoryDemand(
        device=model.device,
        transient=Transient(row_bytes=spec.vocab_size * model.dtype.itemsize, num_rows=sizes.decoding_rows),
        page_bytes=slot_bytes * page_size + (0 if stack is None else stack.allocate()),
        max_pages=max_pages,
        pass_bytes=0 if stack is None else stack.pass_bytes(),
        canvas=canvas,
        page_size=page_size,
    )
    planned = MemoryPlan() if settings.num_pages and canvas is None else memory.plan(demand)
    if settings.num_pages is not None:
        num_bytes = settings.num_pages * demand.page_bytes
        _check_memory(f"num_pages={settings.num_pages}", num_bytes, model.device)
    # KV of a block that a page splits depends on tokens after the page; `_page_size` warns of that.
    has_cache = settings.prefix_cache and policy.kind != "none" and page_size % policy.block_size == 0
    pool = PagePool(
        num_pages=settings.num_pages or shards.minimum(planned.num_pages),
        page_size=page_size,
        num_lanes=sizes.num_lanes,
        max_slots=sizes.max_slots,
        device=model.device,
        cache=PrefixCache() if has_cache else None,
    )
    if stack is not None:
        stack.allocate_pages(pool.num_pages)
    return pool, planned


def _kv_cache(model: LoadedModel, policy: KVWritePolicy, dtype: torch.dtype, num_slots: int) -> KVCache:
    num_layers = 1 if policy.shares_layers else model.spec.num_layers
    return KVCache(
        (num_layers, num_slots, model.local.num_kv_heads, model.spec.head_dim),
        dtype=dtype,
        device=model.device,
        scales=None if dtype == model.dtype else model.kv_scales,
    )


def _attention(settings: EngineSettings, model: LoadedModel, kv_dtype: torch.dtype) -> str:
    """The requested back end, or for "auto" the first that supports the model. Raises UserError IDLM-0422."""
    names = AUTO[model.device.type] if settings.attention == "auto" else (settings.attention,)
    heads, deterministic, reasons = head_shape(model, kv_dtype), settings.is_deterministic, {}
    for name in names:
        reasons[name] = attention_problems(name, heads, device=model.device, deterministic=deterministic)
        if not reasons[name]:
            return name
    tried = "; ".join(f"{name}: {', '.join(found)}" for name, found in reasons.items())
    options = f"attention={settings.attention}, kv_cache={settings.kv_cache}"
    options += ", deterministic=true" * deterministic
    raise UserError(
        "IDLM-0422",
        f"{options} is not available for this model here: {tried}",
        fix="use attention=auto on a GPU",
    )


def _resolve_graphs(
    settings: EngineSettings, attention: str, model: LoadedModel, eager: list[str], policy: KVWritePolicy
) -> EngineSettings:
    """Settings with `graphs` "on" or "off" and `num_inflight_steps`. `eager` accelerators exclude graphs."""
    is_cuda, graphs = model.device.type == "cuda", settings.graphs
    waits = attention != "triton"
    if graphs == "auto":
        graphs = "on" if is_cuda and not waits and not eager else "off"
        if is_cuda and not waits and eager:
            get_logger(__name__).info(
                "graphs=off: CUDA graphs cannot capture steps of accelerator %s", ", ".join(eager)
            )
    if graphs == "on" and is_cuda and waits:
        raise UserError(
            "IDLM-0424",
            f"graphs=on captures kernels that never wait for the host; attention={attention} would wait",
            fix="give attention=triton, or graphs=off",
        )
    num_inflight = settings.num_inflight_steps
    if num_inflight is None:
        # With `reuse` only the results of a pass show how many rows the next one needs.
        num_inflight = 4 if is_cuda and graphs == "on" and policy.reuse is None else 0
    return dataclasses.replace(settings, graphs=graphs, num_inflight_steps=num_inflight)


def _step(settings: EngineSettings, model: LoadedModel, step: Step) -> EagerStep | StaticStep:
    """Runs a schedule: with eager shapes, or with static shapes (in CUDA graphs on a GPU)."""
    if settings.graphs == "off":
        return EagerStep(step)
    captures, rows = step.table.device.type == "cuda", 0
    if settings.warms_up:
        from idlm.infer.runtime.graphs.warm_up import eager_rows

        rows = eager_rows(model)
    return StaticStep(step, spare_lane=settings.max_sequences, captures=captures, eager_rows=rows)


def resolve_device(device: str) -> torch.device:
    """The torch device of a name; "auto" is the first GPU if there is one. UserError IDLM-0417."""
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
