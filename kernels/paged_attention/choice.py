"""Launch parameters of the Triton back end, and how they are chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from idlm.kernels.paged_attention.types import HeadShape

MAX_PROGRAMS = 8
WAIT_BLOCKS = 3
"""Blocks that a program of a tall tile could walk while it waits for its first and writes its part."""
GROUP_BLOCKS = 80
"""Blocks of an item of decoding from which two warpgroups walk it: 124 of them gain 3 %, 31 and 17 lose
(README.md)."""
PROMPT_SLOTS, PROMPT_TILES = 256, 2
"""Slots, and tiles for each multiprocessor, beyond which two warpgroups walk prompts in blocks of 128 slots:
207 in place of 254 us with 8 prompts of 1,024 tokens, 534 in place of 761 with 2 of 4,096, but 129 in place
of 110 with 64 of 128 (one H100)."""
WHOLE_SLOTS = 2048
"""A walk of so many slots by one program takes about 20 us; a second kernel takes 2 us in every layer."""
SHORT_BLOCK_TILES, TWO_PROGRAM_TILES = 2, 8
"""Tiles for each multiprocessor from which short blocks are loaded ahead, and from which two programs run at
a time: 8 % and 11 % less time at 64 and 256 sequences of 1,024 slots (README.md)."""
APART_BLOCKS = 64
"""Blocks of slots for each multiprocessor from which sequences that decode walk apart from prompts. A tile of
128 packed rows takes 0.4 us longer for a block than one of 16, and another launch takes 5 us: 15.8 and 9.9 ms
in 36 layers at 256 sequences (one H200). The host's bound is twice to four times the slots that there are."""
SPLIT_SLOTS = 256
"""Slots of the first fixed splits. One of 64 or 128 leaves more parts to add: 15.4 and 13.8 us in place of
11.9 at 4 sequences of 1,088 slots, 21.0 and 19.1 in place of 18.0 at one of 8,192, but 6.4 and 6.2 in place
of 7.5 at one of 1,088 (one H100)."""
TALL_HEAD = 128
"""Padded head dim for which deterministic bfloat16 rows also have tiles of 64 and 128 packed rows, with the
bits of lower ones (tests/gpu): 110 in place of 140 us at 64 sequences of 1,088 slots, 15 rows (one H100)."""
FIXED_STAGES = {16: (3, 7), 32: (3, 7), 64: (2, 5), 128: (3, 3)}
"""Of deterministic rows, by the packed rows of a tile: with two programs of a multiprocessor (of 128 rows one
fits), and the most that fit. wgmma, which multiplies from 64 rows on, has two more blocks under way."""
FULL_TILES = 0.75
"""Tiles for each multiprocessor from which a tile has one item, without parts: 26.9 in place of 30.4 us at 16
sequences of 1,088 slots (one H100)."""
FEW_ROWS = 16
"""With at most this many rows in a pass, one program per row and KV head adds its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch parameters."""

    block_m: int
    """Rows times query heads of one KV head in a tile."""
    block_n: int
    """Slots per block."""
    warps: int = 4
    stages: int = 3
    programs_per_sm: int = 2
    """Target number of items of all KV heads per multiprocessor; 0: no walk is split."""
    min_blocks: int = 2
    """Minimum length of an item in blocks."""
    whole_slots: int = 0
    """If no walk has more slots, and there is a sequence for each program, walks are not split."""
    split_slots: int = 0
    """Slots of the first fixed splits; 0: equal shares, as many as fill the device."""
    octave: int = 16
    """The length of splits doubles after twice this many splits, then after each further `octave` splits."""
    max_parts: int = 512
    """Maximum number of parts with fixed splits; one program per KV head walks a tile without parts."""
    combine_rows: int = 1
    """Packed rows of a program of the second kernel, which adds parts."""
    combine_parts: int = 16
    """Parts that this kernel adds at once; 1 with fixed splits, which are added in order."""
    combine_warps: int = 4
    sum_stages: int = 12
    """Parts that are loaded ahead when they are added in order."""
    half_parts: bool = False
    """Parts are float16 with a power of two per row; not with fixed splits, which hold some in registers."""
    pdl: bool = False
    """Programmatic dependent launch: every kernel waits for the previous one inside its own prologue."""
    two_groups: bool = False
    """Two warpgroups walk (kernel_hopper.py) where they serve layer and device; else Triton's walk."""
    turns: int = 1
    """Items that a program of two warpgroups computes, one after the other."""
    early: bool = False
    """The walk lets the sum launch when the walk begins, not when it ends; programs of the sum then take
    places of walks, unless all fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What the compiled walk depends on. `block_h`: columns of a tile. `split_blocks`: blocks of the first
    fixed splits. `early`: the sum may launch as soon as the walk has, else after its loop. `num_listed`:
    width of the lists, 0 if the layer has none. `sums_before`: it also leaves the sums before the block.
    `has_windows`: rows see no slot before `first_slots_R`."""

    block_m: int
    block_n: int
    block_h: int
    page_size: int
    split_blocks: int
    octave: int
    stages: int
    precision: str
    early: bool
    num_listed: int
    sums_before: bool
    has_windows: bool = False


def choose_launch(
    shape: HeadShape,
    *,
    max_rows: int,
    usual_rows: int | None = None,
    num_rows: int | None = None,
    max_slots: int = 0,
    num_sequences: int = 1,
    multiprocessors: int = 132,
    deterministic: bool = False,
    has_groups: bool = False,
) -> Launch:
    """Choose tile and pipeline by the heads, the rows of a sequence (those that most have, if they are known)
    and of all (None: there is one sequence), and the number of slots.

    `deterministic`: everything that affects the bits of a row is the same for every batch. `has_groups`: two
    warpgroups can walk prompts."""
    group = triton.next_power_of_2(shape.group)
    block_h = padded_head(shape.head_dim)
    block_n = _slots_of_block(block_h, is_wide=(is_wide := shape.dtype == torch.float32))
    packed = min(max_rows, usual_rows or max_rows) * shape.group
    is_few = (num_rows := max_rows if num_rows is None else num_rows) <= FEW_ROWS
    num_walks = num_sequences * shape.num_kv_heads
    tiles_per_sm = num_walks / multiprocessors
    if deterministic:
        return _fixed_launch(shape, block_n, packed, max_slots, num_sequences, tiles_per_sm, is_few)
    is_prompt = has_groups and packed > 128 and max_slots > PROMPT_SLOTS
    if is_prompt and num_rows * shape.num_heads >= 128 * PROMPT_TILES * multiprocessors:
        return _prompt_launch(shape, max_slots)
    block_m = 16 if is_wide or packed <= 16 else 32 if packed <= 32 else 64
    is_narrow = block_m == 16 and block_n == 64
    num_blocks = num_walks * triton.cdiv(max_slots, block_n)
    # One program that loads twice as far ahead hides latency better than two, if each has work.
    is_long = is_narrow and num_blocks >= 4 * multiprocessors and tiles_per_sm < SHORT_BLOCK_TILES
    loads_ahead = is_narrow and SHORT_BLOCK_TILES <= tiles_per_sm < TWO_PROGRAM_TILES
    programs_per_sm, is_long_block = 1 if is_long else 2, False
    is_tall = packed > block_m == 64 and block_h <= 128 and num_blocks > 2 * multiprocessors
    if is_tall:
        block_m, block_n = 128, 64
        programs_per_sm, is_long_block = _tall_items(num_walks, packed, max_slots, multiprocessors)
    combine_rows = 2 if is_tall and not is_long_block else 1 if is_few else 4
    if block_m == 64 and 0 < num_blocks <= 2 * multiprocessors:
        combine_rows = 2
        # Items of a few blocks end more evenly with small blocks.
        block_n = block_n // 2 if packed > block_m else block_n
    return Launch(
        block_m=max(block_m, group),
        block_n=2 * block_n if is_long else block_n,
        warps=8 if is_tall or (group > 64 and not is_wide) else 4,
        stages=2 if is_wide else 4 if loads_ahead else 3,
        min_blocks=1,
        programs_per_sm=programs_per_sm,
        whole_slots=WHOLE_SLOTS,
        combine_rows=combine_rows,
        combine_parts=min(32, max(1, 4096 // (block_h * combine_rows))),
        combine_warps=1,
        half_parts=block_m > 16 and shape.dtype == torch.bfloat16,
        early=(block_m == 16 and not is_wide) or (is_tall and not is_long_block),
        two_groups=is_long_block and shape.head_dim == 128,
    )


def _tall_items(num_walks: int, packed: int, max_slots: int, multiprocessors: int) -> tuple[int, bool]:
    """Programs per multiprocessor of tall tiles, each of which reads once what two tiles would each read;
    and whether items are long walks of one tile."""
    sizes = num_walks * triton.cdiv(packed, 128), triton.cdiv(max_slots, 64)
    programs_per_sm = even_programs(*sizes, multiprocessors)
    blocks = sizes[1] // items_of_tile(programs_per_sm, *sizes, multiprocessors)
    return programs_per_sm, packed <= 128 and blocks >= GROUP_BLOCKS


def _prompt_launch(shape: HeadShape, max_slots: int) -> Launch:
    """Of prompts whose tiles fill the device: only a walk that takes as long as many others is split."""
    return Launch(
        block_m=128,
        block_n=128,
        min_blocks=1,
        programs_per_sm=1 if max_slots > WHOLE_SLOTS else 0,
        combine_rows=2,
        combine_warps=1,
        half_parts=shape.dtype == torch.bfloat16,
        two_groups=True,
        turns=2,
    )


def _fixed_launch(
    shape: HeadShape,
    block_n: int,
    packed: int,
    max_slots: int,
    num_sequences: int,
    tiles_per_sm: float,
    is_few: bool,
) -> Launch:
    """Of deterministic rows. Their bits follow `block_n` and the splits, which are those of the heads; tile,
    warps, pipeline and items follow the load."""
    is_wide, is_long, is_full = (
        shape.dtype == torch.float32,
        max_slots > WHOLE_SLOTS,
        tiles_per_sm >= FULL_TILES,
    )
    height = 16 if is_wide or packed <= 16 else 32
    if shape.dtype == torch.bfloat16 and padded_head(shape.head_dim) == TALL_HEAD:
        # Where two tiles of a sequence do not run at once, they do not meet in the cache.
        is_apart = packed > 32 and (tiles_per_sm > 1 or (is_full and is_long))
        height = 128 if packed > 64 else 64 if is_apart else height
    block_m = max(height, triton.next_power_of_2(shape.group))
    # One program of a multiprocessor loads as far ahead as fits.
    is_deep = is_full and tiles_per_sm <= 1 and is_long and packed <= block_m
    stages = FIXED_STAGES[min(block_m, 128)][is_deep]
    is_one = num_sequences == 1 and packed <= block_m <= 32
    return Launch(
        block_m=block_m,
        block_n=block_n,
        warps=8 if block_m > 64 and not is_wide else 4,
        stages=2 if is_wide else stages,
        min_blocks=1,
        programs_per_sm=1 if is_full or block_m > 64 else 2,
        whole_slots=WHOLE_SLOTS,
        split_slots=SPLIT_SLOTS,
        combine_rows=1 if is_few else 4,
        combine_warps=1,
        early=(block_m == 16 or is_one) and not is_full and not is_wide,
    )


def walks_apart(
    shape: HeadShape,
    narrow: Launch,
    wide: Launch,
    *,
    max_slots: int,
    num_sequences: int,
    multiprocessors: int,
) -> bool:
    """Whether a second launch is worth it in a pass whose sequences suit `narrow`, but for at least one of
    many rows, which suits `wide`."""
    num_blocks = (num_sequences - 1) * shape.num_kv_heads * triton.cdiv(max_slots, wide.block_n)
    return narrow.block_m < wide.block_m and num_blocks >= APART_BLOCKS * multiprocessors


def _slots_of_block(block_h: int, *, is_wide: bool) -> int:
    """Slots of a block whose keys and values fit into shared memory a few times; `is_wide`: in float32."""
    if is_wide:
        return 32 if block_h <= 128 else 16
    return 128 if block_h <= 64 else 64 if block_h <= 128 else 32


def even_programs(num_tiles: int, num_blocks: int, multiprocessors: int) -> int:
    """Programs per multiprocessor that end first, of the tiles of all KV heads, with `num_blocks` each.

    One runs at a time: more of them divide the tiles more evenly, and each begins with a wait."""

    def blocks_in_turn(programs: int) -> int:
        items = items_of_tile(programs, num_tiles, num_blocks, multiprocessors)
        turns = triton.cdiv(items * num_tiles, multiprocessors)
        return int(turns * (triton.cdiv(num_blocks, items) + WAIT_BLOCKS))

    return min(range(1, MAX_PROGRAMS + 1), key=blocks_in_turn)


def items_of_tile(programs: int, num_tiles: int, num_blocks: int, multiprocessors: int) -> int:
    """Items of each of such tiles, with so many programs per multiprocessor."""
    return max(1, min(num_blocks, multiprocessors * programs // num_tiles))


def padded_head(head_dim: int) -> int:
    """Columns of a tile; those past the head dim are masked."""
    return max(16, triton.next_power_of_2(head_dim))
