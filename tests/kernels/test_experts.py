"""Routing and experts: the plain path against the references, the interpreted kernels, the kernels compiled
for sm_90, the number of tiles. tests/gpu/block/test_experts_gpu.py runs the kernels on a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from idlm.kernels.experts import Routing, experts, route
from tests.kernels.hopper_compiler import compiled_launches
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


@pytest.mark.parametrize("seed", range(12))
def test_the_plain_path_routes_by_blocks_as_the_reference(seed: int) -> None:
    pytest.importorskip("triton")
    from tests.kernels.cases.experts import check_block_route

    check_block_route(seed, "cpu", torch.float32, max_blocks=6)


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


def launches_of(rows: int) -> list[tuple[str, Any]]:
    """What 128 experts, of which a row chooses 8, launch for so many rows in bf16."""
    x, chosen = torch.empty(rows, 2048, dtype=torch.bfloat16, device="meta"), (rows, 8)
    weights = x.new_empty(128, 2 * 768, 2048), x.new_empty(128, 2048, 768)
    tables = x.new_empty(chosen, dtype=torch.int32), x.new_empty(chosen, dtype=torch.float32)
    return compiled_launches(lambda: experts(x, *weights, *tables, shared_RD=x))


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [1, 8192])
def test_the_products_compile_for_hopper_without_spills(rows: int) -> None:
    pytest.importorskip("triton")
    from idlm.kernels.experts.launch import choose

    launch = choose(rows, 8, 128, torch.bfloat16)
    products = [made for name, made in launches_of(rows) if name == "grouped_kernel"]
    assert len(products) == 2
    for made in products:
        assert made.spilled_bytes == 0
        assert made.shared_bytes <= 225 * 1024
        assert f"m64n{launch.block_r}k16" in made.ptx
        first_read = min(match.start() for match in re.finditer(r"ld\.global|cp\.async\.c", made.ptx))
        assert 0 <= made.ptx.index("griddepcontrol.wait") < first_read


@pytest.mark.sweep
def test_other_kernels_compile_for_hopper_without_spills() -> None:
    logits_RX, rows_R = (
        torch.empty(99, 256, dtype=torch.bfloat16, device="meta"),
        torch.arange(99, device="meta"),
    )
    by_group = Routing(num_chosen=8, score="sigmoid", is_normalised=True, num_groups=8, num_chosen_groups=4)
    by_block = Routing(num_chosen=8, score="sigmoid", is_normalised=True, capacity=48, block_size=32)
    options = {"bias_X": logits_RX[0].float(), "slots_R": rows_R, "positions_R": rows_R}
    found = compiled_launches(lambda: [route(logits_RX, each, **options) for each in (by_group, by_block)])
    found += [each for each in launches_of(8192) if each[0] != "grouped_kernel"]
    names = ["route_kernel", "admit_kernel", "route_kernel", "plan_kernel", "add_experts_kernel"]
    assert [name for name, _ in found] == names
    for name, made in found:
        assert made.spilled_bytes == 0, name
        wait = made.ptx.index("griddepcontrol.wait")
        assert wait < min(match.start() for match in re.finditer(r"(ld|st)\.global", made.ptx))
