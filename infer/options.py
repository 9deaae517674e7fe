"""Keywords of `Engine.from_pretrained`, sorted and checked before anything is loaded: a misspelt option is
reported before gigabytes of weights are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from idlm.config import schema
from idlm.config.suggest import did_you_mean
from idlm.contracts import plain_value
from idlm.errors import UserError
from idlm.infer.decoders.base import DECODERS, Decoder
from idlm.infer.memory.base import MEMORY_MANAGERS
from idlm.infer.settings import EngineSettings, as_options
from idlm.infer.sparse.stack import accelerator_configs
from idlm.kernels.paged_attention import BACKENDS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Checked options of one engine.

    `accelerators` holds the Config of each accelerator by its name. `decoder_config` is None if no decoder
    was named: the checkpoint then decides which one takes `decoder_options`.
    """

    settings: EngineSettings
    accelerators: dict[str, Any]
    decoder: str | None
    decoder_options: dict[str, Any]
    decoder_config: Any

    def plain(self) -> dict[str, Any]:
        """The keywords again, as plain data that a message can carry."""
        return {**self.settings.options(), **self.decoder_options}


def check_options(decoder: str | None, keywords: Mapping[str, Any]) -> EngineOptions:
    """Separate engine settings from decoder options by their names, and check both.

    Raises UserError: IDLM-0102 for an unknown decoder, memory manager or accelerator, IDLM-0415 for engine
    settings, IDLM-0416 for decoder options, IDLM-0461 for accelerator options.
    """
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
    if "accelerators" in values:
        values["accelerators"] = as_options(values["accelerators"])
    if isinstance(values.get("dtype"), torch.dtype):
        values["dtype"] = str(values["dtype"]).removeprefix("torch.")
    for name in ("device", "base"):
        if values.get(name) is not None:
            values[name] = str(values[name])
    problems: list[str] = []
    settings = schema.build(EngineSettings, values, problems)
    attention = values.get("attention", "auto")
    if isinstance(attention, str) and attention not in ("auto", *BACKENDS):
        problems.append(
            f"attention={attention!r} is not one of auto, {', '.join(BACKENDS)}"
            f"{did_you_mean(attention, BACKENDS)}"
        )
    if problems:
        raise UserError("IDLM-0415", "; ".join(problems), fix="correct the engine settings named")
    assert isinstance(settings, EngineSettings)
    return settings


def decoder_config(chosen: type[Decoder], options: dict[str, Any]) -> Any:
    """The decoder's Config. Raises UserError IDLM-0416 for an unknown option or a value of the wrong type."""
    known = [field.name for field in dataclasses.fields(chosen.Config)]
    engine = list(schema.fields_of(EngineSettings))
    unknown = [f"{key!r}{did_you_mean(key, [*known, *engine])}" for key in options if key not in known]
    if unknown:
        raise UserError(
            "IDLM-0416",
            f"unknown option {', '.join(unknown)}",
            fix=f"decoder {chosen.name!r} takes {known or 'no options'}; the engine takes {engine}",
        )
    problems: list[str] = []
    config = schema.build(chosen.Config, options, problems, "decoder.")
    if problems:
        raise UserError("IDLM-0416", "; ".join(problems), fix=f"correct the options of {chosen.name!r}")
    return config
