"""The weight files of a checkpoint directory, and what the headers of its safetensors state of every tensor.
No tensor is read, and no pickle is opened."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from idlm.checkpoint import read_json
from idlm.errors import UserError, naming, some_of
from idlm.files.paths import refuse_pointer

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
OF_A_RUN = ("optimizer", "rng_state", "scaler", "scheduler", "training_args")
"""First letters of pickles that a Trainer writes next to weights."""
OTHER_FORMATS = {
    ".gguf": "GGUF, the format of llama.cpp",
    ".ggml": "GGML, a former format of llama.cpp",
    ".onnx": "ONNX",
    ".h5": "HDF5, the format of Keras",
    ".msgpack": "msgpack, the format of Flax",
    ".npz": "NumPy",
    **dict.fromkeys(PICKLES, "a pickle, which can hold code"),
}
"""Endings of weights in formats that are not read."""
CONVERT = (
    "import sys; from transformers import AutoModelForCausalLM as M; "
    "M.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[1])"
)


class Stored(NamedTuple):
    """Where a tensor is, `size` bytes from `start` of a file, and what its header states of it: `name` there,
    and `dtype` by safetensors' names."""

    path: Path
    name: str
    start: int
    size: int
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(directory: Path, *, refuse_copies: bool = False) -> dict[str, Stored]:
    """Return all tensors of a checkpoint by name. A shard may hold an old copy of a tensor that the index
    assigns to another one: it is left out, or refused. UserError IDLM-0602: no safetensors, 0607: a file is
    missing or damaged, or the index names others than plain *.safetensors."""
    assigned, single = _index(directory), directory / SINGLE_FILE
    files = sorted({*assigned.values()} or filter(Path.is_file, [single]))
    if not files:
        raise _without_weights(directory)
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise UserError(
            "IDLM-0607",
            f"{directory} lacks {len(missing)} of {len(files)} weight files: {some_of(missing)}",
            fix="download or copy them too",
        )
    found: dict[str, Stored] = {}
    for path in files:
        for name, one in headers(path).items():
            if assigned.get(name, path) == path:
                found[name] = one
            elif refuse_copies:
                raise UserError(
                    "IDLM-0607",
                    f"{path} holds {name}, which {INDEX_FILE} assigns to another file",
                    fix=f"download or copy the safetensors files of {directory} again",
                )
    return found


def headers(path: Path) -> dict[str, Stored]:
    """Return the tensors of one file; UserError IDLM-0607 where its header does not describe the file."""
    from safetensors import SafetensorError, safe_open

    refuse_pointer("IDLM-0607", path)
    fix, errors = "download or copy the file again", (OSError, SafetensorError)
    with naming("IDLM-0607", f"{path} cannot be read as safetensors", fix=fix, of=errors):
        # It compares the header with the file; NumPy is imported faster than torch.
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries: dict[str, Any] = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        first, last = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = Stored(path, name, first, last - first, tuple(entry["shape"]), entry["dtype"])
    return found


def _index(directory: Path) -> Mapping[str, Path]:
    """Return the file of each tensor by the index; empty without one, and next to a single file."""
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file() or not index.is_file():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("IDLM-0607", f"{index} has no weight_map", fix="restore the file from its source")
    for name in sorted({str(name) for name in weight_map.values()}):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                "IDLM-0607",
                f"{index} names the file {name!r}; allowed are plain *.safetensors names",
                fix="do not use this checkpoint unless you know where it comes from",
            )
    return {tensor: directory / name for tensor, name in weight_map.items()}


def other_format(path: Path) -> str | None:
    """Return a file of weights in another format, named with it: `path`, or the first in that directory."""
    names = sorted(file.name for file in path.iterdir()) if path.is_dir() else [path.name]
    names = [name for name in names if not name.startswith(OF_A_RUN)]
    formats = ((name, OTHER_FORMATS.get(Path(name).suffix.lower())) for name in names)
    return next((f"{name} ({kind})" for name, kind in formats if kind is not None), None)


def _without_weights(directory: Path) -> UserError:
    """Return the error of a directory without safetensors, by what it has in their place."""
    others = sorted(path for path in directory.iterdir() if path.suffix == ".safetensors")
    lost = [path.name for path in others if not path.exists()]
    has, other, fix = "", other_format(directory), "download or copy the safetensors files of the checkpoint"
    if lost:
        has, fix = f"; {some_of(lost)} is a link to a file that is gone", f"{fix} again"
    elif others:
        has = f"; it has {some_of([path.name for path in others])}"
        fix = f"download {INDEX_FILE} too, or name the only file {SINGLE_FILE} if it holds the whole model"
    elif other is not None:
        has = f"; it has {other}, which is not read"
        fix = "download the checkpoint that it was made from, whose weights are safetensors"
        if other.startswith("pytorch_model"):
            command = f'python -c "{CONVERT}" {shlex.quote(str(directory))}'
            fix = f"download the safetensors files; or, if you trust it, convert it: {command}"
    return UserError("IDLM-0602", f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{has}", fix=fix)
