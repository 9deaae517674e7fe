"""A base is loaded whole or refused: transformers would fill what is missing with random numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from idlm.checkpoint import MANIFEST
from idlm.errors import UserError
from idlm.train.base_model import load_base

TINY = Path(__file__).resolve().parents[2] / "recipes" / "assets" / "tiny_ar"
NAME = "model.layers.1.mlp.up_proj.weight"


def _weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})

    return apply


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).unlink()
        (directory / name).write_bytes(change(content))

    return apply


def _config(**values: object) -> Callable[[Path], None]:
    return _bytes("config.json", lambda old: json.dumps({**json.loads(old), **values}).encode())


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (_weights(lambda tensors: tensors.pop(NAME)), "IDLM-0541", NAME),
        (_weights(lambda tensors: tensors.update(surplus=torch.zeros(2))), "IDLM-0541", "surplus"),
        (
            _weights(lambda tensors: tensors.update({NAME: torch.zeros(2, 2)})),
            "IDLM-0541",
            "cannot be loaded",
        ),
        (_bytes("model.safetensors", lambda old: old[: len(old) // 2]), "IDLM-0541", "Safetensor"),
        (_bytes("model.safetensors", lambda old: b""), "IDLM-0541", "cannot be loaded"),
        (_bytes("config.json", lambda old: old[:-9]), "IDLM-0303", "config.json"),
        (_config(model_type="no_such_model"), "IDLM-0541", "no_such_model"),
        (_config(num_hidden_layers=5, layer_types=None), "IDLM-0541", "missing"),
        (_config(num_hidden_layers=3, layer_types=None), "IDLM-0541", "not used"),
        (lambda directory: (directory / "model.safetensors").unlink(), "IDLM-0541", "safetensors"),
        (lambda directory: (directory / "config.json").unlink(), "IDLM-0501", "config.json"),
    ],
)
def test_damaged_bases_are_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], code: str, words: str
) -> None:
    directory = tmp_path / "base"
    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns(MANIFEST))
    damage(directory)
    with pytest.raises(UserError, match=code) as caught:
        load_base(str(directory), attention="idlm_sdpa", dtype=torch.float32)
    assert words in caught.value.message


def test_a_base_with_a_manifest_is_checked_against_it(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "base")
    load_base(str(tmp_path / "base"), attention="idlm_sdpa", dtype=torch.float32)
    path = tmp_path / "base" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match="IDLM-0302"):
        load_base(str(tmp_path / "base"), attention="idlm_sdpa", dtype=torch.float32)
