"""The Triton back end: the plan of a step, and the launches of a layer.

Grids and buffers depend on B, R, `max_rows` and `max_slots` only, which may be upper bounds, so a step can be
captured in a CUDA graph; device tensors hold everything else. Nothing waits for the device.
Record of a tile (int32): 0 sequence, 1 first row, 2 number of rows, 3 blocks below the highest limit, 4 first
and 5 end of the blocks of the branches after them, 6 lowest and 7 highest limit, 8 lowest branch start,
9 highest own slot. An item copies these and adds 10 first and 11 end of its share (blocks of the walk, or
splits), 14 its tile, 15 number of items of the tile, 16 its part; where every split is a part, 16 is the
number that split 0 would have. Of a tile that sees lists, 3 and 17 are the number of its blocks of the list,
and 18 is what turns places of its walk behind them into slots; 19 is the first slot of the block, 0 if the
tile sees lists. 20 to 23 of the n-th record belong to the n-th tile with several items: 20 number of rows (0:
there is none), 21 first row, 22 first part, 23 number of parts.
B sequences, R rows fed this pass, N query heads, K KV heads, G = N / K, H head dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import triton

from idlm.kernels.backend import INTERPRETED, gpu_of, has_gluon, has_pdl, pdl_options
from idlm.kernels.paged_attention.choice import Launch, choose_launch, padded_head
from idlm.kernels.paged_attention.kernel import attend_kernel
from idlm.kernels.paged_attention.kernel_parts import combine_kernel
from idlm.kernels.paged_attention.kernel_plan import item_kernel, tile_kernel
from idlm.kernels.paged_attention.types import AttentionRows, BeforeBlock, HeadShape

RECORD = 32
PADDED_SEQUENCES, PADDED_TILES = (32, 512), (64, 512)
"""Entries that a program of the plan reads, padded to a few sizes: each is compiled by itself."""
LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 256
MAX_GROUP = 128
INTERPRETED_MULTIPROCESSORS = 6
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPlan:
    """The plan that all layers of one step share. Each layer writes its buffers: one stream at a time."""

    backend: ClassVar[str] = "triton"
    rows: AttentionRows
    shape: HeadShape
    launch: Launch
    num_tiles: int
    num_items: int
    num_split: int
    """Maximum number of tiles with several items."""
    tiles: torch.Tensor
    items: torch.Tensor
    partial_o: torch.Tensor
    partial_sums: torch.Tensor
    partial_before: torch.Tensor | None
    """As `partial_sums`, over the slots before the block; None if the rows have no `starts_B`."""


def problems(shape: HeadShape, *, deterministic: bool, device: torch.device) -> list[str]:
    """Every reason why this back end cannot compute such heads; empty when it can."""
    found = []
    if gpu_of(device).type != "cuda" and not INTERPRETED:
        found.append(f"needs a CUDA device, got {device.type}")
    if shape.dtype not in DTYPES:
        found.append(f"computes bfloat16, float16 and float32, got {shape.dtype}")
    if shape.kv_dtype not in (None, shape.dtype, FP8):
        found.append(f"takes a cache of {shape.dtype} or {FP8}, got {shape.kv_dtype}")
    if shape.head_dim > MAX_HEAD_DIM:
        found.append(f"head dim {shape.head_dim} is above {MAX_HEAD_DIM}")
    if shape.group > MAX_GROUP:
        found.append(f"{shape.group} query heads per KV head are more than {MAX_GROUP}")
    return found


def plan(
    rows: AttentionRows,
    shape: HeadShape,
    *,
    deterministic: bool = False,
    launch: Launch | None = None,
) -> TritonPlan:
    """Plan the tiles and items of one step by two small kernels; nothing is read back."""
    num_rows, num_sequences = rows.own_slots_R.shape[0], rows.block_table.shape[0]
    device = rows.cu_rows.device
    if launch is None:
        chosen = choose_launch(
            shape,
            max_rows=rows.max_rows,
            usual_rows=rows.usual_rows,
            num_rows=num_rows,
            # Most rows of a pass with lists see them.
            max_slots=rows.max_slots
            if rows.listed_B is None
            else min(rows.max_slots, rows.num_listed + rows.max_rows),
            num_sequences=num_sequences,
            multiprocessors=num_multiprocessors(device),
            deterministic=deterministic,
        )
        launch = replace(chosen, pdl=has_pdl(device))
    assert not deterministic or launch.split_slots > 0, f"{launch=} has no fixed splits"
    assert not (launch.split_slots and launch.half_parts), f"{launch=}: what is summed depends on the items"
    assert launch.split_slots % launch.block_n == 0 and launch.block_m >= shape.group, f"{launch=} {shape=}"
    assert rows.block_table.stride(1) == 1 or rows.block_table.shape[1] <= 1, f"{rows.block_table.stride()=}"
    tile_rows = launch.block_m // shape.group
    num_tiles, max_slots = tile_bound(num_rows, num_sequences, rows.max_rows, tile_rows), rows.max_slots
    if rows.listed_B is not None:
        # Tiles break where a block begins, and a walk ends in two incomplete blocks of slots.
        num_tiles, max_slots = max(1, min(num_rows, num_tiles + num_sequences)), max_slots + launch.block_n
    num_programs = _programs(rows, launch, num_multiprocessors(device), shape.num_kv_heads)
    num_items, num_parts, num_split = item_bounds(launch, num_tiles, max_slots, num_programs)
    tiles, items = (
        torch.empty(length, RECORD, dtype=torch.int32, device=device) for length in (num_tiles, num_items)
    )
    packed = max(1, num_parts * shape.num_kv_heads * launch.block_m)
    part_dtype = torch.float16 if launch.half_parts else torch.float32
    result = TritonPlan(
        rows=rows,
        shape=shape,
        launch=launch,
        num_tiles=num_tiles,
        num_items=num_items,
        num_split=num_split,
        tiles=tiles,
        items=items,
        partial_o=torch.empty(packed * shape.head_dim, dtype=part_dtype, device=device),
        partial_sums=torch.empty(packed * 2, dtype=torch.float32, device=device),
        partial_before=None
        if rows.starts_B is None
        else torch.empty(packed * 2, dtype=torch.float32, device=device),
    )
    if num_rows:
        _write_records(result, tile_rows, num_programs, num_parts)
    return result


def _programs(rows: AttentionRows, launch: Launch, multiprocessors: int, num_kv_heads: int) -> int:
    """Programs of a KV head among which walks are divided; 1: none is split."""
    num_programs = max(1, multiprocessors * launch.programs_per_sm // num_kv_heads)
    is_whole = rows.max_slots <= launch.whole_slots and rows.block_table.shape[0] >= num_programs
    return 1 if is_whole else num_programs


def _write_records(plan: TritonPlan, tile_rows: int, num_programs: int, num_parts: int) -> None:
    rows, launch = plan.rows, plan.launch
    num_sequences = rows.block_table.shape[0]
    tile_kernel[(plan.num_tiles,)](
        rows.cu_rows,
        rows.limits_R,
        rows.branch_starts_R,
        rows.own_slots_R,
        rows.starts_B,
        None if rows.listed_B is None else rows.listed_B.view(torch.uint8),
        plan.tiles,
        num_sequences,
        rows.own_slots_R.shape[0],
        rows.max_rows.bit_length(),
        NUM_LISTED=0 if rows.listed_B is None else rows.num_listed,
        HAS_STARTS=rows.starts_B is not None,
        RECORD=RECORD,
        ROWS=tile_rows,
        BLOCK_N=launch.block_n,
        BLOCK_B=_padded(num_sequences + 1, PADDED_SEQUENCES),
        BLOCK_ROWS=triton.next_power_of_2(tile_rows),
        FIXED=launch.split_slots > 0,
        num_warps=1,
    )
    item_kernel[(plan.num_items,)](
        plan.tiles,
        plan.items,
        plan.num_tiles,
        num_programs,
        launch.min_blocks,
        num_parts,
        RECORD=RECORD,
        SPLIT_BLOCKS=launch.split_slots // launch.block_n,
        OCTAVE=launch.octave,
        BLOCK_TILES=_padded(plan.num_tiles, PADDED_TILES),
        num_warps=1 if plan.num_tiles <= PADDED_TILES[0] else 4,
    )
    # A kernel without dependent launch: the next one starts when the lists are complete (README.md).
    torch.zeros(1, dtype=torch.int32, device=plan.tiles.device)


def _padded(length: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that holds `length`, else a power of two."""
    return next((size for size in sizes if length <= size), triton.next_power_of_2(length))


def tile_bound(num_rows: int, num_sequences: int, max_rows: int, tile_rows: int) -> int:
    """Maximum number of tiles of the rows and of the padding after them."""
    by_rows = (num_rows + (num_sequences + 1) * (tile_rows - 1)) // tile_rows
    by_sequences = num_sequences * triton.cdiv(max_rows, tile_rows) + triton.cdiv(num_rows, tile_rows)
    return max(1, min(num_rows, by_rows, by_sequences))


def item_bounds(launch: Launch, num_tiles: int, max_slots: int, num_programs: int) -> tuple[int, int, int]:
    """Maximum number of items of the tiles, the number of parts to allocate, and the maximum number of tiles
    with several items: each has two shares of the programs, which are rounded down.
    """
    if launch.split_slots:
        most_splits = num_tiles * max(1, most_fixed_splits(launch, max_slots))
    else:
        most_splits = num_tiles * max(1, triton.cdiv(max_slots, launch.min_blocks * launch.block_n))
    num_items, num_split = min(num_tiles + num_programs, most_splits), min(num_tiles, num_programs // 2)
    if num_items == num_tiles or num_split == 0:
        return num_tiles, 0, 0
    num_parts = min(most_splits, launch.max_parts) if launch.split_slots else num_programs
    return num_items, num_parts, num_split


def most_fixed_splits(launch: Launch, num_slots: int) -> int:
    """Number of splits of a walk of `num_slots` slots."""
    units, octave = triton.cdiv(num_slots, launch.split_slots), 0
    while units > launch.octave << (octave + 1):
        octave += 1
    return int(triton.cdiv(units, 1 << octave)) + octave * launch.octave


def run(
    q_RNH: torch.Tensor,
    k_cache_SKH: torch.Tensor,
    v_cache_SKH: torch.Tensor,
    plan: TritonPlan,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    k_scale_K: torch.Tensor | None = None,
    v_scale_K: torch.Tensor | None = None,
    lists_BKC: torch.Tensor | None = None,
    before: BeforeBlock | None = None,
) -> torch.Tensor:
    """Output [R, N, H] of one layer. `k_scale_K`, `v_scale_K` (float32): factors of an fp8 cache."""
    rows, shape = plan.rows, plan.shape
    num_rows = rows.own_slots_R.shape[0]
    assert q_RNH.shape == (num_rows, shape.num_heads, shape.head_dim), f"{q_RNH.shape=} {shape=}"
    assert q_RNH.dtype == shape.dtype and k_cache_SKH.dtype == (shape.kv_dtype or shape.dtype), f"{shape=}"
    assert k_cache_SKH.stride() == v_cache_SKH.stride(), f"{k_cache_SKH.stride()=} {v_cache_SKH.stride()=}"
    assert q_RNH.stride(-1) == k_cache_SKH.stride(-1) == 1 and scale > 0, f"{q_RNH.stride()=} {scale=}"
    assert (k_scale_K is None) == (v_scale_K is None), f"{k_scale_K=} {v_scale_K=}"
    o_RNH = torch.empty(q_RNH.shape, dtype=q_RNH.dtype, device=q_RNH.device) if out is None else out
    assert o_RNH.stride(-1) == 1 and o_RNH.shape == q_RNH.shape, f"{o_RNH.shape=} {o_RNH.stride()=}"
    if num_rows == 0:
        return o_RNH
    scales = (k_scale_K, v_scale_K)
    _attend(q_RNH, k_cache_SKH, v_cache_SKH, o_RNH, plan, scale, scales, lists_BKC, before)
    if plan.num_split:
        _combine(o_RNH, plan, v_scale_K, before)
    return o_RNH


def _attend(
    q_RNH: torch.Tensor,
    k_cache_SKH: torch.Tensor,
    v_cache_SKH: torch.Tensor,
    o_RNH: torch.Tensor,
    plan: TritonPlan,
    scale: float,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    lists_BKC: torch.Tensor | None,
    before: BeforeBlock | None,
) -> None:
    rows, shape, launch = plan.rows, plan.shape, plan.launch
    if before is None and scales[0] is None and lists_BKC is None and has_groups(plan):
        _attend_in_groups(q_RNH, k_cache_SKH, v_cache_SKH, o_RNH, plan, scale)
        return
    attend_kernel[(plan.num_items * shape.num_kv_heads,)](
        q_RNH,
        k_cache_SKH,
        v_cache_SKH,
        o_RNH,
        plan.items,
        rows.block_table,
        rows.limits_R,
        rows.branch_starts_R,
        rows.own_slots_R,
        *scales,
        lists_BKC,
        *_buffers(before),
        plan.partial_o,
        plan.partial_sums,
        plan.partial_before,
        scale * LOG2_E,
        *q_RNH.stride()[:2],
        *k_cache_SKH.stride()[:2],
        *o_RNH.stride()[:2],
        rows.block_table.stride(0),
        K=shape.num_kv_heads,
        G=shape.group,
        H=shape.head_dim,
        PAGE=rows.page_size,
        RECORD=RECORD,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_H=padded_head(shape.head_dim),
        SPLIT_BLOCKS=launch.split_slots // launch.block_n,
        OCTAVE=launch.octave,
        SCALED=scales[0] is not None,
        STAGES=launch.stages,
        PRECISION="ieee" if shape.dtype == torch.float32 else "tf32",
        EARLY=launch.early and plan.num_split > 0,
        NUM_LISTED=0 if lists_BKC is None else rows.num_listed,
        BEFORE=before is not None,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **pdl_options(launch.pdl),
        **({"maxnreg": launch.registers} if launch.registers else {}),
    )


def has_groups(plan: TritonPlan) -> bool:
    """Whether the walk of two warpgroups is chosen and computes these tiles on this device."""
    shape, launch = plan.shape, plan.launch
    return (
        launch.two_groups
        and (launch.block_m, launch.block_n, launch.split_slots) == (128, 64, 0)
        and shape.head_dim == 128
        and shape.dtype != torch.float32
        and shape.kv_dtype in (None, shape.dtype)
        and has_gluon(gpu_of(plan.items.device))
    )


def _attend_in_groups(
    q_RNH: torch.Tensor,
    k_cache_SKH: torch.Tensor,
    v_cache_SKH: torch.Tensor,
    o_RNH: torch.Tensor,
    plan: TritonPlan,
    scale: float,
) -> None:
    from idlm.kernels.paged_attention import kernel_hopper

    rows, shape, launch = plan.rows, plan.shape, plan.launch
    kernel_hopper.attend_kernel[(plan.num_items * shape.num_kv_heads,)](
        *(q_RNH, k_cache_SKH, v_cache_SKH, o_RNH, plan.items),
        *(rows.block_table, rows.limits_R, rows.branch_starts_R, rows.own_slots_R),
        *(plan.partial_o, plan.partial_sums, scale * LOG2_E),
        *(*q_RNH.stride()[:2], *k_cache_SKH.stride()[:2], *o_RNH.stride()[:2], rows.block_table.stride(0)),
        K=shape.num_kv_heads,
        G=shape.group,
        H=shape.head_dim,
        PAGE=rows.page_size,
        RECORD=RECORD,
        WORKER_REGISTERS=kernel_hopper.REGISTERS,
        num_warps=4,
        maxnreg=kernel_hopper.REGISTERS,
        **pdl_options(launch.pdl),
    )


def _buffers(before: BeforeBlock | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if before is None else (before.highest_RN, before.totals_RN)


def _combine(
    o_RNH: torch.Tensor, plan: TritonPlan, v_scale_K: torch.Tensor | None, before: BeforeBlock | None
) -> None:
    shape, launch = plan.shape, plan.launch
    pieces = triton.cdiv(launch.block_m, launch.combine_rows)
    combine_kernel[(plan.num_split * shape.num_kv_heads, pieces)](
        o_RNH,
        plan.tiles,
        v_scale_K,
        *_buffers(before),
        plan.partial_o,
        plan.partial_sums,
        plan.partial_before,
        *o_RNH.stride()[:2],
        K=shape.num_kv_heads,
        G=shape.group,
        H=shape.head_dim,
        RECORD=RECORD,
        TILE_M=launch.block_m,
        BLOCK_M=launch.combine_rows,
        BLOCK_H=padded_head(shape.head_dim),
        PARTS=1 if launch.split_slots else launch.combine_parts,
        STAGES=launch.sum_stages,
        SCALED=v_scale_K is not None,
        BEFORE=before is not None,
        num_warps=launch.combine_warps,
        **pdl_options(launch.pdl),
    )


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of the device, or a small number in the interpreter."""
    device = gpu_of(device)
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
