"""Settings of an engine, in Python and on the command line; decoders and accelerators own their options.

This file does not import torch, because command lines import it before they load a model; `check_options`
does, for the registries of plug-ins, before gigabytes of weights are read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from idlm.config import schema
from idlm.config.schema import LARGEST_NUMBER, option
from idlm.contracts import plain_value
from idlm.errors import UserError

if TYPE_CHECKING:
    from idlm.infer.decoders.base import Decoder

NO_NAMES = ("", "none", "null", "off", "false")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Keywords of `Engine.from_pretrained` and keys of `idlm-generate` and `idlm-eval`.

    Raises UserError IDLM-0415 that names every number out of range."""

    device: str = option("auto, cpu, cuda or cuda:N", "auto")
    dtype: str = option("auto (the checkpoint's), float32, bfloat16, float16", "auto")
    mask_token_id: int | None = option("overrides the checkpoint's mask token", None)
    base: str | None = option(
        "base model of a gated adapter; null is the path in its adapter_config.json", None, is_path=True
    )
    adapters: dict[str, str] = option(
        "further gated adapters of the same base, by the names that requests give: adapters.NAME=FOLDER",
        {},
        is_path=True,
    )
    accelerators: dict[str, Any] | list[str] | str | None = option(
        "plug-ins that compute sparse attention; options: accelerators.NAME.OPTION=VALUE", []
    )
    memory: str = option("memory manager", "caching")
    memory_arena: Literal["auto", "plain", "mapped"] = option(
        "workspace of memory=mosaic: plain is one tensor, mapped is pages mapped into reserved addresses; "
        "auto is mapped on a GPU",
        "auto",
    )
    max_num_seqs: int | None = option(
        "sequences that run at once; null is 64, or up to 256 for AR and ISD after a warm-up", None
    )
    max_length: int | None = option("prompt and answer together; null is the model's context", None)
    max_num_batched_tokens: int | None = option(
        "prompt tokens stored in one step; null is 1,024, or up to 8,192 for AR and ISD after a warm-up", None
    )
    schedule: Literal["latency", "throughput"] = option(
        "latency: a prompt makes a step at most 2.5 times as long for answers under way; throughput: steps "
        "store most prompt tokens a second",
        "throughput",
    )
    page_size: int | None = option("slots of a KV page; null is 16, or more to hold whole blocks", None)
    num_pages: int | None = option("KV pages; null lets the memory manager decide", None)
    prefix_cache: bool = option("share the KV of equal prefixes, and cache it after sequences finish", True)
    num_inflight_steps: int | None = option(
        "steps launched before the results of earlier ones are read; null is 4 with CUDA graphs, else 0", None
    )
    graphs: Literal["auto", "on", "off"] = option(
        "on: steps of static shape, in CUDA graphs on a GPU; auto is on where there is a GPU", "auto"
    )
    warmup: Literal["auto", "full", "off"] = option(
        "off: capture each CUDA graph when it is first needed; auto: before the first request, for 20 s at "
        "most; full: all of them",
        "off",
    )
    attention: Literal["auto", "triton", "torch"] = option("back end of paged attention", "auto")
    deterministic: bool | Literal["auto"] = option(
        "logits of a row have the same bits whatever else is in the batch (Hopper GPU; Intel CPU in "
        "float32); auto: if that costs at most 3 % of a step of max_num_seqs sequences",
        False,
    )
    tensor_parallel: int = option("GPUs that share the model; one process is started for each", 1)
    weights: Literal["auto", "fp8"] = option(
        "fp8: projections of half the bytes (e4m3), lossy; auto is dtype", "auto"
    )
    kv_cache: Literal["auto", "fp8"] = option(
        "fp8: keys and values of half the bytes (e4m3), so twice the pages, lossy; auto is dtype", "auto"
    )
    rope: Literal["auto", "ntk"] = option(
        "ntk: rotate more slowly, for contexts of up to rope_factor times the trained length, without "
        "training; auto is the checkpoint's own rotation",
        "auto",
    )
    rope_factor: float | None = option("with rope=ntk: the longest context over the trained length", None)
    chat_template: Literal["auto", "none"] = option(
        "auto uses the tokenizer's chat template for text prompts, none does not", "auto"
    )

    def __post_init__(self) -> None:
        problems = below_min(
            self,
            *(("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("page_size", 1), ("num_pages", 1)),
            *(("tensor_parallel", 1), ("num_inflight_steps", 0), ("max_length", 2)),
        )
        if self.deterministic is True and self.tensor_parallel not in (1, 2):
            problems.append(
                f"deterministic=true with tensor_parallel={self.tensor_parallel}: the order of sums over "
                "more than two ranks depends on the batch (allowed: 1 and 2)"
            )
        if (self.rope == "ntk") != (self.rope_factor is not None):
            problems.append(f"rope={self.rope} with rope_factor={self.rope_factor}: ntk takes one, auto none")
        if self.rope_factor is not None and not (math.isfinite(self.rope_factor) and self.rope_factor > 1):
            problems.append(f"rope_factor={self.rope_factor} must be a finite number above 1")
        if problems:
            raise UserError("IDLM-0415", "; ".join(problems), fix="correct the engine settings named")

    @property
    def slots_per_page(self) -> int:
        """`page_size` of an engine that is built."""
        assert self.page_size is not None
        return self.page_size

    @property
    def max_sequences(self) -> int:
        """`max_num_seqs` of an engine that is built."""
        assert self.max_num_seqs is not None
        return self.max_num_seqs

    @property
    def row_budget(self) -> int:
        """`max_num_batched_tokens` of an engine that is built."""
        assert self.max_num_batched_tokens is not None
        return self.max_num_batched_tokens

    @property
    def is_deterministic(self) -> bool:
        """`deterministic` of an engine that is built."""
        assert self.deterministic != "auto"
        return self.deterministic

    @property
    def is_lossy(self) -> bool:
        """Whether weights or KV are quantised, so that the distribution is not the checkpoint's."""
        return "fp8" in (self.weights, self.kv_cache)

    @property
    def accelerator_options(self) -> dict[str, dict[str, Any]]:
        return as_options(self.accelerators)

    @property
    def warms_up(self) -> bool:
        """Whether graphs are captured before the first request; by several ranks if all are to be."""
        return self.warmup == "full" or (self.warmup == "auto" and self.tensor_parallel == 1)

    def options(self) -> dict[str, Any]:
        """The settings as keywords of `Engine.from_pretrained`."""
        names = [field.name for field in dataclasses.fields(EngineSettings)]
        return {name: getattr(self, name) for name in names} | {"accelerators": self.accelerator_options}


def below_min(settings: object, *bounds: tuple[str, float]) -> list[str]:
    """A sentence for each setting, or item of a list, that is not null and below its minimum or not
    finite."""
    given = [(name, getattr(settings, name), minimum) for name, minimum in bounds]
    return [
        f"{name}={value} must be >= {minimum:g}"
        for name, values, minimum in given
        for value in (values if isinstance(values, list) else [values])
        if value is not None and not minimum <= value <= LARGEST_NUMBER
    ]


def as_options(given: Any) -> dict[str, dict[str, Any]]:
    """Options by name of accelerator, from a name, several names, options by name, or None. Raises UserError
    IDLM-0461 for anything else."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and all(isinstance(options, Mapping | None) for options in given.values()):
        return {str(name): dict(options or {}) for name, options in given.items()}
    is_list = isinstance(given, Iterable) and not isinstance(given, Mapping | str)
    names = list(given) if is_list else [given]
    if all(map(_is_name, names)) and len(set(names)) == len(names):
        return {name: {} for name in names}
    raise UserError(
        "IDLM-0461",
        f"accelerators={given} is no list of different names",
        fix="write accelerators=[mage,focus], or accelerators=[] for none; options are written "
        'accelerators.mage.k=512, in Python accelerators={"mage": {"k": 512}}',
    )


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and "," not in given and given.strip().lower() not in NO_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Checked options of one engine.

    `accelerators` holds the Config of each accelerator by its name. `decoder_config` is None if no decoder
    was named: the checkpoint then decides which one takes `decoder_options`."""

    settings: EngineSettings
    accelerators: dict[str, Any]
    decoder: str | None
    decoder_options: dict[str, Any]
    decoder_config: Any


def check_options(decoder: str | None, keywords: Mapping[str, Any]) -> EngineOptions:
    """Separate engine settings from decoder options by their names, and check both.

    Raises UserError: IDLM-0102 for an unknown decoder, memory manager or accelerator, IDLM-0415 for engine
    settings, IDLM-0416 for decoder options, IDLM-0461 for accelerator options."""
    from idlm.infer.decoders.base import DECODERS
    from idlm.infer.memory.base import MEMORY_MANAGERS
    from idlm.infer.sparse.stack import accelerator_configs

    names = schema.fields_of(EngineSettings)
    keywords = {key: plain_value(value) for key, value in keywords.items()}
    settings = _engine_settings({key: value for key, value in keywords.items() if key in names})
    decoder_options = {key: value for key, value in keywords.items() if key not in names}
    MEMORY_MANAGERS.get(settings.memory)
    return EngineOptions(
        settings=settings,
        accelerators=accelerator_configs(settings.accelerator_options) if settings.accelerators else {},
        decoder=decoder,
        decoder_options=decoder_options,
        decoder_config=None if decoder is None else decoder_config(DECODERS.get(decoder), decoder_options),
    )


def _engine_settings(values: dict[str, Any]) -> EngineSettings:
    """The settings from keywords, for which paths, torch dtypes and devices will do."""
    import torch

    if "accelerators" in values:
        values["accelerators"] = as_options(values["accelerators"])
    if isinstance(values.get("dtype"), torch.dtype):
        values["dtype"] = str(values["dtype"]).removeprefix("torch.")
    if values.get("device") is not None:
        values["device"] = str(values["device"])
    problems: list[str] = []
    settings = schema.build(EngineSettings, values, problems)
    if problems:
        raise UserError("IDLM-0415", "; ".join(problems), fix="correct the engine settings named")
    assert isinstance(settings, EngineSettings)
    return settings


def decoder_config(chosen: type[Decoder], options: dict[str, Any]) -> Any:
    """The decoder's Config. Raises UserError IDLM-0416 for an unknown option or a value of the wrong type."""
    problems: list[str] = []
    engine = list(schema.fields_of(EngineSettings))
    config = schema.build_options(chosen.Config, options, problems, "decoder.", others=engine)
    if problems:
        fix = f"correct the options of {chosen.name!r}; the engine takes {', '.join(engine)}"
        raise UserError("IDLM-0416", "; ".join(problems), fix=fix)
    return config
