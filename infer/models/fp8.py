"""Lossy fp8 (e4m3) weights of projections, and the scales of an fp8 KV cache.

Embedding, head, norms, biases and an adapter's B keep their dtype. An adapter's A, which acts on drafts only,
is quantised with the projection that it shares a product with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from idlm.errors import MAX_NAMED, UserError
from idlm.files.tensors import Stored
from idlm.infer.models import weights
from idlm.infer.models.base import ModelSpec, Shards, TensorNames
from idlm.infer.models.dense import DenseLayer, DenseTrunk
from idlm.infer.models.low_rank import LowRank
from idlm.infer.models.moe import refuse
from idlm.kernels.linear import Fp8Weight, quantise_fp8

PROJECTIONS = ("qkv", "o", "gate_up", "down")
MIN_CAPABILITY = (8, 9)


def check_device(device: torch.device) -> None:
    """Raise UserError IDLM-0447 for a GPU without e4m3."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < MIN_CAPABILITY:
        raise UserError(
            "IDLM-0447",
            "weights=fp8 and kv_cache=fp8 need a GPU of compute capability 8.9 (Ada, Hopper) or more; "
            f"{device} has {found[0]}.{found[1]}",
            fix="use weights=auto and kv_cache=auto",
        )


def quantise(trunk: DenseTrunk) -> None:
    """Replace the parameters of this rank's projections by `Fp8Weight`s, one at a time to save memory. Raises
    UserError IDLM-0617 for a model with experts."""
    if trunk.spec.moe is not None:
        refuse("weights=fp8 (allowed: auto)")
    for layer in trunk.layers:
        assert isinstance(layer, DenseLayer)
        for name in PROJECTIONS:
            if layer.lora is None:
                weight = quantise_fp8(getattr(layer, name))
                _replace(layer, name, weight)
            else:
                low = layer.lora[name]
                assert isinstance(low, LowRank), f"{type(low)=}"
                weight = _quantise_adapted(layer, name, low)
            _compact(weight)


def _compact(weight: Fp8Weight) -> None:
    """Move the weight to new memory, by way of the host; views stay valid. It may fill half of a segment that
    the wider weight left, which would not count as free memory for the KV pool."""
    storage = weight.values_ED.untyped_storage()
    if storage.device.type != "cuda":
        return
    on_host, size = storage.cpu(), storage.nbytes()
    storage.resize_(0)
    torch.cuda.empty_cache()
    storage.resize_(size)
    storage.copy_(on_host)


def _quantise_adapted(layer: DenseLayer, name: str, low: LowRank) -> Fp8Weight:
    """Quantise a projection and its adapter's A together; returns the weight that holds both."""
    both, num_outputs = quantise_fp8(low.stacked), len(getattr(layer, name))
    own = Fp8Weight(values_ED=both.values_ED[:num_outputs], scale_E=both.scale_E[:num_outputs])
    _replace(low, "stacked", both)
    _replace(layer, name, own)
    return both


def _replace(module: nn.Module, name: str, weight: Fp8Weight) -> None:
    delattr(module, name)
    setattr(module, name, weight)


def read_kv_scales(
    files: Mapping[str, Stored], spec: ModelSpec, names: TensorNames, shards: Shards, device: torch.device
) -> Tensor:
    """fp32 scales [2 (keys, values), layers, KV heads of this rank]; an fp8 cache stores value / scale.
    Raises UserError IDLM-0614 if some are missing or not positive numbers."""
    scales, problems = [], []
    for name in names.kv_scales(spec.num_layers):
        if name not in files:
            problems.append(f"{name} is missing")
            continue
        scale = weights.tensor(files, name).to(torch.float32).flatten()
        if scale.numel() not in (1, spec.num_kv_heads) or not bool((scale.isfinite() & (scale > 0)).all()):
            problems.append(f"{name} has {scale.numel()} numbers, the first is {scale[:1].tolist()}")
            continue
        scales.append(scale.expand(spec.num_kv_heads)[shards.part(spec.num_kv_heads)])
    if problems:
        raise UserError(
            "IDLM-0614",
            f"KV scales: {'; '.join(problems[:MAX_NAMED])}",
            fix=f"give each layer a k_scale and a v_scale, 1 or {spec.num_kv_heads} numbers above 0, or none",
        )
    return torch.stack(scales).view(2, spec.num_layers, -1).to(device)
