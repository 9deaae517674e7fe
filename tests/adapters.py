"""Random gated adapters and selectors for tests: as training writes them, without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from idlm.lora import MASK_ROW, PROJECTIONS, WEIGHTS_FILE, AdapterSpec, base_identity, tensor_name
from idlm.selector import SELECTOR_FILE
from idlm.semantics import Semantics


def write_adapter(
    directory: Path,
    base: Path,
    *,
    mask_token_id: int | None,
    stride: int,
    rank: int = 3,
    alpha: float | None = None,
    targets: tuple[str, ...] = PROJECTIONS,
    has_mask_row: bool = False,
    size: float = 0.3,
    seed: int = 0,
    noise_range: tuple[int, ...] = (),
) -> Path:
    """Save an adapter on `base` whose A and B are normal with standard deviation `size`."""
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            for matrix, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                tensors[tensor_name(name, matrix)] = size * torch.randn(shape, generator=generator)
    if has_mask_row:
        tensors[MASK_ROW] = torch.randn(model.config.hidden_size, generator=generator)
    save_file(tensors, directory / WEIGHTS_FILE)
    AdapterSpec(rank=rank, alpha=alpha or 2.0 * rank, targets=targets, base_path=str(base)).save(directory)
    Semantics(
        mask_token_id=mask_token_id,
        noise_range=noise_range,
        stride=stride,
        gated=True,
        base_identity=base_identity(base),
    ).save(directory)
    return directory


def add_selector(
    directory: Path, *, vocab_size: int, width: int, size: float = 1.5, rank: int = 8, seed: int = 0
) -> Path:
    """Put a path selector of random weights beside a checkpoint; larger ones change scores more."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "previous_VW": (vocab_size, rank),
        "candidate_VW": (vocab_size, rank),
        "hidden_WD": (rank, width),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["hidden_WD"] *= size / rank**0.5
    save_file(tensors, directory / SELECTOR_FILE)
    replace(Semantics.load(directory), selector="path").save(directory)
    return directory
