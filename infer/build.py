"""From a checkpoint directory and keywords to the parts of an engine, with all checks that need no pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from idlm import schema
from idlm.checkpoint import read_json
from idlm.errors import UserError
from idlm.infer.accelerators.base import ACCELERATORS
from idlm.infer.decoders.base import DECODERS, Decoder, default_decoder
from idlm.infer.graphs import StaticStep
from idlm.infer.kv_cache import KVCache, PagePool
from idlm.infer.memory.base import MEMORY_MANAGERS, KVDemand
from idlm.infer.models import fp8
from idlm.infer.models.loader import DTYPES, LoadedModel, load_model
from idlm.infer.pace import AdaptivePace, FixedPace, Pace
from idlm.infer.parallel import ALONE, Shards
from idlm.infer.prefix_cache import PrefixCache
from idlm.infer.runner import Runner, head_shape, set_deterministic
from idlm.infer.scheduler import Schedule, Scheduler
from idlm.infer.step import EagerStep, Step, StepResult
from idlm.infer.table import SequenceTable
from idlm.infer.text import IncrementalDetokenizer
from idlm.kernels.paged_attention import BACKENDS
from idlm.kernels.paged_attention import problems as attention_problems
from idlm.kernels.paged_attention.backends import AUTO
from idlm.suggest import did_you_mean
from idlm.tokens import Detokenizer, check_vocabulary, encode_prompt, load_tokenizer, stop_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Everything about an engine that is neither checkpoint nor decoder.

    `base`: where the base model of a gated adapter is, None for the path that the adapter's config names.
    `max_length`: prompt and answer, None for the model's context. `num_pages` None lets the memory manager
    decide. `max_prompt_rows`: prompt tokens that one pass stores besides decoding. `mask_token_id`
    overrides the checkpoint's. `run_ahead`: passes that may be launched before the results of earlier ones
    are read; None: 4 with CUDA graphs, else 0. `prefix_cache`: keep the KV of finished and preempted
    sequences, and let equal beginnings share it, as long as nobody needs the pages. `graphs`: "on" pads
    passes to a few static shapes and captures each in a CUDA graph (on a CPU they are only padded); "auto"
    does so on a GPU. `attention`: the back end of paged attention. `deterministic`: the logits of a row have
    the same bits whatever else is in the batch, and however many rows the pass has (GPU only).
    `tensor_parallel`: GPUs (on a CPU, processes) that share the model. `weights` and `kv_cache`: "fp8" halves
    the bytes of projections, and of keys and values (e4m3; lossy, and answers say so); "auto" is `dtype`.
    """

    device: str = "auto"
    dtype: str = "auto"
    mask_token_id: int | None = None
    base: str | None = None
    accelerators: tuple[str, ...] = ()
    memory: str = "caching"
    max_num_seqs: int = 64
    max_length: int | None = None
    max_prompt_rows: int = 1024
    page_size: int = 16
    num_pages: int | None = None
    run_ahead: int | None = None
    prefix_cache: bool = True
    graphs: Literal["auto", "on", "off"] = "auto"
    attention: str = "auto"
    deterministic: bool = False
    tensor_parallel: int = 1
    weights: Literal["auto", "fp8"] = "auto"
    kv_cache: Literal["auto", "fp8"] = "auto"
    template: Literal["auto", "none"] = "auto"

    @property
    def is_lossy(self) -> bool:
        """Whether the law is not that of the checkpoint, whatever the decoder does."""
        return "fp8" in (self.weights, self.kv_cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What `Engine` is made of. `tokenizer` None: token ids in and out."""

    settings: EngineSettings
    model: LoadedModel
    tokenizer: Any
    eos_ids: tuple[int, ...]
    decoder: Decoder
    table: SequenceTable
    pool: PagePool
    scheduler: Scheduler
    pace: Pace
    runner: Runner
    step: Callable[[Schedule], StepResult]

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a text prompt, through the chat template where the tokenizer has one."""
        if self.tokenizer is None:
            raise UserError(
                "IDLM-0414", "the checkpoint has no tokenizer files", fix="give prompts as token ids"
            )
        if not prompt:
            return []
        return list(encode_prompt(self.tokenizer, prompt, template=self.settings.template))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh incremental decoder."""
        return Detokenizer(self.tokenizer)


def check_options(decoder: str | None, options: dict[str, Any]) -> tuple[EngineSettings, dict[str, Any]]:
    """The fields of `EngineSettings` and the options of the decoder's Config, told apart by name. A misspelt
    one is known before gigabytes of weights are read.
    """
    settings, decoder_options = _split_options(options)
    if decoder is not None:
        _decoder_config(DECODERS.get(decoder), decoder_options)
    return settings, decoder_options


def build(
    path: str | Path, decoder: str | None, options: dict[str, Any], shards: Shards = ALONE
) -> EngineParts:
    """Load the model, or what of it one of `shards` holds, and size the engine. See `check_options`.

    Only rank 0 loads a tokenizer: the others never see text.
    """
    path = Path(path)
    settings, decoder_options = check_options(decoder, options)
    device = shards.device(resolve_device(settings.device))
    fp8.check_device(device, is_wanted=settings.is_lossy)
    model = load_model(
        path,
        device=device,
        dtype=_resolve_dtype(settings.dtype),
        mask_token_id=settings.mask_token_id,
        base=settings.base,
        shards=shards,
    )
    if settings.weights == "fp8":
        fp8.quantise(model.trunk)
    chosen = DECODERS.get(decoder or default_decoder(model.semantics))
    decoder_object = chosen(_decoder_config(chosen, decoder_options), model.semantics)
    tokenizer = None if shards.rank else load_tokenizer(path) or load_tokenizer(model.directory)
    if tokenizer is not None:
        check_vocabulary(tokenizer, model.spec.vocab_size)
    settings = dataclasses.replace(settings, max_length=_max_length(settings, model))
    return _assemble(settings, model, tokenizer, decoder_object, _eos_ids(model, tokenizer), shards)


def _assemble(
    settings: EngineSettings,
    model: LoadedModel,
    tokenizer: Any,
    decoder: Decoder,
    eos_ids: tuple[int, ...],
    shards: Shards = ALONE,
) -> EngineParts:
    spec, max_length = model.spec, settings.max_length
    assert max_length is not None
    device, dtype = model.trunk.embed.device, model.trunk.embed.dtype
    kv_dtype = torch.float8_e4m3fn if settings.kv_cache == "fp8" else dtype
    # One lane more than anybody sits on: for the padding of passes of static shape.
    num_lanes = settings.max_num_seqs + 1
    decoder.allocate(num_lanes, spec.vocab_size, dtype=dtype, device=device)
    max_slots = decoder.feeding.num_slots(max_length, max(decoder.widths))
    lane_pages = -(-max_slots // settings.page_size)
    slot_bytes = 2 * spec.num_layers * model.local.num_kv_heads * spec.head_dim * kv_dtype.itemsize
    page_bytes, max_pages = slot_bytes * settings.page_size, lane_pages * settings.max_num_seqs
    demand = KVDemand(page_bytes=page_bytes, max_pages=max_pages, device=device)
    num_pages = settings.num_pages or shards.least(MEMORY_MANAGERS.get(settings.memory)().num_pages(demand))
    pool = PagePool(
        num_pages=num_pages,
        page_size=settings.page_size,
        num_lanes=num_lanes,
        max_slots=max_slots,
        device=device,
        cache=_prefix_cache(settings, model, decoder.feeding.grain),
    )
    cache = KVCache(
        (spec.num_layers, num_pages * settings.page_size, model.local.num_kv_heads, spec.head_dim),
        dtype=kv_dtype,
        device=device,
        scales=None if kv_dtype == dtype else model.kv_scales,
    )
    table = SequenceTable(num_lanes, max_length, device)
    attention = _attention(settings, model, kv_dtype)
    settings = _resolve_graphs(settings, attention, model)
    set_deterministic(model, settings.deterministic)
    runner = Runner(model, cache, pool, attention=attention)
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
            max_prompt_rows=settings.max_prompt_rows,
            max_width=max(decoder.widths),
            max_emitted=max(picture.stride for picture in decoder.pictures),
            feeding=decoder.feeding,
        ),
        pace=FixedPace() if len(decoder.pictures) == 1 else AdaptivePace(decoder.pictures, decoder.widths),
        runner=runner,
        step=_step(settings, Step(decoder=decoder, table=table, runner=runner)),
    )


def _attention(settings: EngineSettings, model: LoadedModel, kv_dtype: torch.dtype) -> str:
    """The back end of paged attention: the one asked for, or the first of "auto" that can serve."""
    names = AUTO[model.device.type] if settings.attention == "auto" else (settings.attention,)
    reasons = {}
    for name in names:
        reasons[name] = attention_problems(
            name,
            head_shape(model, kv_dtype),
            page_size=settings.page_size,
            device=model.device,
            deterministic=settings.deterministic,
        )
        if not reasons[name]:
            return name
    told = "; ".join(f"{name}: {', '.join(found)}" for name, found in reasons.items())
    asked = f"attention={settings.attention}, kv_cache={settings.kv_cache}"
    asked += ", deterministic=true" * settings.deterministic
    raise UserError(
        "IDLM-0422", f"{asked} cannot be had for this model here: {told}", fix="use attention=auto on a GPU"
    )


def _resolve_graphs(settings: EngineSettings, attention: str, model: LoadedModel) -> EngineSettings:
    """`graphs` as "on" or "off", and `run_ahead` as a number."""
    is_cuda, graphs = model.device.type == "cuda", settings.graphs
    waits = f"attention={attention}" * (attention != "triton")
    if graphs == "auto":
        graphs = "on" if is_cuda and not waits else "off"
    if graphs == "on" and is_cuda and waits:
        raise UserError(
            "IDLM-0424",
            f"graphs=on captures kernels that never wait for the host; {waits} would wait",
            fix="give attention=triton, or graphs=off",
        )
    ahead = 4 if is_cuda and graphs == "on" else 0
    return dataclasses.replace(
        settings, graphs=graphs, run_ahead=ahead if settings.run_ahead is None else settings.run_ahead
    )


def _step(settings: EngineSettings, step: Step) -> EagerStep | StaticStep:
    """Passes as they come, or of static shape."""
    if settings.graphs == "off":
        return EagerStep(step)
    captures = step.table.device.type == "cuda"
    return StaticStep(step, spare_lane=settings.max_num_seqs, captures=captures)


def _prefix_cache(settings: EngineSettings, model: LoadedModel, grain: int) -> PrefixCache | None:
    """An index of its own for every engine: all that KV depends on beside the tokens is the same in it.

    None as well where a page ends inside a block: its KV depends on tokens behind it.
    """
    if not settings.prefix_cache or settings.page_size % grain:
        return None
    place = (str(model.directory), model.architecture, str(model.dtype), str(model.device))
    return PrefixCache((*place, settings.weights, settings.kv_cache), page_size=settings.page_size)


def _split_options(options: dict[str, Any]) -> tuple[EngineSettings, dict[str, Any]]:
    names = {field.name for field in dataclasses.fields(EngineSettings)}
    mine = {key: value for key, value in options.items() if key in names}
    if isinstance(mine.get("dtype"), torch.dtype):
        mine["dtype"] = str(mine["dtype"]).removeprefix("torch.")
    for name in ("device", "base"):
        if mine.get(name) is not None:
            mine[name] = str(mine[name])
    if "accelerators" in mine:
        given = mine["accelerators"]
        mine["accelerators"] = (given,) if isinstance(given, str) else tuple(given)
    settings = EngineSettings(**mine)
    _check_settings(settings)
    return settings, {key: value for key, value in options.items() if key not in names}


def _check_settings(settings: EngineSettings) -> None:
    problems = [
        f"{name}={value!r} must be an integer >= {least}"
        for name, value, least in (
            ("max_num_seqs", settings.max_num_seqs, 1),
            ("max_prompt_rows", settings.max_prompt_rows, 1),
            ("page_size", settings.page_size, 1),
            ("tensor_parallel", settings.tensor_parallel, 1),
            ("run_ahead", 0 if settings.run_ahead is None else settings.run_ahead, 0),
            ("num_pages", 1 if settings.num_pages is None else settings.num_pages, 1),
            ("max_length", 2 if settings.max_length is None else settings.max_length, 2),
        )
        if not isinstance(value, int) or value < least
    ]
    if settings.deterministic is True and settings.tensor_parallel not in (1, 2):
        problems.append(
            f"deterministic=true with tensor_parallel={settings.tensor_parallel}: the order of sums over "
            "more than two ranks depends on the batch (allowed: 1 and 2)"
        )
    for name, hint in get_type_hints(EngineSettings).items():
        given = getattr(settings, name)
        if get_origin(hint) is Literal and given not in get_args(hint):
            problems.append(f"{name}={given!r} must be one of {', '.join(get_args(hint))}")
        if hint is bool and not isinstance(given, bool):
            problems.append(f"{name}={given!r} must be true or false")
    if settings.attention not in ("auto", *BACKENDS):
        problems.append(
            f"attention={settings.attention!r} is not one of auto, {', '.join(BACKENDS)}"
            f"{did_you_mean(settings.attention, BACKENDS)}"
        )
    if problems:
        raise UserError("IDLM-0415", "; ".join(problems), fix="correct the engine settings named")
    MEMORY_MANAGERS.get(settings.memory)
    for name in settings.accelerators:
        ACCELERATORS.get(name)


def _decoder_config(chosen: type[Decoder], options: dict[str, Any]) -> Any:
    known = [field.name for field in dataclasses.fields(chosen.Config)]
    engine = [field.name for field in dataclasses.fields(EngineSettings)]
    unknown = [key for key in options if key not in known]
    if unknown:
        hints = ", ".join(f"{key!r}{did_you_mean(key, [*known, *engine])}" for key in unknown)
        raise UserError(
            "IDLM-0416",
            f"unknown option {hints}",
            fix=f"decoder {chosen.name!r} takes {known or 'no options'}; the engine takes {engine}",
        )
    problems: list[str] = []
    config = schema.build(chosen.Config, options, problems, "decoder.")
    if problems:
        raise UserError("IDLM-0416", "; ".join(problems), fix=f"correct the options of {chosen.name!r}")
    return config


def resolve_device(device: str) -> torch.device:
    """The device meant: "auto" is the first GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise UserError(
            "IDLM-0417", f"device={device!r} is not a device", fix="use auto, cpu or cuda:0"
        ) from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "IDLM-0418", f"device={device!r}, but torch sees no GPU", fix="use device=cpu or device=auto"
        )
    return resolved


def _resolve_dtype(dtype: str) -> torch.dtype | str:
    if dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise UserError(
            "IDLM-0419", f"dtype={dtype!r} is not one of {['auto', *DTYPES]}", fix="use dtype=auto"
        )
    return DTYPES[dtype]


def _max_length(settings: EngineSettings, model: LoadedModel) -> int:
    context = model.spec.max_positions
    if settings.max_length is not None and settings.max_length > context:
        raise UserError(
            "IDLM-0420",
            f"max_length={settings.max_length} is beyond the {context} positions of the model",
            fix=f"give max_length <= {context}",
        )
    return settings.max_length or context


def _eos_ids(model: LoadedModel, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end an answer: the checkpoint's own list, else tokenizer, generation_config and config."""
    if model.semantics.stop_token_ids:
        return model.semantics.stop_token_ids
    generation_path = model.directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else None
    if tokenizer is not None:
        return tuple(stop_token_ids(tokenizer, generation))
    eos = (generation or {}).get(
        "eos_token_id", read_json(model.directory / "config.json").get("eos_token_id")
    )
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
