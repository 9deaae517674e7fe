"""Selection of a block's rows in plain torch against the reference; the kernels compiled."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases.sparse.block_eviction import SHAPES, check_importance, check_selection, make_layer
from tests.kernels.cases.sparse.block_state import check_state


@pytest.mark.parametrize("over_block", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_plain_importance_equals_the_reference(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, over_block: bool
) -> None:
    is_fp8 = dtype == torch.float8_e4m3fn
    q_dtype = torch.bfloat16 if is_fp8 else dtype
    check_importance(make_layer(shape, q_dtype, kv_dtype=dtype, over_block=over_block))


@pytest.mark.parametrize("seed", range(60))
def test_plain_selection_equals_the_reference(seed: int) -> None:
    check_selection(seed)


@pytest.mark.parametrize("seed", range(120))
def test_plain_state_equals_the_reference(seed: int) -> None:
    check_state(seed)


@pytest.mark.sweep
def test_the_kernels_of_the_state_compile_for_hopper() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.block_eviction.kernel_state import begin_kernel, finish_kernel
    from tests.kernels.hopper_compiler import compile_for_hopper

    types = dict.fromkeys((*begin_kernel.arg_names, *finish_kernel.arg_names), "*i64")
    bools = ("is_new_Z", "frozen_ZW", "processed_ZW", "before_frozen_ZW", "mask_BW", "mine_B", "evicts_B")
    types |= dict.fromkeys((*bools, "keep_R", "waits_B"), "*i1") | {"mean_B": "*fp64"}
    shape = {"SIZE": 32, "BLOCK_W": 32, "PREFILLS": True}
    begin = {"OF_REQUEST": True, "KEEPS_STORED": True, "SHIFTED": True}
    finish = {"FREEZES": True, "BY_NEIGHBOUR": True}
    for kernel, constants in ((begin_kernel, begin), (finish_kernel, finish)):
        assert compile_for_hopper(kernel, types, {**shape, **constants}, num_warps=1).spilled_bytes == 0


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bf16", "bf16"), ("bf16", "fp8e4nv"), ("fp32", "fp32")])
def test_the_kernels_compile_for_hopper_without_spills(dtype: str, kv_dtype: str) -> None:
    pytest.importorskip("triton")
    from idlm.kernels.block_eviction.kernel import importance_kernel, select_kernel
    from tests.kernels.hopper_compiler import compile_for_hopper

    names = (*importance_kernel.arg_names, *select_kernel.arg_names)
    types = dict.fromkeys(names, "i32")
    types |= dict.fromkeys([name for name in names if "_" in name and name[-1].isupper()], "*i64")
    bools = ("is_query_BW", "is_key_BW", "mine_B", "mask_BW", "maskable_BW", "processed_ZW", "kept_BW")
    types |= dict.fromkeys(bools, "*i1") | {"q_RNH": f"*{dtype}", "keys_SKH": f"*{kv_dtype}"}
    types |= {"scale_K": "*fp32", "scale": "fp32", "mean_decoded_B": "*fp64"}
    types |= dict.fromkeys(("parts_BPW", "first_BPW", "second_BPW"), "*fp32")
    shape = {"SIZE": 32, "BLOCK_W": 32}
    importance = {"PAGE": 32, "HEAD_DIM": 128, "GROUP": 4, "SCALED": kv_dtype == "fp8e4nv", "BLOCK_H": 128}
    select = {"ALPHA": 1.5, "SEES_PROCESSED": True, "PARTS": 8, "BLOCK_P": 8}
    found = [
        compile_for_hopper(kernel, types, {**shape, **constants}, num_warps=4)
        for kernel, constants in ((importance_kernel, importance), (select_kernel, select))
    ]
    # fp32 products without tensor cores take more registers than there are.
    assert all(each.spilled_bytes == 0 for each in found) or dtype == "fp32"
