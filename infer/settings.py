"""Everything about an engine that is neither checkpoint nor decoder, and keywords sorted and checked before
anything is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from idlm.config import schema
from idlm.config.suggest import did_you_mean
from idlm.contracts import own_number
from idlm.errors import UserError
from idlm.infer.decoders.base import DECODERS, Decoder
from idlm.infer.memory.base import MEMORY_MANAGERS
from idlm.infer.sparse.stack import accelerator_configs, as_options
from idlm.kernels.paged_attention import BACKENDS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Everything about an engine that is neither checkpoint nor decoder.

    `base`: where the base model of a gated adapter is, None for the path that the adapter's config names.
    `max_length`: prompt and answer, None for the model's context. `page_size`: slots of a KV page; None: 16,
    or as many more as whole blocks take. `num_pages` None lets the memory manager decide. `max_num_batched_tokens`:
    prompt tokens that one pass stores besides decoding. `mask_token_id` overrides the checkpoint's.
    `accelerators`: their options by name; names alone will do. `num_inflight_steps`: passes that may be launched
    before the results of earlier ones are read; None: 4 with CUDA graphs, else 0. `prefix_cache`: keep the KV
    of finished and preempted sequences, and let equal beginnings share it, as long as nobody needs the pages.
    `graphs`: "on" pads passes to a few static shapes and captures each in a CUDA graph (on a CPU they are
    only padded); "auto" does so on a GPU. `attention`: the back end of paged attention. `deterministic`: the
    logits of a row have the same bits whatever else is in the batch, and however many rows the pass has (GPU
    only). `tensor_parallel`: GPUs (on a CPU, processes) that share the model. `weights` and `kv_cache`: "fp8"
    halves the bytes of projections, and of keys and values (e4m3; lossy, and answers say so); "auto" is
    `dtype`.
    """

    device: str = "auto"
    dtype: str = "auto"
    mask_token_id: int | None = None
    base: str | None = None
    accelerators: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    memory: str = "caching"
    max_num_seqs: int = 64
    max_length: int | None = None
    max_num_batched_tokens: int = 1024
    page_size: int | None = None
    num_pages: int | None = None
    num_inflight_steps: int | None = None
    prefix_cache: bool = True
    graphs: Literal["auto", "on", "off"] = "auto"
    attention: str = "auto"
    deterministic: bool = False
    tensor_parallel: int = 1
    weights: Literal["auto", "fp8"] = "auto"
    kv_cache: Literal["auto", "fp8"] = "auto"
    template: Literal["auto", "none"] = "auto"

    @property
    def slots_per_page(self) -> int:
        """`page_size` of an engine that is built."""
        assert self.page_size is not None
        return self.page_size

    @property
    def is_lossy(self) -> bool:
        """Whether the law is not that of the checkpoint, whatever the decoder does."""
        return "fp8" in (self.weights, self.kv_cache)


def check_options(decoder: str | None, options: dict[str, Any]) -> tuple[EngineSettings, dict[str, Any]]:
    """The fields of `EngineSettings` and the options of the decoder's Config, told apart by name. A misspelt
    one is known before gigabytes of weights are read.
    """
    settings, decoder_options = _split_options(options)
    if decoder is not None:
        decoder_config(DECODERS.get(decoder), decoder_options)
    return settings, decoder_options


def _split_options(options: dict[str, Any]) -> tuple[EngineSettings, dict[str, Any]]:
    names = {field.name for field in dataclasses.fields(EngineSettings)}
    options = {key: own_number(value) for key, value in options.items()}
    mine = {key: value for key, value in options.items() if key in names}
    if isinstance(mine.get("dtype"), torch.dtype):
        mine["dtype"] = str(mine["dtype"]).removeprefix("torch.")
    for name in ("device", "base"):
        if mine.get(name) is not None:
            mine[name] = str(mine[name])
    if "accelerators" in mine:
        mine["accelerators"] = as_options(mine["accelerators"])
    settings = EngineSettings(**mine)
    _check_settings(settings)
    return settings, {key: value for key, value in options.items() if key not in names}


def _check_settings(settings: EngineSettings) -> None:
    problems = [
        f"{name}={value!r} must be an integer >= {least}"
        for name, value, least in (
            ("max_num_seqs", settings.max_num_seqs, 1),
            ("max_num_batched_tokens", settings.max_num_batched_tokens, 1),
            ("page_size", 1 if settings.page_size is None else settings.page_size, 1),
            ("tensor_parallel", settings.tensor_parallel, 1),
            (
                "num_inflight_steps",
                0 if settings.num_inflight_steps is None else settings.num_inflight_steps,
                0,
            ),
            ("num_pages", 1 if settings.num_pages is None else settings.num_pages, 1),
            ("max_length", 2 if settings.max_length is None else settings.max_length, 2),
        )
        if not isinstance(value, int) or isinstance(value, bool) or value < least
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
        kinds = schema.members(hint)
        if set(kinds) <= {bool, str, NoneType} and not isinstance(given, kinds):
            problems.append(f"{name}={given!r} must be {schema.describe_type(hint)}")
    if settings.attention not in ("auto", *BACKENDS):
        problems.append(
            f"attention={settings.attention!r} is not one of auto, {', '.join(BACKENDS)}"
            f"{did_you_mean(settings.attention, BACKENDS)}"
        )
    if problems:
        raise UserError("IDLM-0415", "; ".join(problems), fix="correct the engine settings named")
    MEMORY_MANAGERS.get(settings.memory)
    accelerator_configs(settings.accelerators)


def decoder_config(chosen: type[Decoder], options: dict[str, Any]) -> Any:
    """The decoder's Config; UserError IDLM-0416 for an unknown option or a value of another type."""
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
