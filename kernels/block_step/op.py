"""The rows of a block-diffusion pass, and the decisions from its logits: plain torch, or one launch each on a
GPU.

In plain torch each takes about 80 launches, several percent of a step of an 8B model at batch 1. Contract in
README.md. Z lanes, L columns of the token table, B sequences, R rows, W positions of a block, X wanted rows,
I columns."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from idlm.kernels.backend import runs_kernels
from idlm.kernels.block_step.plain import decide_plainly
from idlm.kernels.block_step.plain_rows import due_rows, pack_plainly
from idlm.kernels.block_step.resizing import Resizing
from idlm.kernels.block_step.types import (
    RULES,
    BlockLanes,
    BlockShape,
    Choose,
    PackedBlocks,
    PassBlocks,
    Proposed,
    Rules,
    WantedPositions,
)
from idlm.kernels.step_rows import Lanes

BLOCK = 32
FEW_SEQUENCES = 16
INTS = ("first_B", "num_feed_B", "starts_B", "num_passes_B", "num_steps_B", "draw_steps_B", "num_B")
ROW_COLUMNS = ("sequence_R", "token_ids_R", "slots_R", "limits_R")
"""Numbers of a sequence, and of a row, in the order in which the kernel stores them."""


def pack_blocks(
    lanes: Lanes,
    blocks: BlockLanes,
    shape: BlockShape,
    *,
    steps_Z: Tensor,
    lanes_B: Tensor,
    num_feed_B: Tensor,
    samples_B: Tensor,
    num_rows: int | None,
    num_wanted: int | None,
    edits: bool,
) -> PackedBlocks:
    """Rows of every sequence: its whole known blocks that are not stored yet, then its active block.

    `num_rows`: rows of the pass, which bound how many blocks may be denoised next to the stored ones; None:
    exactly those that are needed, which the host waits for. `num_wanted`: capacity for wanted rows, of which
    one block and a first position of each sequence have some in any case; None: for all positions. `edits`:
    decided positions need rows as well. No pass is empty, even if all its sequences are complete
    on the device."""
    rows, num_sequences, is_limited = None, len(lanes_B), num_rows is not None
    columns_B = (lanes_B, num_feed_B, samples_B)
    if num_rows is None or not runs_kernels(lanes_B):
        rows = due_rows(lanes, blocks, shape, columns_B, num_rows=num_rows, edits=edits)
    if num_rows is None:
        assert rows is not None
        num_rows, num_wanted = torch.stack((rows.cu_rows_B1[-1], rows.is_due_BW.sum())).tolist()
        num_rows, num_wanted = max(1, num_rows), max(1, num_wanted)
    else:
        num_positions, minimum = num_sequences * shape.size, num_sequences + shape.size
        num_wanted = num_positions if num_wanted is None else min(num_positions, max(num_wanted, minimum))
    sizes = num_rows, num_wanted
    if not runs_kernels(lanes_B):
        assert rows is not None
        return pack_plainly(lanes, blocks, shape, rows, columns_B, steps_Z, sizes)
    return _launched(lanes, blocks, shape, steps_Z, columns_B, sizes, is_limited=is_limited, edits=edits)


def _launched(
    lanes: Lanes,
    blocks: BlockLanes,
    shape: BlockShape,
    steps_Z: Tensor,
    columns_B: tuple[Tensor, Tensor, Tensor],
    sizes: tuple[int, int],
    *,
    is_limited: bool,
    edits: bool,
) -> PackedBlocks:
    """One launch. `columns_B`: lanes, tokens to feed, and whether the sequence decodes; `sizes`: rows of the
    pass and wanted rows. `is_limited`: these are bounds."""
    import triton

    from idlm.kernels.block_step.kernel import pack_blocks_kernel

    (num_rows, num_wanted), num_sequences = sizes, len(columns_B[0])
    assert all(column_B.stride(0) == 1 for column_B in columns_B), f"{[c.stride() for c in columns_B]=}"
    ints, bools = (
        functools.partial(torch.empty, dtype=dtype, device=columns_B[0].device)
        for dtype in (torch.int64, torch.bool)
    )
    cu_rows_B1, ints_IB, rows_IR = ints(num_sequences + 1), ints(len(INTS), num_sequences), ints(4, num_rows)
    wanted_IX, number_BW = ints(3, num_wanted), ints(num_sequences, shape.size)
    bools_IB, is_mask_R = bools(3, num_sequences), bools(num_rows)
    is_maskable_BW = bools(num_sequences, shape.size)
    pack_blocks_kernel[(triton.cdiv(num_rows, BLOCK) + num_sequences,)](
        *(lanes, blocks, steps_Z, columns_B),
        (cu_rows_B1, ints_IB, bools_IB, rows_IR, is_mask_R, wanted_IX, number_BW, is_maskable_BW),
        *(num_sequences, num_rows, num_wanted, lanes.tokens_ZL.shape[1]),
        SHAPE=shape,
        LIMITED=is_limited,
        EDITS=edits,
        BLOCK_B=triton.next_power_of_2(num_sequences),
        BLOCK=BLOCK,
        num_warps=1 if num_sequences <= FEW_SEQUENCES else 4,
    )
    numbers = dict(zip(INTS, ints_IB, strict=True))
    wanted = WantedPositions(
        rows_X=wanted_IX[0],
        positions_X=wanted_IX[1],
        lanes_X=wanted_IX[2],
        number_BW=number_BW,
        first_B=numbers.pop("first_B"),
        num_B=numbers.pop("num_B"),
        waits_B=bools_IB[2],
    )
    return PackedBlocks(
        cu_rows_B1=cu_rows_B1,
        **dict(zip(ROW_COLUMNS, rows_IR, strict=True)),
        is_mask_R=is_mask_R,
        wanted=wanted,
        samples_B=bools_IB[0],
        advances_B=bools_IB[1],
        is_maskable_BW=is_maskable_BW,
        **numbers,
    )


def decide_blocks(
    lanes: Lanes,
    table_steps_Z: Tensor,
    blocks: BlockLanes,
    shape: BlockShape,
    given: PassBlocks,
    proposed: Proposed,
    *,
    rule: str,
    choose: Choose,
    limits: Rules,
    resizing: Resizing | None = None,
) -> tuple[Tensor, Tensor]:
    """Decide masks, edit, and commit blocks that become clean; returns the tokens [B, W] and the number that
    each sequence emits [B], both int64. `rule`: the name of the strategy, which `choose` is in plain torch;
    the kernel supports those of `RULES`, and no `resizing`."""
    if resizing is not None or rule not in RULES or not runs_kernels(proposed.token_ids_BW):
        return decide_plainly(
            *(lanes, table_steps_Z, blocks, shape, given, proposed),
            choose=choose,
            limits=limits,
            resizing=resizing,
        )
    from idlm.kernels.block_step.kernel import decide_kernel

    lanes_B, is_maskable_BW = given.lanes_B, given.is_maskable_BW
    num_sequences, entropy_BW = len(lanes_B), proposed.entropy_BW
    assert is_maskable_BW.is_contiguous() and proposed.token_ids_BW.is_contiguous(), (
        f"{is_maskable_BW.stride()=}"
    )
    assert proposed.confidence_BW.is_contiguous() and (entropy_BW is not None or rule != RULES[-1])
    out_BW = torch.empty_like(proposed.token_ids_BW)
    emitted_B = torch.empty(num_sequences, dtype=torch.int64, device=lanes_B.device)
    decide_kernel[(num_sequences,)](
        *(lanes, table_steps_Z, blocks, limits, given, proposed, (out_BW, emitted_B)),
        *(1 if entropy_BW is None else entropy_BW.stride(1), lanes.tokens_ZL.shape[1]),
        RULE=RULES.index(rule),
        SHAPE=shape,
        num_warps=1 if shape.size <= 16 else 4 if shape.size <= 64 else 16,
    )
    return out_BW, emitted_B
