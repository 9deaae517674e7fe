"""Back ends of paged attention: the kernels in the interpreter and compiled for Hopper, and reasons of
refusal.

The torch path has tests/unit/engine/test_paged_attention.py, the GPU
tests/gpu/kernels/test_paged_attention_gpu.py."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.kernels.paged_attention import (
    AttentionRows,
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
from tests.kernels.references.paged_attention import paged_attention_reference

ROOT = Path(__file__).resolve().parents[2]
QWEN3_8B = HeadShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
SMALL = HeadShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
MAX_SHARED_BYTES = 227 * 1024


def compiled(
    kernel: Any, constants: dict[str, Any], *, warps: int, stages: int, half_parts: bool = False
) -> Any:
    """The kernel for sm_90, with pointers and strides as aligned as the engine's; needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("q_RNH", "o_RNH", "k_cache_SKH", "v_cache_SKH"):
            signature[name] = "*bf16"
        elif name == "partial_o":
            signature[name] = "*fp16" if half_parts else "*fp32"
        elif name.startswith(("partial", "k_scale", "v_scale", "highest", "totals")):
            signature[name] = "*fp32"
        elif name in ("tiles", "items", "lists_BKC"):
            signature[name] = "*i32"
        elif name == "listed_B":
            signature[name] = "*u8"
        elif name in ("cu_rows", "block_table", "limits_R", "branch_starts_R", "own_slots_R", "starts_B"):
            signature[name] = "*i64"
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
        if signature[name].startswith("*") or name.startswith("stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    values = {(list(signature).index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": constants.get("PDL", False)}
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("max_rows", "max_slots", "deterministic", "num_listed"),
    [
        (7, 2048, False, 0),
        (1, 65536, False, 0),
        (1, 2048, True, 0),
        (32, 65536, False, 0),
        (32, 65536, False, 1024),
    ],
)
def test_the_walk_compiles_for_hopper(
    max_rows: int, max_slots: int, deterministic: bool, num_listed: int
) -> None:
    """Copies of 16 bytes, several blocks ahead, and enough memory for the programs of a multiprocessor."""
    pytest.importorskip("triton")
    from idlm.kernels.paged_attention import kernel
    from idlm.kernels.paged_attention.choice import choose_launch
    from idlm.kernels.paged_attention.planning import RECORD

    launch = choose_launch(QWEN3_8B, max_rows=max_rows, max_slots=max_slots, deterministic=deterministic)
    is_tall = max_rows == 32
    assert (launch.block_m, launch.warps) == ((128, 8) if is_tall else (launch.block_m, 4))
    assert launch.programs_per_sm == (1 if max_slots > 2048 else 2)
    constants = {"K": 8, "G": 4, "H": 128, "PAGE": 16, "RECORD": RECORD, "BLOCK_H": 128, "SCALED": False}
    constants |= {"BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n, "STAGES": launch.stages}
    constants |= {
        "SPLIT_BLOCKS": launch.split_slots // launch.block_n,
        "EARLY": launch.early,
    }
    constants |= {"OCTAVE": launch.octave, "PRECISION": "tf32", "PDL": True}
    constants |= {"NUM_LISTED": num_listed, "BEFORE": is_tall}
    # As at a launch, tensors that a layer does not have are constants.
    absent = {"k_scale_K", "v_scale_K"} | (set() if num_listed else {"lists_BKC"})
    absent |= set() if is_tall else {"highest_RN", "totals_RN", "partial_before"}
    constants |= dict.fromkeys(absent)
    sizes = {"warps": launch.warps, "stages": launch.stages}
    result = compiled(kernel.attend_kernel, constants, half_parts=launch.half_parts, **sizes)
    assert launch.programs_per_sm * (result.metadata.shared + 1024) <= MAX_SHARED_BYTES
    ptx = result.asm["ptx"]
    assert ptx.count("griddepcontrol") == 2
    copies = re.findall(r"cp\.async\.\w+\.shared\.global .*", ptx)
    # A list is copied by its numbers.
    copies = [copy for copy in copies if not (num_listed and ", 0x4," in copy)]
    assert copies and all(", 0x10," in copy or ", 16," in copy for copy in copies)
    block_bytes = launch.block_n * QWEN3_8B.head_dim * 2
    assert result.metadata.shared >= 2 * (launch.stages - 1) * block_bytes, (
        "a page id delays a block of loads"
    )
    assert ("wgmma" in ptx) == (launch.block_m >= 64)
    waits = [int(number) for number in re.findall(r"async_wait %.*num = (\d+)", result.asm["ttgir"])]
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
    assert len({(one.block_m, one.block_n, one.split_slots, one.octave, one.warps) for one in fixed}) == 1


@pytest.mark.parametrize(
    ("few_rows", "num_sequences", "context", "block_m"),
    [
        *((1, 256, 4096, 16), (7, 256, 4096, 32), (16, 64, 4096, 64), (1, 16, 32768, 16)),
        *((64, 64, 4096, None), (1, 1, 131072, None), (1, 4, 4096, None)),
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
def test_planning_and_combining_compile_for_hopper() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.paged_attention import kernel_parts, kernel_plan
    from idlm.kernels.paged_attention.planning import RECORD

    heads = {"K": 8, "G": 4, "H": 128, "RECORD": RECORD, "BLOCK_H": 128, "SCALED": False, "PDL": True}
    heads |= {"BEFORE": True}
    combine = heads | {"TILE_M": 64, "BLOCK_M": 4, "STAGES": 12, "PARTS": 1}
    result = compiled(kernel_parts.combine_kernel, combine, warps=4, stages=3)
    assert result.asm["ptx"].count("cp.async.cg") >= 12, "parts are loaded ahead"
    before, _, _ = result.asm["ptx"].partition("griddepcontrol.wait")
    assert before.index("griddepcontrol.launch_dependents") < before.index("ld.global")
    assert "cp.async" not in before, "parts are read too early"
    at_once = heads | {"TILE_M": 64, "BLOCK_M": 2, "STAGES": 12, "PARTS": 16}
    for half_parts in (False, True):
        compiled(kernel_parts.combine_kernel, at_once, warps=1, stages=3, half_parts=half_parts)
    tile = {"RECORD": RECORD, "ROWS": 9, "BLOCK_N": 64, "BLOCK_B": 128, "BLOCK_ROWS": 16, "FIXED": False}
    for num_listed in (0, 1024):
        lists = {"NUM_LISTED": num_listed, "HAS_STARTS": num_listed > 0}
        compiled(kernel_plan.tile_kernel, tile | lists, warps=1, stages=1)
    for split_blocks in (0, 8):
        item = {"RECORD": RECORD, "SPLIT_BLOCKS": split_blocks, "OCTAVE": 16, "BLOCK_TILES": 256}
        compiled(kernel_plan.item_kernel, item, warps=1, stages=1)


@pytest.mark.sweep
def test_the_walk_of_two_warpgroups_compiles_for_hopper() -> None:
    """Nothing spills, and products are not serialized."""
    pytest.importorskip("triton")
    from idlm.kernels.paged_attention import kernel_hopper
    from idlm.kernels.paged_attention.planning import RECORD
    from tests.kernels.hopper_compiler import compile_for_hopper

    constants = {"K": 8, "G": 4, "H": 128, "PAGE": 16, "RECORD": RECORD, "PDL": True}
    constants |= {"WORKER_REGISTERS": kernel_hopper.REGISTERS}
    pointers = {"*bf16": ("q_RNH", "o_RNH", "k_cache_SKH", "v_cache_SKH"), "*i32": ("items",)}
    pointers |= {"*i64": ("block_table", "limits_R", "branch_starts_R", "own_slots_R")}
    pointers |= {"*fp16": ("partial_o",), "*fp32": ("partial_sums",), "fp32": ("scale_log2",)}
    types = defaultdict(lambda: "i32", {name: kind for kind, names in pointers.items() for name in names})
    options = {"num_warps": 4, "maxnreg": kernel_hopper.REGISTERS, "launch_pdl": True}
    result = compile_for_hopper(kernel_hopper.attend_kernel, types, constants, **options)
    assert result.shared_bytes + 1024 <= MAX_SHARED_BYTES
    assert f".maxnreg {kernel_hopper.REGISTERS}" in result.ptx and ".reqntid 256" in result.ptx
    # Both groups multiply 16 columns of keys and 16 rows of values at a time, in the loop and beside it.
    assert result.ptx.count("wgmma.mma_async") == 2 * 2 * (128 // 16 + 64 // 16)
    assert result.spilled_bytes == 0 and "serialized" not in result.output


def test_two_warpgroups_walk_blocks_of_long_contexts() -> None:
    """Where that was measured to pay: not for short contexts, prompts, other heads or fixed splits."""
    pytest.importorskip("triton")
    from idlm.kernels.paged_attention.choice import choose_launch

    def chosen(
        context: int, batch: int = 1, rows: int = 32, shape: HeadShape = QWEN3_8B, **how: bool
    ) -> bool:
        sizes = {"max_rows": rows, "num_rows": rows * batch, "max_slots": context, "num_sequences": batch}
        return choose_launch(shape, **sizes, **how).two_groups

    assert chosen(131072) and chosen(131072, 6) and chosen(65536, 13)
    # Passes of block decoders have room for a finished block beside each, which few sequences use.
    sizes = {"max_rows": 64, "num_rows": 64, "max_slots": 131072}
    assert choose_launch(QWEN3_8B, usual_rows=32, **sizes).two_groups
    assert not choose_launch(QWEN3_8B, **sizes).two_groups
    # Many sequences do not make walks longer.
    assert chosen(32768, 24) and not chosen(1024, 128) and not chosen(1024, 4096) and not chosen(4096, 32)
    assert not chosen(32768) and not chosen(131072, rows=2048) and not chosen(131072, rows=1)
    assert not chosen(131072, deterministic=True)
    assert not any(
        chosen(131072, shape=replace(QWEN3_8B, **other))
        for other in ({"head_dim": 64}, {"head_dim": 96}, {"dtype": torch.float32})
    )


def test_many_decoding_sequences_walk_short_blocks() -> None:
    """The longest pipeline is for few sequences; deterministic rows have one launch for any number."""
    pytest.importorskip("triton")
    from idlm.kernels.paged_attention.choice import choose_launch

    def chosen(batch: int, **how: bool) -> tuple[int, int]:
        launch = choose_launch(QWEN3_8B, max_rows=1, max_slots=1024, num_sequences=batch, **how)
        return launch.block_n, launch.stages

    assert [chosen(batch) for batch in (16, 64, 256)] == [(128, 3), (64, 4), (64, 3)]
    assert chosen(16, deterministic=True) == chosen(256, deterministic=True)


@pytest.mark.parametrize("seed", range(6))
def test_the_fast_truth_of_the_tests_is_the_reference(seed: int) -> None:
    case = build(
        random_sequences(random.Random(seed), maximum=4, longest=30, chunk=9),
        replace(SMALL, dtype=torch.float64),
        padding=0,
        seed=seed,
    )
    expected = paged_attention_reference(
        case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, rows=case.rows, scale=SCALE
    )
    torch.testing.assert_close(dense(case, torch.float64), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_back_end_with_padding_and_a_given_output(dtype: torch.dtype) -> None:
    shape = replace(SMALL, dtype=dtype)
    case = build([steady(20), [], causal(3, 30), tree(9)], shape, padding=4)
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


@pytest.mark.sweep
def test_the_op_can_be_imported_and_imports_no_library() -> None:
    code = (
        "import sys; from idlm.kernels.paged_attention import op, plain;"
        "print([name for name in ('triton', 'flash_attn', 'flashinfer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
