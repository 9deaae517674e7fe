"""Lists the safetensors files of a checkpoint, checks their headers, and copies their tensors one at a time
into memory that the model already owns; never opens pickles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from idlm.checkpoint import INDEX_FILE, SINGLE_FILE, tensors_by_name, weight_files
from idlm.errors import UserError, some_of
from idlm.infer.models.targets import WeightTarget

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


def tensor(files: Mapping[str, Path], name: str) -> torch.Tensor:
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
