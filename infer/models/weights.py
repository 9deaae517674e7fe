"""Where tensors of a checkpoint are copied to: views of parameters that the model already owns, and the order
of their rows. Compares them with the headers of the safetensors files, and copies one tensor at a time.

H head dim."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from idlm.devices import is_finite
from idlm.errors import UserError, some_of
from idlm.files.tensors import Stored
from idlm.infer.models.base import ALONE, ModelSpec, Shards

FLOATS = ("F", "BF")
"""First letters of floating-point types in a safetensors header."""
WATCHER: ContextVar[Callable[[int, int], None]] = ContextVar("WATCHER", default=lambda num_done, total: None)
"""Called by `copy` after each tensor with the bytes copied and in all, for progress many calls above it."""


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


def check(targets: Mapping[str, WeightTarget], files: Mapping[str, Stored], ignored: Collection[str]) -> None:
    """Raise UserError IDLM-0603 with all missing, unused, wrong-shaped and integer tensors."""
    problems = misfits(targets, files, ignored, source="config.json")
    if problems:
        raise UserError(
            "IDLM-0603",
            f"the tensors do not fit config.json; {'; '.join(problems)}",
            fix="use the config.json that belongs to these weights; adapters and headless models do not load",
        )


def misfits(
    targets: Mapping[str, WeightTarget], files: Mapping[str, Stored], ignored: Collection[str], *, source: str
) -> list[str]:
    """Messages about names, shapes and types that do not fit the headers; `source` is the file with the
    shapes. Targets may be on the meta device. Integers are codes of quantised weights, which need scales."""
    wrong_shapes, wrong_types = [], []
    for name in sorted(targets.keys() & files.keys()):
        stored, shape = files[name], targets[name].shape
        if not stored.dtype.startswith(FLOATS):
            wrong_types.append(f"{name} holds {stored.dtype}")
        if stored.shape != shape:
            wrong_shapes.append(f"{name} is {list(stored.shape)}, in {source} {list(shape)}")
    missing = sorted(targets.keys() - files.keys())
    unused = sorted(files.keys() - targets.keys() - set(ignored))
    return [
        f"{len(found)} {what}: {some_of(found)}"
        for what, found in (
            ("missing", missing),
            ("of the wrong shape", wrong_shapes),
            ("not floating point", wrong_types),
            ("not used", unused),
        )
        if found
    ]


def copy(targets: Mapping[str, WeightTarget], files: Mapping[str, Stored]) -> None:
    """Copy tensors without `misfits` into their targets, cast to the dtype of these. Calls `WATCHER`."""
    watcher, num_done = WATCHER.get(), 0
    wanted = sorted(targets.keys() & files.keys(), key=lambda name: (files[name].path, name))
    total = sum(targets[name].view.nbytes for name in wanted)
    with torch.no_grad():
        for path, names in itertools.groupby(wanted, lambda name: files[name].path):
            with safe_open(path, framework="pt") as file:
                for name in names:
                    target, there = targets[name], files[name].name
                    stored = file.get_slice(there)[target.part] if target.part else file.get_tensor(there)
                    target.view.copy_(stored if target.order is None else stored[target.order])
                    if target.offset:
                        target.view.add_(target.offset)
                    num_done += target.view.nbytes
                    watcher(num_done, total)


def require_finite(code: str, tensors: Mapping[str, Tensor], directory: Path, *, fix: str) -> None:
    """Raise UserError `code` for values that are not finite."""
    bad = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if bad:
        what = f"{len(bad)} tensors of {directory} have values that are not finite, {bad[0]} first"
        raise UserError(code, what, fix=fix)


def tensor(files: Mapping[str, Stored], name: str) -> Tensor:
    with safe_open(files[name].path, framework="pt") as file:
        return torch.as_tensor(file.get_tensor(files[name].name))
