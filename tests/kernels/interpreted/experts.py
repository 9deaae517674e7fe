"""The Triton kernels of experts in the interpreter: started by test_interpreted.py.

float32 and float16: the interpreter has no bfloat16. tests/gpu/block/test_experts_gpu.py has larger shapes.
"""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.experts import Routing, experts, route
from idlm.kernels.experts.launch import ExpertsLaunch, Tile
from tests.kernels.cases.experts import SMALL, Case, check_block_route, check_experts, check_route
from tests.kernels.cases.outputs import check_expert_steps

TINY = ExpertsLaunch(
    block_r=16,
    gate_up=Tile(block_o=16, block_i=32, stages=1),
    down=Tile(block_o=32, block_i=16, stages=1),
)
STACKED = ExpertsLaunch(
    block_r=16,
    gate_up=Tile(block_o=16, block_i=32, stages=1, stacked=True),
    down=Tile(block_o=32, block_i=16, stages=1),
)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_routing(dtype: torch.dtype, seed: int) -> None:
    check_route(Case(seed, "cpu", dtype, SMALL))


@pytest.mark.sweep_but(2)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_routing_by_blocks(dtype: torch.dtype, seed: int) -> None:
    check_block_route(seed, "cpu", dtype, max_blocks=2, max_experts=16)


def test_ties_between_experts_of_a_block_admit_the_lowest() -> None:
    logits = torch.zeros(6, 12)
    logits[4:, 5:] = 1
    routing = Routing(num_chosen=2, score="sigmoid", is_normalised=True, capacity=3, block_size=4)
    experts_RC, _ = route(logits, routing, positions_R=torch.tensor([0, 1, 2, 3, 4, 5]))
    assert experts_RC.tolist() == [[0, 1]] * 4 + [[5, 6]] * 2


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_experts(dtype: torch.dtype, seed: int) -> None:
    check_experts(Case(seed, "cpu", dtype, SMALL), (TINY, STACKED)[seed % 2])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_ties_choose_the_lowest_experts(score: str) -> None:
    """Lower numbers first, for groups too; bf16 logits are often equal."""
    logits = torch.zeros(2, 12)
    logits[1, 5:] = 1
    for groups, expected in ((1, [[0, 1, 2], [5, 6, 7]]), (4, [[0, 1, 2], [6, 7, 8]])):
        routing = Routing(
            num_chosen=3, score=score, is_normalised=True, num_groups=groups, num_chosen_groups=1
        )
        experts_RC, weights_RC = route(logits, routing)
        assert experts_RC.tolist() == expected
        torch.testing.assert_close(weights_RC, torch.full((2, 3), 1 / 3))


def test_bits_of_a_row_do_not_depend_on_other_rows_or_tiles() -> None:
    """40 rows of one expert are three tiles; a row moves from tile to tile, and from a plan to none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 32, generator=generator)
    gate_up, down = (torch.randn(shape, generator=generator) for shape in ((3, 32, 32), (3, 32, 16)))
    chosen = torch.tensor([[1, 2]]).repeat(40, 1)
    weights = torch.rand(40, 2, generator=generator)
    whole = experts(x, gate_up, down, chosen, weights, launch=STACKED)
    for rows in ([39], [39, 3], list(range(39, 2, -1))):
        found = experts(x[rows], gate_up, down, chosen[rows], weights[rows], launch=STACKED)
        torch.testing.assert_close(found, whole[rows], atol=1e-5, rtol=1e-5)
    twice = experts(x, gate_up, down, chosen, weights, launch=STACKED)
    assert torch.equal(twice, whole)


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(1, torch.float16), (3, torch.float32), (17, torch.float16), (40, torch.float32)]
)
def test_steps_write_to_given_outputs(num_rows: int, dtype: torch.dtype) -> None:
    check_expert_steps(num_rows, dtype, torch.device("cpu"))
