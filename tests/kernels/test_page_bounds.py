"""Plain torch of page_bounds against its definition, and its kernels compiled for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.cases.page_bounds import Case


@pytest.mark.parametrize("seed", range(15))
def test_plain_torch_equals_the_definition(seed: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        Case(seed, dtype).check()
    Case(seed, torch.bfloat16, fp8=True).check()


def test_kernels_compile_for_hopper() -> None:
    """Without spills; the walk over bounds reads 16 bytes at a time."""
    pytest.importorskip("triton")
    from idlm.kernels.page_bounds import kernel
    from tests.kernels.hopper_compiler import compile_for_hopper

    bounds = {"least_XKH": "*bf16", "largest_XKH": "*bf16", "block_table": "*i64", "stride_table": "i32"}
    layout = {"K": 8, "H": 128, "PAGE_SIZE": 32, "PIECE": 16, "BLOCK_H": 128}
    cases: list[tuple[Any, dict[str, str], dict[str, Any], int]] = [
        (
            kernel.bounds_kernel,
            {
                **bounds,
                "keys_SKH": "*bf16",
                "first_slots_I": "*i64",
                "sequences_I": "*i64",
                "ends_B": "*i64",
                "stride_slot": "i32",
                "stride_head": "i32",
            },
            {**layout, "BLOCK_F": 16, "SCALED": False, "k_scale_K": None},
            1,
        ),
        (
            kernel.scores_kernel,
            {
                **bounds,
                "parts_2BKH": "*fp32",
                "scores_BKP": "*fp32",
                "starts_B": "*i64",
                "num_sequences": "i32",
                "num_pages": "i32",
            },
            {**layout, "PAGE": 16, "BLOCK_P": 32},
            4,
        ),
    ]
    for each, types, constants, warps in cases:
        compiled = compile_for_hopper(each, types, constants, num_warps=warps)
        assert compiled.spilled_bytes == 0 and "ld.global.v4" in compiled.ptx.replace(".b32", "")
