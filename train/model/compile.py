"""Compiles the decoder layers of a model one by one with torch.compile.

Layers share their code, so one compilation serves all of them; the rest (wrappers, hooks on the head,
gathering of rows) stays eager. Compiled code of the whole model would depend on the number of documents and
supervised rows.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from idlm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
AUTO = "auto"
CHOICES = (AUTO, "on", "off")
WEIGHT_SHARDING_STAGE = 3


def compiles(choice: str, device: torch.device, *, zero_stage: int | None) -> bool:
    """Whether to compile the layers for `model.compile` = `choice`; `auto`: on a GPU, except under ZeRO-3.

    ZeRO-3 gathers and frees the weights of every layer in hooks, which compiled code would not see.
    UserError IDLM-0540 for choice "on" under ZeRO-3.
    """
    moves_weights = zero_stage == WEIGHT_SHARDING_STAGE
    if choice == "on" and moves_weights:
        raise UserError(
            "IDLM-0540",
            "model.compile=on does not go with train.zero_stage=3, which moves weights in and out of layers",
            fix="set model.compile=auto (eager layers under ZeRO-3), or train.zero_stage=2",
        )
    return choice == "on" or (choice == AUTO and device.type == "cuda" and not moves_weights)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder layers: the outermost module list of their number, whatever its name."""
    wanted = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    found = next((module for module in lists if len(module) == wanted), None)
    assert found is not None, f"no list of {wanted} layers in {type(model).__name__}"
    return found


def compile_layers(model: PreTrainedModel) -> int:
    """Compile every decoder layer in place, for static shapes, at its first use; returns how many."""
    layers = decoder_layers(model)
    for layer in layers:
        layer.compile(dynamic=False)
    log.info("compiling %d decoder layers", len(layers))
    return len(layers)
