"""The two launches of a block-diffusion pass on a GPU: its rows, and the decisions from its logits.

In plain torch (infer/decoders/block_rows.py and block.py) each takes about 80 launches, several percent of a
step of an 8B model at batch 1. Contract in README.md.
Z lanes, L columns of the token table, B sequences, R rows, W places of a block, X = B * W wanted rows.
"""

from __future__ import annotations

from torch import Tensor

from idlm.kernels.block_step.types import (
    RULES,
    BlockLanes,
    BlockShape,
    Limits,
    PackedBlocks,
    Proposed,
)
from idlm.kernels.step_rows import Lanes


def pack_blocks(
    lanes: Lanes,
    blocks: BlockLanes,
    shape: BlockShape,
    *,
    steps_Z: Tensor,
    lanes_B: Tensor,
    num_feed_B: Tensor,
    samples_B: Tensor,
    num_rows: int,
    has_room: bool,
) -> PackedBlocks:
    """Rows of every sequence: its whole known blocks that are not stored yet, then its active block.

    `has_room`: `num_rows` bounds how many blocks may be denoised next to the stored ones; else it is the
    exact number of rows. Runs on a GPU or in the interpreter only.
    """
    from idlm.kernels.block_step.launch import run_pack

    return run_pack(lanes, blocks, shape, steps_Z, (lanes_B, num_feed_B, samples_B), num_rows, has_room)


def decide_blocks(
    lanes: Lanes,
    table_steps_Z: Tensor,
    blocks: BlockLanes,
    shape: BlockShape,
    *,
    rule: str,
    limits: Limits,
    lanes_B: Tensor,
    num_feed_B: Tensor,
    samples_B: Tensor,
    is_maskable_BW: Tensor,
    has_logits_BW: Tensor | None,
    proposed: Proposed,
) -> tuple[Tensor, Tensor]:
    """Decide masks, edit, and commit blocks that become clean; returns the tokens [B, W] and the number that
    each sequence emits [B], both int64. `rule`: one of `RULES`. Runs on a GPU or in the interpreter only.
    """
    assert rule in RULES, f"{rule=}"
    from idlm.kernels.block_step.launch import run_decide

    columns = (lanes_B, num_feed_B, samples_B, is_maskable_BW, has_logits_BW)
    return run_decide(lanes, table_steps_Z, blocks, shape, rule, limits, columns, proposed)
