"""Where tensors of a checkpoint are copied to: views of parameters, and the order of their rows.

H head dim."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.infer.models.base import ALONE, ModelSpec, Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTarget:
    """Where a checkpoint tensor of this `shape` is copied to: `part` of it, with rows in `order`, to
    `view`."""

    view: Tensor
    shape: tuple[int, ...]
    part: tuple[slice, ...] = ()
    order: Tensor | None = None
    offset: float = 0.0
    """Added to the tensor in the dtype of `view`."""


def target_of(view: Tensor, shards: Shards = ALONE, axis: int = 0) -> WeightTarget:
    """The target of a tensor of which `view` is this rank's equal part along `axis`."""
    shape = list(view.shape)
    shape[axis] *= shards.size
    part = (slice(None),) * axis + (shards.part(shape[axis]),)
    return WeightTarget(view=view, shape=tuple(shape), part=() if shards.size == 1 else part)


def head_order(spec: ModelSpec) -> Tensor | None:
    """The checkpoint's dimension at each dimension of a head [H]; None: the same. Kernels rotate dimension i
    with i + H/2; a partly rotated head pairs i with i + rotary_dim/2, and others pair neighbours. Queries and
    keys are reordered so that these pairs are H/2 apart, and the other dimensions rotate by 0. Scores are
    sums over dimensions and do not change."""
    if spec.rotary_dim is None and not spec.variant.is_interleaved:
        return None
    rotary_dim = spec.head_dim if spec.rotary_dim is None else spec.rotary_dim
    turned, rest = torch.arange(spec.head_dim).split((rotary_dim, spec.head_dim - rotary_dim))
    low, high = (turned[::2], turned[1::2]) if spec.variant.is_interleaved else turned.chunk(2)
    still = rest.split(len(rest) // 2) if len(rest) else (rest, rest)
    return torch.cat((low, still[0], high, still[1]))


def row_orders(spec: ModelSpec, shards: Shards, fused: str, num_modules: int) -> list[Tensor | None]:
    """For each module of a projection whose rows ranks divide, the rows of this rank (`spec`) in its order;
    None: its equal part of them, as they are. One module has the rows of all kinds, queries or gate first."""
    is_qkv = fused == "qkv"
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    sizes = [num * spec.head_dim for num in heads] if is_qkv else [spec.ffn_width] * 2
    order = head_order(spec) if is_qkv else None
    if order is None and (num_modules > 1 or shards.size == 1):
        return [None] * num_modules
    rows, first = [], 0
    for kind, size in enumerate(sizes):
        rows_E = torch.arange(size * shards.size)[shards.part(size * shards.size)]
        if order is not None and kind < 2:
            rows_E = rows_E.view(-1, spec.head_dim)[:, order].flatten()
        rows.append(rows_E + first)
        first += size * shards.size if num_modules == 1 else 0
    return [torch.cat(rows)] if num_modules == 1 else [*rows]


def row_target(view: Tensor, order: Tensor | None, shards: Shards) -> WeightTarget:
    """The target of a module of which `view` holds the rows `order`."""
    if order is None:
        return target_of(view, shards)
    return WeightTarget(view=view, shape=(len(view) * shards.size, *view.shape[1:]), order=order)
