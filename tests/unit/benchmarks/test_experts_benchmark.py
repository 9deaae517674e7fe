"""benchmarks.kernels.experts on a CPU: its arms compute the same layer, its sweep holds the tiles that are in
use.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels.experts import _tiles
from benchmarks.kernels.experts_arms import SHAPES, Layer
from idlm.kernels.experts.launch import choose


def test_all_arms_compute_the_same_layer() -> None:
    torch.manual_seed(0)
    layer = Layer(SHAPES["tiny"], "cpu")
    x_RD = layer.rows(20)
    loop_RD = layer.loop(x_RD)
    for arm in (layer.ours, layer.library):
        torch.testing.assert_close(arm(x_RD), loop_RD, atol=2e-2, rtol=2e-2)
    assert layer.is_right(x_RD)
    layer.down[0] *= 2
    assert layer.num_active(x_RD) == SHAPES["tiny"].num_experts
    with pytest.raises(AssertionError):
        torch.testing.assert_close(layer.library(x_RD), loop_RD, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rows", [1, 32, 256, 1024, 8192])
def test_the_sweep_holds_the_tiles_in_use(rows: int) -> None:
    launch = choose(rows, 8, 128, torch.bfloat16)
    assert launch.gate_up in set(_tiles(launch.block_r, True))
    assert launch.down in set(_tiles(launch.block_r, False))
