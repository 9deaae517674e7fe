"""Where tensors of a checkpoint are copied to: views of parameters that the model already owns, and the order
of their rows. Lists the safetensors files, checks their headers, and copies one tensor at a time; never opens
pickles.

H head dim."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idlm.checkpoint import INDEX_FILE, SINGLE_FILE, tensors_by_name, weight_files
from idlm.errors import UserError, some_of
from idlm.infer.models.base import ALONE, ModelSpec, Shards

PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "consolidated*.pth", "*.ckpt")
OTHER_FORMATS = {
    ".gguf": "GGUF, the format of llama.cpp",
    ".ggml": "GGML, a former format of llama.cpp",
    ".onnx": "ONNX",
    ".h5": "HDF5, the format of Keras",
    ".msgpack": "msgpack, the format of Flax",
    ".npz": "NumPy",
}
"""Endings of weights in formats that are not read."""
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


def locate(directory: Path) -> dict[str, Path]:
    """The file of every tensor. Raises UserError IDLM-0602 (no safetensors) or IDLM-0607 (broken)."""
    files = weight_files(directory)
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise UserError(
            "IDLM-0607",
            f"{directory} lacks {len(absent)} of {len(files)} weight files: {some_of(absent)}",
            fix="download the missing files",
        )
    if files:
        return tensors_by_name(directory, ((path, dict.fromkeys(tensor_names(path), path)) for path in files))
    pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in directory.glob(pattern))
    if pickles:
        raise UserError(
            "IDLM-0602",
            f"{directory} has its weights in {pickles[0]}; only safetensors are read, because loading a "
            "pickle runs the code in it",
            fix="convert it once with transformers, in a place where you trust the file: "
            f"AutoModelForCausalLM.from_pretrained('{directory}').save_pretrained('<new directory>')",
        )
    format_name = other_format(directory)
    has = "" if format_name is None else f"; it has {format_name}, which is not read"
    raise UserError(
        "IDLM-0602",
        f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{has}",
        fix="give the directory that holds the weights as safetensors; a download may be incomplete",
    )


def other_format(path: Path) -> str | None:
    """A file of weights in another format, named with it: `path`, or the first one in that directory."""
    names = sorted(file.name for file in path.iterdir()) if path.is_dir() else [path.name]
    formats = ((name, OTHER_FORMATS.get(Path(name).suffix.lower())) for name in names)
    return next((f"{name} ({kind})" for name, kind in formats if kind is not None), None)


def check(targets: Mapping[str, WeightTarget], files: Mapping[str, Path], ignored: Collection[str]) -> None:
    """Compare names, shapes and types in headers; targets may be on the meta device. Raises UserError
    IDLM-0603 with all missing, unused, wrong-shaped and integer tensors."""
    problems = misfits(targets, files, ignored, source="config.json")
    if problems:
        raise UserError(
            "IDLM-0603",
            f"the tensors do not fit config.json; {'; '.join(problems)}",
            fix="use the config.json that belongs to these weights; adapters and headless models do not load",
        )


def misfits(
    targets: Mapping[str, WeightTarget], files: Mapping[str, Path], ignored: Collection[str], *, source: str
) -> list[str]:
    """Messages about names, shapes and types that do not fit; `source` is the file with the shapes. Integers
    are codes of quantised weights, which need scales."""
    wrong_shapes, wrong_types = [], []
    for path, names in _by_file(targets, files).items():
        with _opened(path) as file:
            for name in names:
                stored = file.get_slice(name)
                shape, dtype = tuple(stored.get_shape()), str(stored.get_dtype())
                if not dtype.startswith(FLOATS):
                    wrong_types.append(f"{name} holds {dtype}")
                if shape != targets[name].shape:
                    wrong_shapes.append(f"{name} is {list(shape)}, in {source} {list(targets[name].shape)}")
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


def copy(targets: Mapping[str, WeightTarget], files: Mapping[str, Path]) -> None:
    """Copy every tensor into its target and cast to its dtype; call `check` first. Calls `WATCHER`."""
    watcher, num_done = WATCHER.get(), 0
    total = sum(targets[name].view.nbytes for name in targets.keys() & files.keys())
    with torch.no_grad():
        for path, names in _by_file(targets, files).items():
            with _opened(path) as file:
                for name in names:
                    target = targets[name]
                    stored = file.get_slice(name)[target.part] if target.part else file.get_tensor(name)
                    target.view.copy_(stored if target.order is None else stored[target.order])
                    if target.offset:
                        target.view.add_(target.offset)
                    num_done += target.view.nbytes
                    watcher(num_done, total)


def _by_file(targets: Mapping[str, WeightTarget], files: Mapping[str, Path]) -> dict[Path, list[str]]:
    by_file: dict[Path, list[str]] = {}
    for name in sorted(targets.keys() & files.keys()):
        by_file.setdefault(files[name], []).append(name)
    return by_file


def tensors_equal(files: Mapping[str, Path], first: str, second: str) -> bool:
    with _opened(files[first]) as one, _opened(files[second]) as other:
        return torch.equal(one.get_tensor(first), other.get_tensor(second))


def tensor(files: Mapping[str, Path], name: str) -> Tensor:
    with _opened(files[name]) as file:
        return torch.as_tensor(file.get_tensor(name))


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors in one file; UserError IDLM-0607 when it cannot be read."""
    with _opened(path) as file:
        return list(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(
            "IDLM-0607",
            f"{path} cannot be read as safetensors: {error}",
            fix="restore the file from its source",
        ) from error
