"""The kernels of `masked_logits` compiled for Hopper; the interpreter compares them with the definition.

X wanted rows, V vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

TYPES = dict.fromkeys(("p_rows", "p_forbidden", "p_token"), "*i64")
TYPES |= dict.fromkeys(("p_own", "p_entropy"), "*fp64")
TYPES |= {"p_hidden": "*bf16", "p_parts": "*fp32", "p_nonfinite": "*i8"}
TYPES |= dict.fromkeys(("num_rows", "num_tokens", "width", "hidden_stride", "weight_stride"), "i32")
TYPES |= {"splits": "i32", "split_tiles": "i32"}
SHARED_BYTES = 227 << 10


def compiled(kernel: Any, constants: dict[str, Any], warps: int) -> Any:
    from tests.kernels.hopper_compiler import compile_for_hopper

    weight = "tensordesc<bf16[256, 64]>" if constants.get("TMA") else "*bf16"
    return compile_for_hopper(kernel, TYPES | {"weight": weight}, constants, num_warps=warps)


def compiled_parts(num_rows: int, *, tma: bool = True, entropy: bool = False, forbidden: int = 1) -> Any:
    """The fused kernel at its launch parameters for bf16, of columns that its tiles divide."""
    pytest.importorskip("triton")
    from idlm.kernels.masked_logits.kernel import parts_kernel
    from idlm.kernels.masked_logits.launch import choose

    launch = choose(num_rows, torch.bfloat16)
    constants = {
        "FORBIDDEN": forbidden,
        "ENTROPY": entropy,
        "TMA": tma,
        "EVEN": True,
        "BLOCK_X": launch.block_x,
        "BLOCK_D": launch.block_d,
        "GROUP": launch.group,
        "STAGES": launch.stages,
        "FLAT": launch.flat,
        "PRECISION": "tf32",
    }
    return compiled(parts_kernel, constants, launch.warps)


@pytest.mark.sweep
@pytest.mark.parametrize(("num_rows", "tma"), [(8192, True), (64, False)])
def test_the_greedy_kernel_compiles_for_hopper_without_spills(num_rows: int, tma: bool) -> None:
    made = compiled_parts(num_rows, tma=tma)
    assert made.spilled_bytes == 0 and made.shared_bytes <= SHARED_BYTES
    assert "m64n256k16" in made.ptx and ("cp.async.bulk" in made.ptx) == tma
    assert "cp.async.cg" in made.ptx, "rows are gathered into shared memory"


@pytest.mark.sweep
@pytest.mark.parametrize("entropy", [True, False])
def test_what_full_diffusion_asks_compiles_for_hopper(entropy: bool) -> None:
    """The mask and two stop tokens are forbidden: with `forbid_eos`, few bytes spill."""
    made = compiled_parts(64 if entropy else 8192, entropy=entropy, forbidden=3)
    assert made.spilled_bytes <= 64 and made.shared_bytes <= SHARED_BYTES


def test_the_workspace_holds_the_numbers_of_all_ranges() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.masked_logits import WORKSPACE_BYTES, WORKSPACE_ROW_BYTES
    from idlm.kernels.masked_logits.launch import max_splits

    for num_fields in (3, 4):
        for num_rows in (1, 64, 5000, 32768, 1_000_003, 20_000_000):
            splits = max_splits(num_rows, num_fields)
            assert splits >= 1
            num_bytes = 4 * num_fields * num_rows * splits
            assert num_bytes <= WORKSPACE_BYTES + num_rows * WORKSPACE_ROW_BYTES


def test_the_kernel_that_combines_ranges_compiles_for_hopper() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.masked_logits.kernel import combine_kernel

    made = compiled(combine_kernel, {"ENTROPY": True, "BLOCK_X": 16, "SPLITS": 64}, 4)
    assert made.spilled_bytes == 0
