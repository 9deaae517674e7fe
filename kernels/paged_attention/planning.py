"""The plan of the Triton back end: which tiles and items walk, and where their parts lie.

Grids and buffers depend on B, R, `max_rows`, `few_rows` and `max_slots` only, which may be upper bounds, so a
step can be captured in a CUDA graph; device tensors hold everything else. Nothing waits for the device.
Record of a tile (int32): 0 sequence, 1 first row, 2 number of rows, 3 blocks below the highest limit, 4 first
and 5 end of the blocks of the branches after them, 6 lowest and 7 highest limit, 8 lowest branch start,
9 highest own slot. An item copies these and adds 10 first and 11 end of its share (blocks of the walk, or
splits), 14 its tile, 15 number of items of the tile, 16 its part; where every split is a part, 16 is the
number that split 0 would have. Of a tile that sees lists, 3 and 17 are the number of its blocks of the list,
and 18 is what turns positions of its walk after them into slots; 19 is the first slot of the block, 0 if the
tile sees lists. With windows 18 does so for all positions of the walk. 20 to 23 of the n-th record belong to
the n-th tile with several items: 20 number of rows (0: there is none), 21 first row, 22 first part, 23 number
of parts.
B sequences, R rows fed this pass, N query heads, K KV heads, G = N / K, H head dim."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import triton

from idlm.kernels.backend import gpu_of, has_gluon, has_pdl, num_multiprocessors
from idlm.kernels.paged_attention.choice import Launch, choose_launch, walks_apart
from idlm.kernels.paged_attention.kernel_plan import RECORD, item_kernel, tile_kernel
from idlm.kernels.paged_attention.types import AttentionRows, HeadShape

PADDED_SEQUENCES, PADDED_TILES = (32, 512), (64, 512)
"""Entries that a program of the plan reads, padded to a few sizes: each is compiled by itself."""
ANY_ROWS = (1 << 31) - 1
"""No maximum."""


class Parts(NamedTuple):
    """Parts of walks: weighted sums of values; sums of weights and maxima, interleaved; and the same of the
    slots before the block, None if the rows have no `starts_B`."""

    o: torch.Tensor
    sums: torch.Tensor
    before: torch.Tensor | None


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
    parts: Parts
    others: TritonPlan | None = None
    """Of sequences with more rows than the tiles of this plan are for, and of the padding; None: there are no
    others."""

    @property
    def walks(self) -> tuple[TritonPlan, ...]:
        """What a layer launches, one after the other."""
        return (self,) if self.others is None else (self, self.others)


def plan(
    rows: AttentionRows, shape: HeadShape, *, deterministic: bool = False, launch: Launch | None = None
) -> TritonPlan:
    """Plan the tiles and items of one step by two small kernels, or twice two; nothing is read back."""
    if launch is not None:
        assert not deterministic or launch.split_slots > 0, f"{launch=} has no fixed splits"
        return _plan(rows, shape, launch)
    launch, narrow, max_rows = choose_launches(rows, shape, deterministic=deterministic)
    if narrow is None:
        return _plan(rows, shape, launch)
    others = _plan(rows, shape, launch, min_rows=max_rows + 1)
    return replace(_plan(rows, shape, narrow, max_rows=max_rows), others=others)


def choose_launches(
    rows: AttentionRows, shape: HeadShape, *, deterministic: bool = False
) -> tuple[Launch, Launch | None, int]:
    """Launch parameters of the step, and those of sequences with at most so many rows, if they walk apart."""
    num_rows, num_sequences = rows.own_slots_R.shape[0], rows.block_table.shape[0]
    device, few = rows.cu_rows.device, rows.few_rows
    sizes: dict[str, Any] = {
        # Most rows of a pass with lists see them.
        "max_slots": rows.max_slots
        if rows.listed_B is None
        else min(rows.max_slots, rows.num_listed + rows.max_rows),
        "num_sequences": num_sequences,
        "multiprocessors": num_multiprocessors(device),
    }
    # Layers with lists, or with sums before the block, would take Triton's walk of the tiles of prompts.
    serves = rows.starts_B is None and groups_serve(rows, shape)
    choose = functools.partial(choose_launch, shape, **sizes, deterministic=deterministic, has_groups=serves)
    launch = choose(max_rows=rows.max_rows, usual_rows=rows.usual_rows, num_rows=num_rows)
    launch = replace(launch, pdl=has_pdl(device))
    if few is None or rows.max_rows <= few:
        return launch, None, 0
    # As in a pass that has no other sequences, so that its kernels are compiled once.
    narrow = replace(choose(max_rows=few, num_rows=few * num_sequences), pdl=launch.pdl)
    max_rows = max(few, narrow.block_m // shape.group)
    if max_rows >= min(rows.max_rows, num_rows) or not walks_apart(shape, narrow, launch, **sizes):
        return launch, None, 0
    return launch, narrow, max_rows


def groups_serve(rows: AttentionRows, shape: HeadShape) -> bool:
    """Whether the walk of two warpgroups computes such rows and heads on their device."""
    return (
        rows.first_slots_R is None
        and shape.head_dim == 128
        and shape.group <= 128
        and shape.dtype != torch.float32
        and shape.kv_dtype in (None, shape.dtype)
        and has_gluon(gpu_of(rows.cu_rows.device))
    )


def _plan(
    rows: AttentionRows, shape: HeadShape, launch: Launch, *, min_rows: int = 0, max_rows: int = ANY_ROWS
) -> TritonPlan:
    """The plan of the sequences with so many rows; without a maximum also that of the padding."""
    assert not (launch.split_slots and launch.half_parts), f"{launch=}: what is summed depends on the items"
    assert launch.split_slots % launch.block_n == 0 and launch.block_m >= shape.group, f"{launch=} {shape=}"
    assert rows.block_table.stride(1) == 1 or rows.block_table.shape[1] <= 1, f"{rows.block_table.stride()=}"
    num_rows, num_sequences = rows.own_slots_R.shape[0], rows.block_table.shape[0]
    device, tile_rows, max_slots = rows.cu_rows.device, launch.block_m // shape.group, rows.max_slots
    if max_rows < ANY_ROWS:
        num_tiles = max(1, min(num_rows, num_sequences * triton.cdiv(max_rows, tile_rows)))
    else:
        max_sequences = num_sequences if min_rows == 0 else min(num_sequences, num_rows // min_rows)
        num_tiles = tile_bound(num_rows, max_sequences, rows.max_rows, tile_rows)
    if rows.listed_B is not None:
        # Tiles break where a block begins, and a walk ends in two incomplete blocks of slots.
        num_tiles, max_slots = max(1, min(num_rows, num_tiles + num_sequences)), max_slots + launch.block_n
    num_programs = _programs(rows, launch, num_multiprocessors(device), shape.num_kv_heads)
    num_items, num_parts, num_split = item_bounds(launch, num_tiles, max_slots, num_programs)
    tiles, items = (
        torch.empty(length, RECORD.value, dtype=torch.int32, device=device)
        for length in (num_tiles, num_items)
    )
    packed = max(1, num_parts * shape.num_kv_heads * launch.block_m)
    part_dtype = torch.float16 if launch.half_parts else torch.float32
    sums = torch.empty(packed * 2, dtype=torch.float32, device=device)
    before = None if rows.starts_B is None else torch.empty_like(sums)
    result = TritonPlan(
        rows=rows,
        shape=shape,
        launch=launch,
        num_tiles=num_tiles,
        num_items=num_items,
        num_split=num_split,
        tiles=tiles,
        items=items,
        parts=Parts(torch.empty(packed * shape.head_dim, dtype=part_dtype, device=device), sums, before),
    )
    if num_rows:
        _write_tiles(result, tile_rows, min_rows, max_rows)
        _write_items(result, num_programs, num_parts)
        # A kernel without dependent launch: the next one starts when the lists are complete (README.md).
        torch.zeros(1, dtype=torch.int32, device=device)
    return result


def _programs(rows: AttentionRows, launch: Launch, multiprocessors: int, num_kv_heads: int) -> int:
    """Programs of a KV head among which walks are divided; 1: none is split."""
    num_programs = max(1, multiprocessors * launch.programs_per_sm // num_kv_heads)
    is_whole = rows.max_slots <= launch.whole_slots and rows.block_table.shape[0] >= num_programs
    return 1 if is_whole else num_programs


def _write_tiles(plan: TritonPlan, tile_rows: int, min_rows: int, max_rows: int) -> None:
    rows, launch = plan.rows, plan.launch
    num_sequences = rows.block_table.shape[0]
    listed_B = None if rows.listed_B is None else rows.listed_B.view(torch.uint8)
    tile_kernel[(plan.num_tiles,)](
        (
            *(rows.cu_rows, rows.limits_R, rows.branch_starts_R, rows.own_slots_R),
            *(rows.starts_B, listed_B, rows.first_slots_R),
        ),
        *(plan.tiles, num_sequences, rows.own_slots_R.shape[0], rows.max_rows.bit_length()),
        *(min_rows, max_rows),
        NUM_LISTED=0 if rows.listed_B is None else rows.num_listed,
        ROWS=tile_rows,
        BLOCK_N=launch.block_n,
        BLOCK_B=_padded(num_sequences + 1, PADDED_SEQUENCES),
        BLOCK_ROWS=triton.next_power_of_2(tile_rows),
        FIXED=launch.split_slots > 0,
        num_warps=1,
    )


def _write_items(plan: TritonPlan, num_programs: int, num_parts: int) -> None:
    launch = plan.launch
    item_kernel[(plan.num_items,)](
        *(plan.tiles, plan.items, plan.num_tiles, num_programs, launch.min_blocks, num_parts),
        SPLIT_BLOCKS=launch.split_slots // launch.block_n,
        OCTAVE=launch.octave,
        BLOCK_TILES=_padded(plan.num_tiles, PADDED_TILES),
        num_warps=1 if plan.num_tiles <= PADDED_TILES[0] else 4,
    )


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
    with several items: each has two shares of the programs, which are rounded down."""
    if launch.split_slots:
        max_splits = num_tiles * max(1, max_fixed_splits(launch, max_slots))
    else:
        max_splits = num_tiles * max(1, triton.cdiv(max_slots, launch.min_blocks * launch.block_n))
    num_items, num_split = min(num_tiles + num_programs, max_splits), min(num_tiles, num_programs // 2)
    if num_items == num_tiles or num_split == 0:
        return num_tiles, 0, 0
    num_parts = min(max_splits, launch.max_parts) if launch.split_slots else num_programs
    return num_items, num_parts, num_split


def max_fixed_splits(launch: Launch, num_slots: int) -> int:
    """Number of splits of a walk of `num_slots` slots."""
    units, octave = triton.cdiv(num_slots, launch.split_slots), 0
    while units > launch.octave << (octave + 1):
        octave += 1
    return int(triton.cdiv(units, 1 << octave)) + octave * launch.octave
