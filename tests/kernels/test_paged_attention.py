"""Back ends of paged attention: the kernels in the interpreter and compiled for Hopper, and reasons of
refusal.

The torch path has tests/unit/engine/test_paged_attention.py, the GPU
tests/gpu/kernels/test_paged_attention_gpu.py."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.kernels.paged_attention import (
    AttentionRows,
    BeforeBlock,
    HeadShape,
    paged_attention,
    plan_attention,
    problems,
)
from tests.kernels.cases.paged_attention import (
    SCALE,
    build,
    causal,
    cold,
    dense,
    error_ratio,
    random_sequences,
    steady,
    tree,
)
from tests.kernels.hopper_compiler import compiled_launches
from tests.kernels.references.paged_attention import paged_attention_reference

ROOT = Path(__file__).resolve().parents[2]
QWEN3_8B = HeadShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
SMALL = HeadShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
MAX_SHARED_BYTES = 227 * 1024


def on_meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def compiled_layer(
    launch: Any,
    *,
    num_rows: int,
    context: int,
    num_listed: int = 0,
    is_before: bool = False,
    window: int | None = None,
) -> dict[str, Any]:
    """The kernels of the plan and of one layer of one sequence, by name, for sm_90; needs no GPU."""
    rows = AttentionRows(
        cu_rows=on_meta(2),
        block_table=on_meta(1, context // 16),
        page_size=16,
        **dict.fromkeys(("own_slots_R", "limits_R", "branch_starts_R"), on_meta(num_rows)),
        max_rows=num_rows,
        max_slots=context,
        starts_B=on_meta(1) if num_listed or is_before else None,
        listed_B=on_meta(1, dtype=torch.bool) if num_listed else None,
        num_listed=num_listed,
    )
    rows = rows if window is None else rows.in_windows(window, rows.own_slots_R)
    cache = on_meta(context, 8, 128, dtype=torch.bfloat16)
    sums = on_meta(num_rows, 32, dtype=torch.float32)

    def run() -> None:
        plan = plan_attention(rows, QWEN3_8B, backend="triton", launch=replace(launch, pdl=True))
        paged_attention(
            on_meta(num_rows, 32, 128, dtype=torch.bfloat16),
            *(cache, cache, plan),
            scale=SCALE,
            lists_BKC=on_meta(1, 8, num_listed, dtype=torch.int32) if num_listed else None,
            before=BeforeBlock(sums, sums) if is_before else None,
        )

    return dict(compiled_launches(run))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("max_rows", "max_slots", "deterministic", "num_listed", "window"),
    [
        (7, 2048, False, 0, None),
        (7, 2048, False, 0, 512),
        (1, 2048, True, 0, None),
        (32, 65536, False, 1024, None),
    ],
)
def test_the_walk_compiles_for_hopper(
    max_rows: int, max_slots: int, deterministic: bool, num_listed: int, window: int | None
) -> None:
    """Copies of 16 bytes, several blocks ahead, and enough memory for the programs of a multiprocessor."""
    pytest.importorskip("triton")
    from idlm.kernels.paged_attention.choice import choose_launch

    launch = choose_launch(QWEN3_8B, max_rows=max_rows, max_slots=max_slots, deterministic=deterministic)
    is_tall = max_rows == 32
    assert (launch.block_m, launch.warps) == ((128, 8) if is_tall else (launch.block_m, 4))
    assert launch.programs_per_sm == (1 if max_slots > 2048 else 2)
    lists = {"num_listed": num_listed, "is_before": is_tall, "window": window}
    result = compiled_layer(launch, num_rows=max_rows, context=max_slots, **lists)["attend_kernel"]
    assert launch.programs_per_sm * (result.shared_bytes + 1024) <= MAX_SHARED_BYTES
    ptx = result.ptx
    assert ptx.count("griddepcontrol") == 2
    copies = re.findall(r"cp\.async\.\w+\.shared\.global .*", ptx)
    # A list is copied by its numbers.
    copies = [copy for copy in copies if not (num_listed and ", 0x4," in copy)]
    assert copies and all(", 0x10," in copy or ", 16," in copy for copy in copies)
    block_bytes = launch.block_n * QWEN3_8B.head_dim * 2
    assert result.shared_bytes >= 2 * (launch.stages - 1) * block_bytes, "a page id delays a block of loads"
    assert ("wgmma" in ptx) == (launch.block_m >= 64)
    waits = [int(number, 0) for number in re.findall(r"cp\.async\.wait_group\s+(\w+)", ptx)]
    assert waits.pop() == 0, "the drain behind the loop"
    assert min(waits) >= 2 * (launch.stages - 1) - 2 > 0, "no block is waited for as soon as it is requested"
    first_wait = ptx.index("griddepcontrol.wait")
    assert ptx.index("ld.global") < first_wait < ptx.index("wgmma" if "wgmma" in ptx else "mma.sync")
    products = ptx.index("mma"), ptx.rindex("mma")
    launch_at = ptx.index("griddepcontrol.launch_dependents")
    if launch.early:
        assert first_wait < launch_at < products[0]
    else:
        assert products[1] < launch_at < ptx.rindex("st.global")
    assert copies[0] in ptx[first_wait:] and copies[0] not in ptx[:first_wait]


def test_the_tile_is_that_of_the_rows_that_most_sequences_have() -> None:
    """Behind a drop of rows, 7 rows of 128 sequences; whole blocks and prompts keep theirs."""
    pytest.importorskip("triton")
    from idlm.kernels.paged_attention.choice import choose_launch

    sizes: dict[str, Any] = {"max_rows": 4096, "num_rows": 928, "max_slots": 1152, "num_sequences": 128}
    usual_rows = (None, 40, 10, 6)
    tiles = {usual: choose_launch(QWEN3_8B, usual_rows=usual, **sizes).block_m for usual in usual_rows}
    assert tiles == {None: 128, 40: 128, 10: 64, 6: 32}
    fixed = {choose_launch(QWEN3_8B, usual_rows=usual, deterministic=True, **sizes) for usual in (None, 10)}
    assert len({(one.block_n, one.split_slots, one.octave) for one in fixed}) == 1


def test_launches_of_deterministic_rows_differ_in_what_changes_no_bit() -> None:
    """float32 has one tile for all; heights that tests/gpu does not compare are not used."""
    pytest.importorskip("triton")
    from idlm.kernels.paged_attention.choice import choose_launch

    def launches(shape: HeadShape) -> set[Any]:
        loads = itertools.product((1, 7, 15, 400), (1, 4, 13, 16, 64), (300, 2000, 9000))
        sizes = [{"max_rows": r, "num_rows": r * b, "num_sequences": b, "max_slots": s} for r, b, s in loads]
        return {choose_launch(shape, deterministic=True, **each) for each in sizes}

    for shape in (QWEN3_8B, replace(QWEN3_8B, head_dim=64), replace(QWEN3_8B, dtype=torch.float32)):
        found = launches(shape)
        assert len({(one.block_n, one.split_slots, one.octave, one.half_parts) for one in found}) == 1
        heights = (
            {16} if shape.dtype == torch.float32 else {16, 32} if shape.head_dim < 128 else {16, 32, 64, 128}
        )
        assert {one.block_m for one in found} == heights
        assert len({one.programs_per_sm for one in found}) == 2
    assert {one.warps for one in launches(replace(QWEN3_8B, num_heads=71, num_kv_heads=1))} == {8}


@pytest.mark.parametrize(
    ("few_rows", "num_sequences", "context", "block_m"),
    [
        *((1, 256, 4096, 16), (7, 256, 4096, 32), (16, 64, 4096, 64)),
        *((64, 64, 4096, None), (1, 4, 4096, None)),
    ],
)
def test_decoding_sequences_keep_their_tile_beside_a_prompt(
    few_rows: int, num_sequences: int, context: int, block_m: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: they walk in the prompt's tiles, because theirs are no smaller, or there is little to walk."""
    pytest.importorskip("triton")
    from idlm.kernels.paged_attention import planning

    monkeypatch.setattr(planning, "num_multiprocessors", lambda device: 132)
    num_rows = num_sequences * few_rows + 1024
    empty_R = torch.empty(num_rows, dtype=torch.int64)
    rows = AttentionRows(
        cu_rows=torch.empty(num_sequences + 1, dtype=torch.int64),
        block_table=torch.empty(num_sequences, context // 16, dtype=torch.int64),
        page_size=16,
        own_slots_R=empty_R,
        limits_R=empty_R,
        branch_starts_R=empty_R,
        max_rows=1024 + few_rows,
        few_rows=few_rows,
        max_slots=context,
    )
    launch, narrow, max_rows = planning.choose_launches(rows, QWEN3_8B)
    assert launch.block_m == 128
    assert (None if narrow is None else narrow.block_m) == block_m
    if narrow is not None:
        alone = replace(rows, max_rows=few_rows, own_slots_R=empty_R[: num_sequences * few_rows])
        assert narrow == planning.choose_launches(alone, QWEN3_8B)[0], (
            "its kernels are those of decoding alone"
        )
        assert max_rows * QWEN3_8B.group == narrow.block_m


@pytest.mark.sweep
@pytest.mark.parametrize("num_listed", [0, 1024])
def test_planning_and_combining_compile_for_hopper(num_listed: int) -> None:
    pytest.importorskip("triton")
    from idlm.kernels.paged_attention.choice import choose_launch

    sizes = {"num_rows": 7, "context": 65536, "num_listed": num_listed, "is_before": True}
    launch = choose_launch(QWEN3_8B, max_rows=7, max_slots=65536)
    in_order = replace(launch, split_slots=launch.block_n, half_parts=False)
    made = compiled_layer(in_order, **sizes)
    assert [*made] == ["tile_kernel", "item_kernel", "attend_kernel", "combine_kernel"]
    ptx = made["combine_kernel"].ptx
    assert ptx.count("cp.async.cg") >= 12, "parts are loaded ahead"
    before, _, _ = ptx.partition("griddepcontrol.wait")
    assert before.index("griddepcontrol.launch_dependents") < before.index("ld.global")
    assert "cp.async" not in before, "parts are read too early"
    for half_parts in (False, True):
        compiled_layer(replace(launch, half_parts=half_parts), **sizes)


@pytest.mark.sweep
def test_the_walk_of_two_warpgroups_compiles_for_hopper() -> None:
    """Nothing spills, and products are not serialized."""
    pytest.importorskip("triton")
    from idlm.kernels.paged_attention import kernel_hopper
    from idlm.kernels.paged_attention.choice import choose_launch

    blocks = choose_launch(QWEN3_8B, max_rows=32, num_rows=32, max_slots=131072)
    prompts = choose_launch(QWEN3_8B, max_rows=2048, num_rows=2048, max_slots=131072, has_groups=True)
    for launch, block_n in ((blocks, 64), (prompts, 128)):
        assert launch.two_groups and launch.half_parts and launch.block_n == block_n
        result = compiled_layer(launch, num_rows=32, context=131072)["attend_kernel"]
        assert result.shared_bytes + 1024 <= MAX_SHARED_BYTES
        assert f".maxnreg {kernel_hopper.MEAN_REGISTERS}" in result.ptx and ".reqntid 384" in result.ptx
        # Both groups multiply 16 columns of keys and 16 rows of values at a time, in the loop and beside it.
        assert result.ptx.count("wgmma.mma_async") == 2 * 2 * (128 // 16 + block_n // 16)
        assert result.spilled_bytes == 0 and "serialized" not in result.output


def test_two_warpgroups_walk_prompts_that_fill_the_device() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.paged_attention.choice import choose_launch

    def chosen(num_rows: int, slots: int, **more: Any) -> tuple[bool, int]:
        sizes = {"max_rows": num_rows, "num_rows": num_rows, "max_slots": slots, "has_groups": True, **more}
        launch = choose_launch(QWEN3_8B, **sizes)
        return launch.two_groups, launch.programs_per_sm

    assert chosen(2048, 2048) == (True, 0) and chosen(2048, 2049) == (True, 1)
    assert chosen(8192, 128, max_rows=128, num_sequences=64)[0] is False, "blocks of 128 slots are long"
    assert chosen(512, 2048)[0] is False, "136 tiles do not hide how long each waits"
    assert chosen(2048, 2048, has_groups=False)[0] is False
    assert chosen(2048, 2048, deterministic=True)[0] is False


@pytest.mark.parametrize("seed", range(3))
def test_the_fast_truth_of_the_tests_is_the_reference(seed: int) -> None:
    case = build(
        random_sequences(random.Random(seed), maximum=4, longest=30, chunk=9),
        replace(SMALL, dtype=torch.float64),
        padding=0,
        seed=seed,
        window=(None, 7)[seed % 2],
    )
    expected = paged_attention_reference(
        case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, rows=case.rows, scale=SCALE
    )
    torch.testing.assert_close(dense(case, torch.float64), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("window", [None, 7, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_back_end_with_padding_and_a_given_output(dtype: torch.dtype, window: int | None) -> None:
    shape = replace(SMALL, dtype=dtype)
    case = build([steady(20), [], causal(3, 30), tree(9)], shape, padding=4, window=window)
    plan = plan_attention(case.rows, shape)
    assert plan.backend == "torch", "what is measured is made the default, not what is hoped"
    out = torch.full((*case.q_RNH.shape[:2], 24), 7, dtype=dtype)[..., :16]
    o_RNH = paged_attention(case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, plan, scale=SCALE, out=out)
    assert o_RNH is out and error_ratio(case, out) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_widens_an_fp8_cache_when_it_gathers(dtype: torch.dtype) -> None:
    shape = replace(SMALL, dtype=dtype)
    case = build([steady(40), causal(5, 9), causal(30, 1)], shape)
    scales = torch.tensor([0.5, 2.0]), torch.tensor([4.0, 0.25])
    caches = case.k_cache_SKH, case.v_cache_SKH
    stored = [
        (cache.float() / scale_K[:, None]).to(torch.float8_e4m3fn)
        for cache, scale_K in zip(caches, scales, strict=True)
    ]
    plan = plan_attention(case.rows, replace(shape, kv_dtype=torch.float8_e4m3fn), backend="torch")
    for factors in (scales, (None, None)):
        widened = [
            (values.float() * (1 if scale_K is None else scale_K[:, None])).to(dtype)
            for values, scale_K in zip(stored, factors, strict=True)
        ]
        found = paged_attention(
            case.q_RNH, *stored, plan, scale=SCALE, k_scale_K=factors[0], v_scale_K=factors[1]
        )
        expected = paged_attention(case.q_RNH, *widened, plan_attention(case.rows, shape), scale=SCALE)
        assert torch.equal(found, expected)


def reasons(name: str, shape: HeadShape = QWEN3_8B, **options: Any) -> str:
    return "; ".join(problems(name, shape, **({"device": torch.device("cuda")} | options)))


def test_every_back_end_gives_all_reasons() -> None:
    assert "batch-invariant" in reasons("torch", deterministic=True) and not reasons("torch")
    wide = replace(QWEN3_8B, head_dim=512, num_heads=8 * 256, dtype=torch.float64, kv_dtype=torch.int8)
    found = reasons("triton", wide)
    assert all(part in found for part in ("512", "256 query heads", "float64", "int8")), found
    assert not reasons("triton", deterministic=True)


def test_a_deterministic_row_of_a_cpu_has_the_same_bits_alone() -> None:
    case = build([causal(5, 2), cold(9), causal(0, 20), causal(30, 1)], SMALL)
    caches, rows = (case.k_cache_SKH, case.v_cache_SKH), case.rows
    plan = plan_attention(rows, SMALL, deterministic=True)
    found = paged_attention(case.q_RNH, *caches, plan, scale=SCALE)
    usual = paged_attention(case.q_RNH, *caches, plan_attention(rows, SMALL), scale=SCALE)
    torch.testing.assert_close(found, usual, atol=1e-5, rtol=1e-5)
    bounds = rows.cu_rows.tolist()
    for sequence, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for last in range(start + 1, stop + 1):
            part = {
                name: getattr(rows, name)[start:last]
                for name in ("own_slots_R", "limits_R", "branch_starts_R")
            }
            alone = replace(
                rows,
                cu_rows=torch.tensor([0, last - start]),
                block_table=rows.block_table[sequence : sequence + 1],
                **part,
            )
            plan = plan_attention(alone, SMALL, deterministic=True)
            assert torch.equal(
                paged_attention(case.q_RNH[start:last], *caches, plan, scale=SCALE), found[start:last]
            )
