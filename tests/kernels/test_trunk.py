"""The trunk's ops: the plain paths against the references, the kernels compiled for sm_90,
the choice of a linear. tests/gpu/kernels/test_trunk_gpu.py runs the kernels on a GPU."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from idlm.kernels.backend import FP8
from idlm.kernels.gated_lora import GatedLora, expand_add, expand_swiglu
from idlm.kernels.linear import Fp8Weight, dequantised, library_linear, linear, linear_swiglu, quantise_fp8
from idlm.kernels.qkv_rope_cache import Rope, make_rope, qkv_rope_cache
from idlm.kernels.rms_norm import add_rms_norm
from idlm.kernels.swiglu import swiglu
from tests.kernels.cases.plain_torch import rms_norm, rotate
from tests.kernels.hopper_compiler import compiled_launches
from tests.margins import assert_same_rows, rows_keep_bits

if TYPE_CHECKING:
    from idlm.kernels.linear.launch import LinearLaunch
SHARED_BYTES = 225 * 1024
MAX_SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize(
    "op", ["rms_norm", "swiglu", "qkv_rope_cache", "gated_lora", "several_adapters", "linear", "linear_lora"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_paths_equal_the_references(op: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from tests.kernels.cases.trunk import CHECKS, Draw

    for seed in range(4):
        CHECKS[op](Draw(seed, "cpu", dtype, largest=100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rounding_equals_the_trunk(dtype: torch.dtype, has_norm: bool) -> None:
    """Bits equal those of the separate steps of infer/models/dense.py."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(9, 8, 32, generator=generator).to(dtype)
    weight = torch.randn(6, 32, generator=generator).to(dtype) if has_norm else None
    inv_freq, positions = 100.0 ** -torch.linspace(0, 1, 16), torch.randint(0, 3000, (9,))
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    tables = [torch.cat(halves, -1).to(dtype)[:, None] for halves in ((cos, cos), (-sin, sin))]
    qk = qkv[:, :6] if weight is None else rms_norm(qkv[:, :6], weight, 1e-6)
    expected, value = rotate(qk, *tables), qkv[:, 6:].clone()
    caches = [torch.zeros(9, 2, 32, dtype=dtype) for _ in range(2)]
    q = qkv_rope_cache(
        qkv,
        *caches,
        rope=make_rope(positions, inv_freq, dtype=dtype),
        slot_mapping_R=torch.arange(9),
        qk_norm_YH=weight,
    )
    assert torch.equal(q, expected[:, :4])
    assert torch.equal(caches[0], expected[:, 4:])
    assert torch.equal(caches[1], value)
    hidden, residual = (torch.randn(5, 96, generator=generator).to(dtype) for _ in range(2))
    norm, total = torch.randn(96, generator=generator).to(dtype), hidden + residual
    normed, summed = add_rms_norm(hidden, residual, norm, eps=1e-6)
    assert torch.equal(summed, total)
    assert torch.equal(normed, rms_norm(total, norm, 1e-6)) or dtype == torch.float32
    torch.testing.assert_close(normed, rms_norm(total, norm, 1e-6))


def test_an_eight_bit_weight_is_within_half_a_step() -> None:
    weight = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    quantised = quantise_fp8(weight)
    back = dequantised(quantised.values_ED, quantised.scale_E)
    assert not back[3].any()
    error, largest = (back - weight).abs(), weight.abs().amax(dim=1, keepdim=True)
    assert (error <= weight.abs() / 16 + largest / 448 / 512).all()
    assert torch.equal(back.abs().amax(dim=1), largest[:, 0]) or (error <= largest / 16).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_eight_bit_weight_is_one_that_the_dtype_holds(dtype: torch.dtype, has_bias: bool) -> None:
    """Bits equal those of a linear with the rounded weight; rounding twice changes nothing."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(70, 96, generator=generator) * 0.05).to(dtype)
    before, x = weight.clone(), torch.randn(9, 96, generator=generator).to(dtype)
    quantised = quantise_fp8(weight)
    assert torch.equal(weight, before)
    exact = dequantised(quantised.values_ED, quantised.scale_E)
    widened = quantised.widened(dtype)
    assert torch.equal(widened.float(), exact)
    assert torch.equal(quantise_fp8(widened).widened(dtype), widened)
    mantissa, _ = torch.frexp(quantised.scale_E)
    assert (mantissa == 0.5).all()
    bias = torch.randn(70, generator=generator).to(dtype) if has_bias else None
    assert torch.equal(linear(x, quantised, bias_E=bias), torch.nn.functional.linear(x, widened, bias))


def test_few_rows_get_tiles_that_fill_the_device() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.linear.launch import FEW_PROGRAMS, few_rows_launch

    bf16 = torch.bfloat16
    for E, D, gated in ((6144, 4096, False), (4096, 12288, False), (12288, 4096, True), (24832, 4096, False)):
        for rows in (1, 16, 17, 32):
            launch = few_rows_launch(rows, E, D, bf16, gated=gated)
            assert launch is not None and launch.block_r == (16 if rows <= 16 else 32), "one tile of rows"
            programs = -(-E // launch.block_e) * launch.splits
            assert FEW_PROGRAMS / 2 < programs <= FEW_PROGRAMS, f"{E=} {D=} {launch=}"
    assert few_rows_launch(33, 6144, 4096, bf16) is None
    assert few_rows_launch(64, 12288, 4096, bf16, gated=True) is not None
    assert few_rows_launch(64, 12288, 4096, bf16) is few_rows_launch(64, 3072, 1024, bf16, gated=True) is None
    assert few_rows_launch(65, 12288, 4096, bf16, gated=True) is None
    assert few_rows_launch(1, 6144, 4096, torch.float32) is None


def test_the_product_adds_an_adapter_if_it_can() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.linear.launch import LinearLaunch, adds_lora, few_rows_launch

    launch = few_rows_launch(7, 12288, 4096, torch.bfloat16, gated=True)
    assert launch is not None and adds_lora(launch, 7, 12288, rank=128)
    for num_rows, E, rank in ((17, 12288, 128), (7, 12288, 256), (7, 100, 128)):
        assert not adds_lora(launch, num_rows, E, rank=rank), f"{num_rows=} {E=} {rank=}"
    assert not adds_lora(LinearLaunch(serial=True), 7, 64, rank=8)
    assert not adds_lora(LinearLaunch(block_r=64), 33, 12288, rank=128), "no GPU has checked it"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(run: Callable[[], object]) -> Any:
    """The one kernel that `run` launches on a Hopper, compiled; nothing spills."""
    [(_, made)] = compiled_launches(run)
    assert made.spilled_bytes == 0
    return made


@pytest.mark.sweep_but("448-False")
@pytest.mark.parametrize(("rows", "is_fp8"), [(448, False), (7, True)])
def test_the_linear_compiles_for_hopper_without_spills(rows: int, is_fp8: bool) -> None:
    """Without warpgroups. Tiles of many rows would prefetch the same columns."""
    pytest.importorskip("triton")
    from idlm.kernels.linear.launch import fixed_launch, with_pdl

    launch = with_pdl(replace(fixed_launch(rows, 6144, 4096, torch.bfloat16), groups=None), True)
    x, weight, bias = meta(rows, 4096), meta(6144, 4096), meta(6144)
    quantised = Fp8Weight(values_ED=weight.to(FP8), scale_E=bias.float()) if is_fp8 else weight
    made = compiled(partial(linear, x, quantised, bias_E=bias, launch=launch))
    assert made.shared_bytes <= SHARED_BYTES
    assert f"m64n{launch.block_r}k16" in made.ptx
    assert_prefetches(made.ptx, num=2 if is_fp8 else 0)


GROUPS = [
    (False, 1, 256, 2),
    (False, 4, 128, 2),
    (False, 2, 64, 2),
    (False, 2, 128, 3),
    (True, 1, 128, 2),
    (True, 2, 64, 2),
]
"""Gated or not, shares, rows of a tile, warpgroups."""


@pytest.mark.sweep_but("False-4-128-2")
@pytest.mark.parametrize(("gated", "splits", "rows", "num"), GROUPS)
def test_the_product_of_warpgroups_compiles_for_hopper(gated: bool, splits: int, rows: int, num: int) -> None:
    """Nothing spills, products are not serialized, and every program has so many warps and one that loads."""
    pytest.importorskip("triton")
    from idlm.kernels.linear.groups import Groups
    from idlm.kernels.linear.launch import LinearLaunch

    op = linear_swiglu if gated else linear
    launch = LinearLaunch(splits=splits, serial=True, groups=Groups(rows=rows, num=num), pdl=True)
    made = compiled(partial(op, meta(448, 4096), meta(4096, 4096), bias_E=meta(4096), launch=launch))
    assert "many_rows_kernel" in made.ptx and "serialized" not in made.output
    assert made.shared_bytes <= MAX_SHARED_BYTES
    assert made.ptx.count("wgmma.mma_async") == num * 4 * (2 if gated else 1)
    assert f"m64n{rows}k16" in made.ptx and "cp.async.bulk.tensor" in made.ptx
    before, _, _ = made.ptx.partition("griddepcontrol.wait")
    assert "cp.async.bulk.tensor" in before and "griddepcontrol.launch_dependents" not in before


def test_tiles_of_many_rows_end_together() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.linear.groups import LOW, TALL, WIDE, choose_groups
    from idlm.kernels.linear.launch import fixed_launch

    for rows, E, splits, gated, groups in (
        (448, 12288, 1, True, WIDE),
        (240, 12288, 1, True, LOW),
        (448, 3072, 4, True, LOW),
        (448, 6144, 2, False, TALL),
        (240, 6144, 2, False, WIDE),
        (112, 6144, 2, False, LOW),
        (448, 4096, 4, False, WIDE),
        *((rows, 4096, 4, False, groups) for rows, groups in ((240, LOW), (112, LOW), (64, None))),
        *((64, 6144, 2, False, LOW), (64, 12288, 1, True, None), (112, 1024, 4, False, None)),
        (448, 151936, 1, False, TALL),
    ):
        assert choose_groups(rows, E, splits=splits, gated=gated) == groups, f"{rows=} {E=} {gated=}"
    assert fixed_launch(64, 6144, 4096, torch.bfloat16).groups == LOW
    assert fixed_launch(448, 6144, 4096, torch.float32).groups is None


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_stages_of_warpgroups_fill_shared_memory(rows: int) -> None:
    from idlm.kernels.linear.groups import MAX_STAGES, Groups

    for num, gated in itertools.product((2, 3), (False, True)):
        stages = Groups(rows=rows, num=num).stages(gated=gated)
        stage = 2 * 64 * (rows + 64 * num * (2 if gated else 1))
        used = stages * stage + 2 * rows * 64 * num
        assert used <= SHARED_BYTES < used + stage or stages == MAX_STAGES


def assert_prefetches(ptx: str, *, num: int) -> None:
    """So many prefetches by a thread before the wait: weights alone, 128 columns of 64 rows by 128 threads,
    each sector once."""
    ahead, _, after = ptx.partition("griddepcontrol.wait")
    assert ahead.count("prefetch.global.L2") == ptx.count("prefetch.global.L2") == num
    assert "cp.async" not in ahead and "ld.global" not in ahead, "activations are read too early"
    assert after.index("cp.async.cg") < after.index("griddepcontrol.launch_dependents")


def few_rows(rows: int, E: int, **options: Any) -> LinearLaunch:
    """The launch of a decoding step, of which two programs fit a multiprocessor."""
    from idlm.kernels.linear.launch import few_rows_launch, with_pdl

    launch = few_rows_launch(rows, E, 4096, torch.bfloat16, **options)
    assert launch is not None
    return with_pdl(launch, True)


@pytest.mark.sweep
@pytest.mark.parametrize(("rows", "gated"), [(28, False), (7, True)])
def test_two_programs_of_a_decoding_step_fit_a_multiprocessor(rows: int, gated: bool) -> None:
    pytest.importorskip("triton")
    launch = few_rows(rows, 12288 if gated else 6144, gated=gated)
    op, weight = (linear_swiglu, meta(24576, 4096)) if gated else (linear, meta(6144, 4096))
    made = compiled(partial(op, meta(rows, 4096), weight, launch=launch))
    assert 2 * made.shared_bytes <= SHARED_BYTES and 2 * made.registers * 32 * launch.warps <= 1 << 16
    assert f"m64n{launch.block_r}k16" in made.ptx
    assert_prefetches(made.ptx, num=8 if gated else 4)


@pytest.mark.sweep
def test_a_swiglu_with_an_adapter_compiles_for_hopper_without_spills() -> None:
    pytest.importorskip("triton")
    launch, gate = few_rows(28, 12288, gated=True), meta(28, dtype=torch.bool)
    lora = GatedLora(b_Er=meta(24576, 128), gate=gate, sizes=(12288, 12288), scaling=0.5)
    made = compiled(partial(linear_swiglu, meta(28, 4096), meta(24832, 4096), lora=lora, launch=launch))
    assert 2 * made.shared_bytes <= SHARED_BYTES, "two programs do not fit"
    assert 2 * made.registers * 32 * launch.warps <= 1 << 16, "two programs do not fit"
    assert "fma.rn" not in made.ptx, "a product and a sum are rounded once"
    assert "cp.async.ca" not in made.ptx, "the weight is not read by 16 bytes"
    # After the wait for h, all loads of h and both B are issued before any is used.
    _, _, after = made.ptx.rpartition("ld.global.gpu.acquire")
    assert after.count(" ld.global.v4.b32") == 16
    assert after.index("ld.global.cg") < after.rindex(" ld.global.v4.b32") < after.index("st.shared.v")


@pytest.mark.sweep
def test_the_small_ops_compile_for_hopper_without_spills() -> None:
    x, integers, cache = meta(99, 4096), meta(4096, dtype=torch.int64), meta(4096, 8, 128)
    rope = Rope(positions_R=integers[:99], inv_freq_h=meta(64, dtype=torch.float32), scaling=1.0, tables=None)
    slots, norm = {"slot_mapping_R": integers[:99]}, meta(40, 128)
    heads = partial(qkv_rope_cache, meta(99, 48, 128), cache, cache, rope=rope, qk_norm_YH=norm, **slots)
    b_Er = meta(8192, 128)

    def adapted(op: Any, rows: int, **options: Any) -> Callable[[], object]:
        gate = meta(rows, dtype=torch.bool)
        return partial(op, meta(rows, 8192), gate, meta(rows, 256), b_Er, scaling=0.5, **options)

    sizes = {"sizes": (4096, 4096)}
    # How often a thread reads ahead of its wait, which is what no kernel of the chain writes, and whether the
    # next kernel may launch before.
    for num_ahead, is_early, run in (
        (2, True, partial(add_rms_norm, x, x, meta(4096), eps=1e-6)),
        (0, False, partial(swiglu, meta(99, 8192))),
        (9, True, heads),
        (11, False, adapted(expand_add, 60, **sizes)),
        (12, False, adapted(expand_swiglu, 60)),
        (8, False, adapted(expand_add, 28, **sizes)),
        (10, False, adapted(expand_swiglu, 28)),
    ):
        made = compiled(run)
        assert 4 * made.shared_bytes <= SHARED_BYTES and made.registers <= 128, "four programs do not fit"
        ahead, _, after = made.ptx.partition("griddepcontrol.wait")
        assert ahead.count("ld.global") == num_ahead and after.count("ld.global") > 0, run
        assert ("griddepcontrol.launch" in ahead.partition("ld.global")[0]) == is_early, run
        assert made.ptx.count("griddepcontrol") == 2 and "st.global" not in ahead, run
        assert "fma.rn.bf16" not in made.ptx, f"a product and a sum are rounded once: {run}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 130])
def test_ops_write_to_given_places_on_a_cpu(num_rows: int, dtype: torch.dtype) -> None:
    from tests.kernels.cases.outputs import check_expert_steps, check_heads_in_place

    check_heads_in_place(num_rows, dtype, torch.device("cpu"))
    check_expert_steps(num_rows, dtype, torch.device("cpu"))


def test_bits_of_a_row_of_a_cpu_product_do_not_depend_on_the_number_of_rows() -> None:
    """Into a given position, with a bias, and from columns of a wider tensor too."""
    generator = torch.Generator().manual_seed(0)
    for D, E in ((32, 48), (48, 33), (128, 96), (512, 64)):
        x = torch.randn(40, 2 * D, generator=generator)[:, :D]
        weight, bias = torch.randn(E, D, generator=generator), torch.randn(E, generator=generator)
        for bias_E in (None, bias):
            expected = library_linear(x, weight, bias_E=bias_E)
            torch.testing.assert_close(expected, torch.nn.functional.linear(x, weight, bias_E))
            for start, stop in ((0, 1), (39, 40), (3, 5), (5, 8), (1, 5), (7, 40), (0, 40)):
                out = torch.full((stop - start, E), float("nan"))
                library_linear(x[start:stop], weight, bias_E=bias_E, out_RE=out)
                assert_same_rows(out, expected[start:stop])


def test_products_of_an_intel_cpu_keep_the_bits_of_a_row() -> None:
    info = Path("/proc/cpuinfo").read_text()
    if "GenuineIntel" not in info or " avx2 " not in info or os.environ["MKL_CBWR"] != "AUTO,STRICT":
        pytest.skip("no Intel CPU with AVX2 whose MKL offers it")
    assert rows_keep_bits()
