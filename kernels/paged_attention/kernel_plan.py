"""The two Triton kernels that plan a step: a list of tiles, then a list of work items of about equal length.

Both run one program per entry of lists whose lengths the host bounds; nothing is read back. Unused entries
have no rows. The layout of the records is in planning.py, the reasons are in README.md.

B sequences (number B is the padding after the last row), R rows of this pass, K KV heads."""

from __future__ import annotations

import triton
import triton.language as tl

NO_SLOT: tl.constexpr = tl.constexpr(1 << 30)
RECORD: tl.constexpr = tl.constexpr(32)
"""Numbers of a record."""


@triton.jit
def _rows_before_block(starts_B, own_slots_R, sequences, is_listed, starts, lengths, num_steps):
    """Number of rows before the block of each listed sequence, 0 for the others: own slots ascend."""
    block_starts = tl.load(starts_B + sequences, mask=is_listed, other=0).to(tl.int32)
    low, high = tl.zeros_like(lengths), tl.where(is_listed, lengths, 0)
    for _ in range(num_steps):
        middle = (low + high) // 2
        is_open = low < high
        owns = tl.load(own_slots_R + starts + middle, mask=is_open, other=0).to(tl.int32)
        is_before = is_open & (owns < block_starts)
        high = tl.where(is_open & (owns >= block_starts), middle, high)
        low = tl.where(is_before, middle + 1, low)
    return low


@triton.jit(do_not_specialize=["num_sequences", "num_rows", "num_steps", "min_rows", "max_rows"])
def tile_kernel(
    rows_of,
    tiles,
    num_sequences,
    num_rows,
    num_steps,
    min_rows,
    max_rows,
    NUM_LISTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Tile `program_id`: its sequence, its rows and their visible blocks of BLOCK_N slots.

    Sequences with fewer than `min_rows` or more than `max_rows` rows have no tile here; the padding has
    tiles where there is no maximum.
    FIXED: the walk skips no block, so that the position of a block in it does not depend on the rows.
    NUM_LISTED: width of the lists, 0: none; `num_steps` halve the rows of any sequence to one."""
    cu_rows, limits_R, branch_starts_R, own_slots_R, starts_B, listed_B, first_slots_R = rows_of
    tile = tl.program_id(0)
    sequences = tl.arange(0, BLOCK_B)
    starts = tl.load(cu_rows + sequences, mask=sequences <= num_sequences, other=0)
    ends = tl.load(cu_rows + sequences + 1, mask=sequences < num_sequences, other=0)
    ends = tl.where(sequences == num_sequences, num_rows, ends)
    lengths = tl.where(sequences <= num_sequences, ends - starts, 0).to(tl.int32)
    has_tiles = (lengths >= min_rows) & (lengths <= max_rows)
    has_tiles = tl.where(sequences == num_sequences, max_rows >= num_rows, has_tiles)
    lengths = tl.where(has_tiles, lengths, 0)
    before = tl.zeros_like(lengths)
    if NUM_LISTED:
        is_listed = tl.load(listed_B + sequences, mask=sequences < num_sequences, other=0) != 0
        before = _rows_before_block(starts_B, own_slots_R, sequences, is_listed, starts, lengths, num_steps)
    tiles_before = (before + ROWS - 1) // ROWS
    last_tiles = tl.cumsum(tiles_before + (lengths - before + ROWS - 1) // ROWS, 0)
    b = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    first_tile = tl.max(tl.where(last_tiles <= tile, last_tiles, 0), 0)
    is_mine = sequences == b
    start = tl.sum(tl.where(is_mine, starts, 0), 0).to(tl.int32)
    end = start + tl.sum(tl.where(is_mine, lengths, 0), 0)
    index = tile - first_tile
    row = start + index * ROWS
    if NUM_LISTED:
        # Tiles break where the block begins.
        num_before = tl.sum(tl.where(is_mine, before, 0), 0)
        num_tiles_before = tl.sum(tl.where(is_mine, tiles_before, 0), 0)
        is_after = index >= num_tiles_before
        row = tl.where(is_after, start + num_before + (index - num_tiles_before) * ROWS, row)
        end = tl.where(is_after, end, start + num_before)
        sees_list = is_after & (tl.sum(tl.where(is_mine & is_listed, 1, 0), 0) > 0) & (row < end)
    count = tl.maximum(tl.minimum(end - row, ROWS), 0)
    block_start = 0
    if starts_B is not None:
        block_start = tl.load(starts_B + b, mask=b < num_sequences, other=0).to(tl.int32)

    rows = row + tl.arange(0, BLOCK_ROWS)
    is_fed = (rows < row + count) & (b < num_sequences)
    limits = tl.load(limits_R + rows, mask=is_fed, other=0).to(tl.int32)
    branches = tl.load(branch_starts_R + rows, mask=is_fed, other=1).to(tl.int32)
    owns = tl.load(own_slots_R + rows, mask=is_fed, other=0).to(tl.int32)
    has_branch = is_fed & (branches <= owns)
    low_limit = tl.min(tl.where(is_fed, limits, NO_SLOT), 0)
    high_limit = tl.max(limits, 0)
    low_branch = tl.min(tl.where(has_branch, branches, NO_SLOT), 0)
    high_own = tl.max(tl.where(has_branch, owns, -1), 0)

    num_list_blocks, shift = 0, 0
    if (first_slots_R is not None) and not FIXED:
        # The walk begins where a row sees something.
        firsts = tl.load(first_slots_R + rows, mask=is_fed, other=NO_SLOT).to(tl.int32)
        shift = tl.minimum(tl.maximum(tl.min(firsts, 0), 0), tl.maximum(high_limit, 1) - 1)
        shift = tl.minimum(shift, low_branch)
    num_below = (high_limit - shift + BLOCK_N - 1) // BLOCK_N
    end_block = tl.maximum((tl.maximum(high_own - shift, -1) + BLOCK_N) // BLOCK_N, num_below)
    if FIXED:
        num_below = end_block
    branch_block = tl.minimum(tl.maximum((low_branch - shift) // BLOCK_N, num_below), end_block)
    if NUM_LISTED:
        # Listed slots are distinct and lie before the block.
        num_list_blocks = (tl.minimum(block_start, NUM_LISTED) + BLOCK_N - 1) // BLOCK_N
        num_list_blocks = tl.where(sees_list, num_list_blocks, 0)
        num_own_blocks = (tl.maximum(high_limit - block_start, 0) + BLOCK_N - 1) // BLOCK_N
        num_below = tl.where(sees_list, num_list_blocks, num_below)
        branch_block = tl.where(sees_list, num_list_blocks, branch_block)
        end_block = tl.where(sees_list, num_list_blocks + num_own_blocks, end_block)
        low_branch = tl.where(sees_list, NO_SLOT, low_branch)
        high_own = tl.where(sees_list, -1, high_own)
        shift = tl.where(sees_list, block_start - num_list_blocks * BLOCK_N, 0)
        block_start = tl.where(sees_list, 0, block_start)

    record = tiles + tile * RECORD
    tl.store(record, b)
    tl.store(record + 1, row)
    tl.store(record + 2, count)
    tl.store(record + 3, num_below)
    tl.store(record + 4, branch_block)
    tl.store(record + 5, end_block)
    tl.store(record + 6, low_limit)
    tl.store(record + 7, high_limit)
    tl.store(record + 8, low_branch)
    tl.store(record + 9, high_own)
    tl.store(record + 17, num_list_blocks)
    tl.store(record + 18, shift)
    tl.store(record + 19, block_start)


@triton.jit
def num_splits(blocks, SPLIT_BLOCKS: tl.constexpr, OCTAVE: tl.constexpr):
    """Number of splits that start below a block; the inverse of `kernel_walk.split_start`, rounded up.

    The exponent of a float32 is its logarithm rounded down."""
    units = (blocks + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS
    octaves = tl.maximum((units - 1) // OCTAVE, 1).to(tl.float32)
    octave = (octaves.to(tl.int32, bitcast=True) >> 23) - 127
    return ((units + (1 << octave) - 1) >> octave) + octave * OCTAVE


@triton.jit(do_not_specialize=["num_tiles", "num_programs", "min_blocks", "max_parts"])
def item_kernel(
    tiles,
    items,
    num_tiles,
    num_programs,
    min_blocks,
    max_parts,
    SPLIT_BLOCKS: tl.constexpr,
    OCTAVE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Item `program_id`: a copy of its tile's record, its share of the walk, and where the tile's parts lie.

    SPLIT_BLOCKS 0: items share a tile's blocks, and each writes one part. Otherwise items share its splits,
    each of which is a part, except those of the first item, which adds them itself, as the beginning of the
    sum. A tile with one item (a short one, or one without memory for parts) writes no part. At most half as
    many tiles as `num_programs` have several items."""
    item = tl.program_id(0)
    numbers = tl.arange(0, BLOCK_TILES)
    records = tiles + numbers * RECORD
    inside = numbers < num_tiles
    has_rows = tl.load(records + 2, mask=inside, other=0) > 0
    num_below = tl.load(records + 3, mask=inside, other=0)
    branch_block = tl.load(records + 4, mask=inside, other=0)
    end_block = tl.load(records + 5, mask=inside, other=0)
    walks = tl.where(has_rows, num_below + end_block - branch_block, 0)
    # Rounded down: one program too many would run alone after all others, and take as long as they did.
    share = (walks.to(tl.int64) * num_programs // tl.maximum(tl.sum(walks, 0), 1)).to(tl.int32)
    if SPLIT_BLOCKS == 0:
        counts = tl.where(has_rows, tl.maximum(tl.minimum(share, walks // min_blocks), 1), 0)
        parts = tl.where(counts > 1, counts, 0)
    else:
        splits = num_splits(walks, SPLIT_BLOCKS, OCTAVE)
        wanted = tl.maximum(tl.minimum(share, splits), 1)
        parts = 1 + splits - num_splits(walks // wanted, SPLIT_BLOCKS, OCTAVE)
        parts = tl.where(has_rows & (wanted > 1), parts, 0)
        fits = tl.cumsum(parts, 0) <= max_parts
        counts = tl.where(has_rows, tl.where(fits, wanted, 1), 0)
        parts = tl.where(fits, parts, 0)
    last_items = tl.cumsum(counts, 0)
    tile = tl.sum((last_items <= item).to(tl.int32), 0)
    index = item - tl.max(tl.where(last_items <= item, last_items, 0), 0)
    is_mine = numbers == tile
    count = tl.sum(tl.where(is_mine, counts, 0), 0)
    length = tl.sum(tl.where(is_mine, walks, 0), 0)
    num_parts = tl.sum(tl.where(is_mine, parts, 0), 0)
    first_part = tl.sum(tl.where(numbers < tile, parts, 0), 0)

    low, high = index * length // tl.maximum(count, 1), (index + 1) * length // tl.maximum(count, 1)
    my_part = first_part + index
    if SPLIT_BLOCKS:
        low, high = num_splits(low, SPLIT_BLOCKS, OCTAVE), num_splits(high, SPLIT_BLOCKS, OCTAVE)
        second = num_splits(length // tl.maximum(count, 1), SPLIT_BLOCKS, OCTAVE)
        my_part = tl.where(index == 0, first_part, first_part + 1 - second)

    fields = tl.arange(0, RECORD)
    is_copied = (tile < num_tiles) & ((fields < 10) | (fields > 16) & (fields < 20))
    copied = tl.load(tiles + tile * RECORD + fields, mask=is_copied, other=0)
    copied = tl.where(fields == 10, low, copied)
    copied = tl.where(fields == 11, high, copied)
    copied = tl.where(fields == 14, tile, copied)
    copied = tl.where(fields == 15, count, copied)
    copied = tl.where(fields == 16, my_part, copied)
    tl.store(items + item * RECORD + fields, copied)
    # Tiles with parts lie one after the other for the second kernel; its other records have no rows.
    is_split = (counts > 1).to(tl.int32)
    if (index == 0) & (count > 1):
        record = tiles + tl.sum(tl.where(numbers < tile, is_split, 0), 0) * RECORD
        tl.store(record + 21, tl.load(tiles + tile * RECORD + 1))
        tl.store(record + 22, first_part)
        tl.store(record + 23, num_parts)
        tl.store(record + 20, tl.load(tiles + tile * RECORD + 2))
    if (item < num_tiles) & (item >= tl.sum(is_split, 0)):
        tl.store(tiles + item * RECORD + 20, 0)
