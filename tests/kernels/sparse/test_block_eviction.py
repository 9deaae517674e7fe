"""Importance of the rows of a block in plain torch against the reference; the kernels compiled for Hopper."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.block_eviction import (
    BlockKeys,
    BlockState,
    Candidates,
    FedBlocks,
    StateRules,
    begin_blocks,
    block_importance,
    finish_blocks,
    select_positions,
)
from tests.kernels.cases.sparse.block_eviction import SHAPES, check_importance, make_layer
from tests.kernels.hopper_compiler import assert_unspilled, compiled_launches


@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_plain_importance_equals_the_reference(number: int, dtype: torch.dtype) -> None:
    is_fp8 = dtype == torch.float8_e4m3fn
    q_dtype = torch.bfloat16 if is_fp8 else dtype
    check_importance(make_layer(SHAPES[number], q_dtype, kv_dtype=dtype, over_block=number % 2 > 0))


@pytest.mark.sweep
def test_the_kernels_of_the_state_compile_for_hopper() -> None:
    of_B, of_R = (torch.empty(num, dtype=torch.int64, device="meta") for num in (200, 6400))
    of_BW = of_B.new_empty(200, 32)
    rules = StateRules(of_request=True, retains_stored=True, shifted=True, prefills=True)

    def run() -> None:
        state = BlockState.empty(9, 32, of_B.device)
        fed = FedBlocks(of_B, of_B, of_BW, of_BW.bool(), of_B.new_empty(201), of_R, of_R)
        started = begin_blocks(state, fed, rules)
        finish_blocks(state, fed, started, rules, rows_BW=of_BW, waits_B=of_B.bool())

    assert_unspilled(run, "begin_kernel", "finish_kernel")


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "scaled"), [(torch.bfloat16, True), (torch.float32, False)])
def test_the_kernels_compile_for_hopper_without_spills(dtype: torch.dtype, scaled: bool) -> None:
    of_B, scale_K = torch.empty(200, dtype=torch.int64, device="meta"), torch.empty(8, device="meta")
    of_BW, flags_BW, flags_B = of_B.new_empty(200, 32), of_B.new_empty(200, 32).bool(), of_B.bool()
    keys_SKH = scale_K.new_empty(4096, 8, 128, dtype=torch.float8_e4m3fn if scaled else dtype)
    table_BP = of_B.new_empty(200, 64)
    keys = BlockKeys(keys_SKH, scale_K if scaled else None, table_BP, page_size=32, starts_B=of_B)
    of = Candidates(flags_B, flags_BW, flags_BW, of_BW, of_B, flags_BW, of_B.double())

    def run() -> None:
        q_RNH = scale_K.new_empty(6400, 32, 128, dtype=dtype)
        flags = {"is_query_BW": flags_BW, "is_key_BW": flags_BW}
        parts_BPW = block_importance(q_RNH, of_BW, keys, **flags, scale=0.1)
        select_positions(parts_BPW, parts_BPW, of, alpha=1.5)

    made = compiled_launches(run)
    assert [name for name, _ in made] == ["importance_kernel", "select_kernel"]
    # fp32 products without tensor cores take more registers than there are.
    assert all(each.spilled_bytes == 0 for _, each in made) or dtype == torch.float32
