"""Routing and experts: the plain path against the references, the interpreted kernels, the kernels compiled
for sm_90, the number of tiles. tests/gpu/block/test_experts_gpu.py runs the kernels on a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from idlm.kernels.experts import Routing, experts, route
from tests.kernels.references.experts import experts_reference


@pytest.mark.parametrize("seed", range(6))
def test_the_plain_path_equals_the_references(seed: int) -> None:
    pytest.importorskip("triton")
    from tests.kernels.cases.experts import LARGE, Case, check_route, chosen_of

    case = Case(seed, "cpu", torch.float32, LARGE)
    check_route(case)
    x_RD, (experts_RC, weights_RC) = case.rows(16), chosen_of(case)
    shared_RD = case.rows(16) if seed % 2 else None
    gate_up_EFD, down_EDF = case.tensor(5, 40, 16), case.tensor(5, 16, 20)
    found_RD, true_RD = (
        op(x, gate_up_EFD, down_EDF, experts_RC, weights_RC, first=1, shared_RD=shared_RD)
        for op, x in ((experts, x_RD), (experts_reference, x_RD.double()))
    )
    torch.testing.assert_close(found_RD.double(), true_RD, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("seed", range(24))
def test_the_plain_path_routes_by_blocks_as_the_reference(seed: int) -> None:
    pytest.importorskip("triton")
    from tests.kernels.cases.experts import check_block_route

    check_block_route(seed, "cpu", torch.float32, most_blocks=6)


def test_ranks_parts_add_up_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    x, shared = (torch.randn(9, 8, generator=generator) for _ in range(2))
    gate_up, down = (torch.randn(shape, generator=generator) for shape in ((6, 10, 8), (6, 8, 5)))
    chosen, weights = route(
        torch.randn(9, 6, generator=generator), Routing(num_chosen=3, score="softmax", is_normalised=True)
    )
    whole = experts(x, gate_up, down, chosen, weights, shared_RD=shared)
    parts = [experts(x, gate_up[at : at + 3], down[at : at + 3], chosen, weights, first=at) for at in (0, 3)]
    torch.testing.assert_close(parts[0] + parts[1] + shared, whole)
    assert min(part.abs().max() for part in parts) > 0


def test_there_is_room_for_all_tiles_whatever_is_chosen() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.experts.launch import choose, num_tiles

    generator = torch.Generator().manual_seed(0)
    for num_experts, num_pairs, block_r in ((5, 3, 16), (8, 400, 16), (128, 4096, 32), (256, 999, 128)):
        for sharpness in (0.0, 3.0, 30.0):
            probs = (sharpness * torch.randn(num_experts, generator=generator)).softmax(0)
            counts = torch.multinomial(probs, num_pairs, replacement=True, generator=generator).bincount()
            assert (-(-counts // block_r)).sum() <= num_tiles(num_pairs, num_experts, block_r)
        # Every expert has one pair more than whole tiles, which reaches the bound.
        fitting = num_experts * (block_r + 1)
        assert num_tiles(fitting, num_experts, block_r) >= 2 * num_experts
    tiles = [choose(rows, 8, 128, torch.bfloat16).block_r for rows in (1, 32, 128, 256, 1024, 2048, 8192)]
    assert tiles == sorted(tiles) and tiles[0] == 16 and tiles[-1] == 128
    assert len({choose(rows, 8, 128, torch.float32) for rows in (1, 32, 8192)}) == 1


class Integers(dict[str, str]):
    """Types of arguments: 32-bit integers unless given."""

    def __missing__(self, name: str) -> str:
        return "i32"


TYPES = Integers(
    dict.fromkeys(("x", "w", "y", "logits_RX", "y_PD", "shared_RD", "out_RD"), "*bf16")
    | dict.fromkeys(("tiles_T4", "order_P", "experts_P", "experts_RC"), "*i32")
    | {
        "bias_X": "*fp32",
        "slots_R": "*i64",
        "positions_R": "*i64",
        "admitted_RX": "*i8",
        "weights_RC": "*fp32",
        "scaling": "fp32",
    }
)


@pytest.mark.sweep
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 256, 8192])
def test_the_products_compile_for_hopper_without_spills(rows: int, gated: bool) -> None:
    pytest.importorskip("triton")
    from idlm.kernels.experts.kernel import grouped_kernel
    from idlm.kernels.experts.launch import choose
    from tests.kernels.hopper_compiler import compile_for_hopper

    launch = choose(rows, 8, 128, torch.bfloat16)
    tile = launch.gate_up if gated else launch.down
    constants: dict[str, Any] = {
        "GATED": gated,
        "STACKED": tile.stacked,
        "ALONE": rows == 1,
        "EVEN": True,
        "BLOCK_O": tile.block_o,
        "BLOCK_R": launch.block_r,
        "BLOCK_I": tile.block_i,
        "STAGES": tile.stages,
        "PRECISION": "tf32",
        "PDL": True,
    }
    made = compile_for_hopper(grouped_kernel, TYPES, constants, num_warps=tile.warps)
    assert made.spilled_bytes == 0
    assert made.shared_bytes <= 225 * 1024
    assert f"m64n{launch.block_r}k16" in made.ptx
    first_read = min(match.start() for match in re.finditer(r"ld\.global|cp\.async\.c", made.ptx))
    assert 0 <= made.ptx.index("griddepcontrol.wait") < first_read


@pytest.mark.sweep
def test_other_kernels_compile_for_hopper_without_spills() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.experts.kernel_rows import add_experts_kernel, admit_kernel, plan_kernel, route_kernel
    from idlm.kernels.experts.launch import ADMIT_WARPS
    from tests.kernels.hopper_compiler import compile_for_hopper

    router = {"X": 256, "CHOSEN": 8, "GROUPS": 8, "CHOSEN_GROUPS": 4, "PAD_G": 8, "PAD_S": 32}
    flags = {"SIGMOID": True, "NORMALISED": True, "HAS_BIAS": True, "HAS_SLOTS": True, "MIN_SUM": 1e-20}
    flags |= {"BY_BLOCK": False, "SIZE": 1}
    one_group = {"GROUPS": 1, "CHOSEN_GROUPS": 1, "PAD_G": 1, "PAD_S": 256, "BY_BLOCK": True, "SIZE": 32}
    admission = {"X": 256, "CAPACITY": 48, "SIZE": 32, "PAD_W": 32, "PAD_X": 256}
    admission |= {"SIGMOID": True, "HAS_BIAS": True, "HAS_SLOTS": True}
    for kernel, constants, warps in (
        (route_kernel, router | flags, 1),
        (route_kernel, router | flags | one_group, 1),
        (admit_kernel, admission, ADMIT_WARPS),
        (plan_kernel, {"BLOCK_P": 8192, "BLOCK_R": 128, "PAD_E": 256}, 8),
        (add_experts_kernel, {"CHOSEN": 8, "HAS_SHARED": True, "BLOCK_D": 1024}, 4),
    ):
        made = compile_for_hopper(kernel, TYPES, {**constants, "PDL": True}, num_warps=warps)
        assert made.spilled_bytes == 0, kernel
        wait = made.ptx.index("griddepcontrol.wait")
        assert wait < min(match.start() for match in re.finditer(r"(ld|st)\.global", made.ptx))
