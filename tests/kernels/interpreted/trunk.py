"""The Triton kernels of the trunk in the interpreter: started by test_interpreted.py.

float32 and float16: the interpreter has no bfloat16. tests/gpu/kernels/test_trunk_gpu.py has more and larger
shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from idlm.kernels.gated_lora import GatedLora, expand_add, expand_swiglu, kernel
from idlm.kernels.linear import Linears, linear, linear_swiglu, op
from idlm.kernels.linear.launch import LinearLaunch, fixed_launch, make_workspace, num_splits, workspace_size
from idlm.kernels.qkv_rope_cache import make_rope, qkv_rope_cache
from idlm.kernels.rms_norm import add_rms_norm
from idlm.kernels.swiglu import swiglu
from tests.kernels.cases.outputs import check_heads_in_place
from tests.kernels.cases.trunk import CHECKS, LORA_VARIANTS, Draw, check_linear_lora

SMALL = LinearLaunch(block_e=32, block_r=16, block_d=32, splits=3, stages=1)
"""One tile for all rows: the interpreter multiplies with numpy, whose order of sums follows the tile."""


@pytest.mark.sweep_but(8)
@pytest.mark.parametrize("op", CHECKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(2))
def test_against_the_definition(op: str, dtype: torch.dtype, seed: int) -> None:
    CHECKS[op](Draw(seed, "cpu", dtype, largest=100 if op == "qkv_rope_cache" else 96))


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("seed", range(2))
def test_splits_of_a_linear(seed: int) -> None:
    CHECKS["linear"](Draw(100 + seed, "cpu", torch.float32, largest=800))


SPLIT_DRAWS = [(45, torch.float16), (68, torch.float32), (107, torch.float16)]
"""Draws of one, four and two splits, of 16, 28 and 17 rows of which some or all are MASK."""


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("variant", range(len(LORA_VARIANTS)))
def test_splits_of_a_linear_with_an_adapter(variant: int) -> None:
    seed, dtype = SPLIT_DRAWS[variant % len(SPLIT_DRAWS)]
    check_linear_lora(Draw(seed, "cpu", dtype, largest=800), variant)


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [3, 200])
def test_a_deterministic_row_is_summed_alike_with_an_adapter_and_without(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a width where gate and up are split differently from twice as many outputs. (A GPU test compares the
    bits: numpy's product sums in the order of the tile.)"""
    F, D, rank, splits = 1600, 4096, 16, []
    adapted, alone = (
        fixed_launch(rows, width, D, torch.float16, gated=width == F) for width in (2 * F + 2 * rank, F)
    )
    assert adapted.splits != alone.splits

    def product(x_RD: Tensor, weight_ED: Tensor, *, launch: LinearLaunch, **_: object) -> Tensor:
        splits.append(num_splits(launch, D))
        return x_RD.new_zeros(len(x_RD), len(weight_ED))

    monkeypatch.setattr(op, "linear", product)
    monkeypatch.setattr(op, "linear_swiglu", product)
    weight, b = torch.zeros(2 * F + 2 * rank, D).half(), torch.zeros(2 * F, rank).half()
    x, is_mask = torch.zeros(rows, D).half(), torch.zeros(rows, dtype=torch.bool)
    lora, linears = (
        GatedLora(b_Er=b, gate=is_mask, sizes=(F, F), scaling=1.0),
        Linears(deterministic=True),
    )
    linears.swiglu(x, weight[: 2 * F])
    linears.swiglu(x, weight, lora=lora)
    assert splits == [alone.splits] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_at_any_number_of_rows_and_either_way_of_adding_splits(gated: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(20, 800, generator=generator), torch.randn(40, 800, generator=generator)
    op = linear_swiglu if gated else linear
    whole = op(x, weight, launch=SMALL)
    for num_rows in (1, 7, 17):
        for serial in (False, True):
            launch = replace(SMALL, serial=serial)
            assert torch.equal(op(x[:num_rows], weight, launch=launch), whole[:num_rows])
    one_share = op(x, weight, launch=replace(SMALL, splits=1))
    assert not torch.equal(one_share, whole), "the shares have no effect, so this test sees nothing"


def test_a_program_adds_an_adapter_to_several_tiles_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs for four tiles of rows, of which the second has no MASK row; h of other rows is NaN."""
    generator = torch.Generator().manual_seed(0)
    y, h, b = (torch.randn(*size, generator=generator) for size in ((50, 80), (50, 16), (80, 8)))
    is_mask = (torch.arange(50) % 3 > 0) & (torch.arange(50) // 16 != 1)
    h[~is_mask] = torch.nan
    expected = expand_add(y.clone(), is_mask, h, b, sizes=(40, 40), scaling=2.0)
    gated = expand_swiglu(y.clone(), is_mask, h, b, scaling=2.0)
    monkeypatch.setattr(kernel, "PROGRAMS", 4)
    monkeypatch.setattr(kernel, "ROWS", (16,))
    found = expand_add(y.clone(), is_mask, h, b, sizes=(40, 40), scaling=2.0)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[~is_mask], y[~is_mask]) and not torch.equal(found, y)
    torch.testing.assert_close(expand_swiglu(y.clone(), is_mask, h, b, scaling=2.0), gated)


def test_a_workspace_is_left_as_it_was_found() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 800, generator=generator), torch.randn(72, 800, generator=generator)
    floats, tiles = workspace_size(SMALL, 9, 72, 800, gated=False)
    workspace = make_workspace(torch.device("cpu"), num_floats=floats, num_tiles=tiles)
    expected = linear(x, weight, launch=SMALL)
    for _ in range(2):
        workspace.partials.fill_(float("nan"))
        assert torch.equal(linear(x, weight, launch=SMALL, workspace=workspace), expected)
        assert not workspace.counters.any()
    small = make_workspace(torch.device("cpu"), num_floats=floats - 1, num_tiles=tiles)
    with pytest.raises(AssertionError, match="floats"):
        linear(x, weight, launch=SMALL, workspace=small)


@pytest.mark.sweep_but(3)
@pytest.mark.parametrize(("E", "D"), [(6144, 4096), (151936, 4096), (100, 96)])
@pytest.mark.parametrize("gated", [False, True])
def test_fixed_splits_follow_the_weight_alone(E: int, D: int, gated: bool) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        launches = [fixed_launch(rows, E, D, dtype, gated=gated) for rows in (1, 16, 17, 64, 100, 129, 4096)]
        assert len({num_splits(launch, D) for launch in launches}) == 1
        assert launches[-1].serial


def test_caches_of_eight_bits_are_scaled_and_saturate() -> None:
    from idlm.kernels.qkv_rope_cache.op import plain_qkv_rope_cache, rope_tables

    generator = torch.Generator().manual_seed(0)
    qkv = 30 * torch.randn(5, 8, 16, generator=generator)
    inv_freq, positions, slots = torch.rand(8), torch.arange(5), torch.tensor([3, -1, 0, 7, 5])
    scales = (torch.tensor([0.5, 0.01]), torch.tensor([0.02, 1.0]))
    found, plain = ([torch.zeros(8, 2, 16).to(torch.float8_e4m3fn) for _ in range(2)] for _ in range(2))
    rows = qkv.clone()
    q = qkv_rope_cache(
        qkv,
        *found,
        rope=make_rope(positions, inv_freq, dtype=qkv.dtype),
        slot_mapping_R=slots,
        k_scale_K=scales[0],
        v_scale_K=scales[1],
    )
    tables = rope_tables(positions, inv_freq, scaling=1.0, dtype=rows.dtype)
    q_plain = plain_qkv_rope_cache(rows, *plain, tables, slots, None, scales)
    torch.testing.assert_close(q, q_plain)
    for mine, theirs in zip(found, plain, strict=True):
        mine, theirs = mine.float(), theirs.float()
        assert float(mine.abs().max()) == 448
        # The interpreter loses the carry of a value that rounds up to a power of two, so half of it remains.
        carried = (mine * 2 == theirs) & (mine != 0)
        assert int(carried.sum()) <= 5
        torch.testing.assert_close(mine[~carried], theirs[~carried], atol=0, rtol=0.13)


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(1, torch.float32), (3, torch.float16), (3, torch.float32), (17, torch.float16)]
)
def test_heads_in_place(num_rows: int, dtype: torch.dtype) -> None:
    check_heads_in_place(num_rows, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_norm_and_a_swiglu_may_take_the_place_of_their_input(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 33, generator=generator).to(dtype), torch.randn(33).to(dtype)
    normed, _ = add_rms_norm(x.clone(), None, weight, eps=1e-5)
    add_rms_norm(x, None, weight, eps=1e-5, out_RD=x)
    assert torch.equal(x, normed)
    gate_up = torch.randn(7, 2 * 33, generator=generator).to(dtype)
    up, hidden = gate_up[:, 33:].clone(), swiglu(gate_up)
    swiglu(gate_up, out_RF=gate_up[:, :33])
    assert torch.equal(gate_up[:, :33], hidden) and torch.equal(gate_up[:, 33:], up)
