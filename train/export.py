"""Publishing a trained model as a stock checkpoint of its base architecture, plus `idlm_config.json`.

Any tool that loads the base architecture loads the result. Nothing is published whose files do not read back
bitwise equal to the weights in memory.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from idlm.checkpoint import publish
from idlm.semantics import Semantics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def export(
    model: PreTrainedModel, tokenizer: Any, semantics: Semantics, target: Path, *, dtype: torch.dtype | None
) -> None:
    """Publish `target` atomically: config, safetensors, tokenizer, generation config and semantics.

    `dtype` converts the weights, in place; None keeps the training dtype. Errors as in
    `idlm.checkpoint.publish`.
    """
    if dtype is not None:
        model.to(dtype)
    # The Trainer switches the cache off for training; a stock checkpoint generates with it.
    model.config.use_cache = True
    model.generation_config.eos_token_id = list(semantics.stop_token_ids) or None
    for name in ("bos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, getattr(tokenizer, name, None))
    with publish(target) as staging:
        model.save_pretrained(staging)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        if semantics.stride > 1:
            semantics.save(staging)
        _require_bitwise(model, staging)
    log.info("published %s", target)


def _require_bitwise(model: PreTrainedModel, directory: Path) -> None:
    from safetensors import safe_open

    weights = model.state_dict()
    stored: set[str] = set()
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open is not a mapping)
                stored.add(name)
                written, expected = tensors.get_tensor(name), weights[name].detach().cpu()
                assert written.dtype == expected.dtype, f"{name=} {written.dtype=} {expected.dtype=}"
                assert _bits(written).equal(_bits(expected)), f"{name} was not written as it is in memory"
    tied = {weights[name].data_ptr() for name in stored}
    missing = [name for name, value in weights.items() if name not in stored and value.data_ptr() not in tied]
    assert stored and not missing, f"the export lacks {missing=}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
