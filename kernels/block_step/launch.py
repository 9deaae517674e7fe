"""Launches of the block-diffusion kernels. B sequences, R rows, W places of a block, X = B * W."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from idlm.kernels.block_step.kernel import decide_kernel, pack_blocks_kernel
from idlm.kernels.block_step.types import (
    PASSES_BITS,
    RULES,
    BlockLanes,
    BlockShape,
    Limits,
    PackedBlocks,
    Proposed,
)
from idlm.kernels.step_rows import Lanes

BLOCK = 32
FEW_SEQUENCES = 16


def run_pack(
    lanes: Lanes,
    blocks: BlockLanes,
    shape: BlockShape,
    steps_Z: Tensor,
    columns_B: tuple[Tensor, Tensor, Tensor],
    num_rows: int,
    has_room: bool,
) -> PackedBlocks:
    """Launch `pack_blocks_kernel`; `columns_B`: lanes_B, num_feed_B, samples_B."""
    lanes_B, size = columns_B[0], shape.size
    num_sequences, device = len(lanes_B), lanes_B.device
    assert all(column_B.stride(0) == 1 for column_B in columns_B), f"{[c.stride() for c in columns_B]=}"
    cu_rows_B1 = torch.empty(num_sequences + 1, dtype=torch.int64, device=device)
    ints_IB = torch.empty(6, num_sequences, dtype=torch.int64, device=device)
    bools_IB = torch.empty(2, num_sequences, dtype=torch.bool, device=device)
    rows_IR = torch.empty(4, num_rows, dtype=torch.int64, device=device)
    is_mask_R = torch.empty(num_rows, dtype=torch.bool, device=device)
    logit_rows_X = torch.empty(num_sequences * size, dtype=torch.int64, device=device)
    is_maskable_BW = torch.empty(num_sequences, size, dtype=torch.bool, device=device)
    pack_blocks_kernel[(triton.cdiv(num_rows, BLOCK) + num_sequences,)](
        *(lanes.num_known_Z, lanes.num_computed_Z, lanes.ends_Z, lanes.tokens_ZL),
        *(blocks.tokens_ZW, blocks.is_decided_ZW, blocks.num_passes_Z, blocks.whole_part_Z),
        steps_Z,
        *columns_B,
        *(cu_rows_B1, ints_IB, bools_IB, rows_IR, is_mask_R, logit_rows_X, is_maskable_BW),
        *(num_sequences, num_rows, lanes.tokens_ZL.shape[1], shape.mask_token_id),
        **_options(shape),
        FUSES=shape.fuses and not shape.shifted,
        HAS_ROOM=has_room,
        PASSES_BITS=PASSES_BITS,
        BLOCK_B=triton.next_power_of_2(num_sequences),
        BLOCK=BLOCK,
        num_warps=1 if num_sequences <= FEW_SEQUENCES else 4,
    )
    sequence_R, token_ids_R, slots_R, limits_R = rows_IR
    first_logit_B, num_feed_B, starts_B, num_passes_B, num_steps_B, draw_steps_B = ints_IB
    return PackedBlocks(
        cu_rows_B1=cu_rows_B1,
        sequence_R=sequence_R,
        token_ids_R=token_ids_R,
        slots_R=slots_R,
        limits_R=limits_R,
        is_mask_R=is_mask_R,
        logit_rows_X=logit_rows_X,
        first_logit_B=first_logit_B,
        num_feed_B=num_feed_B,
        samples_B=bools_IB[0],
        advances_B=bools_IB[1],
        starts_B=starts_B,
        is_maskable_BW=is_maskable_BW,
        num_passes_B=num_passes_B,
        num_steps_B=num_steps_B,
        draw_steps_B=draw_steps_B,
    )


def run_decide(
    lanes: Lanes,
    table_steps_Z: Tensor,
    blocks: BlockLanes,
    shape: BlockShape,
    rule: str,
    limits: Limits,
    columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    proposed: Proposed,
) -> tuple[Tensor, Tensor]:
    """Launch `decide_kernel`; `columns`: lanes_B, num_feed_B, samples_B, is_maskable_BW, has_logits_BW."""
    lanes_B, num_feed_B, samples_B, is_maskable_BW, has_logits_BW = columns
    num_sequences, entropy_BW = len(lanes_B), proposed.entropy_BW
    assert is_maskable_BW.is_contiguous() and proposed.token_ids_BW.is_contiguous(), (
        f"{is_maskable_BW.stride()=}"
    )
    assert proposed.confidence_BW.is_contiguous() and (entropy_BW is not None or rule != RULES[-1])
    out_BW = torch.empty_like(proposed.token_ids_BW)
    emitted_B = torch.empty(num_sequences, dtype=torch.int64, device=lanes_B.device)
    decide_kernel[(num_sequences,)](
        *(lanes.num_known_Z, lanes.num_computed_Z, lanes.tokens_ZL, table_steps_Z),
        *(blocks.tokens_ZW, blocks.is_decided_ZW, blocks.num_passes_Z),
        *(blocks.num_clean_passes_Z, blocks.whole_part_Z),
        *(limits.steps_Z, limits.threshold_Z, limits.entropy_bound_Z, limits.edit_threshold_Z),
        *(lanes_B, num_feed_B, samples_B, is_maskable_BW),
        is_maskable_BW if has_logits_BW is None else has_logits_BW,
        proposed.token_ids_BW,
        proposed.confidence_BW,
        proposed.confidence_BW if entropy_BW is None else entropy_BW,
        num_feed_B if limits.quota_B is None else limits.quota_B,
        out_BW,
        emitted_B,
        1 if entropy_BW is None else entropy_BW.stride(1),
        lanes.tokens_ZL.shape[1],
        limits.max_clean_passes or 0,
        RULE=RULES.index(rule),
        EDITS=limits.max_clean_passes is not None,
        HAS_LOGITS=has_logits_BW is not None,
        HAS_QUOTA=limits.quota_B is not None,
        **_options(shape),
        num_warps=1 if shape.size <= 16 else 4 if shape.size <= 64 else 16,
    )
    return out_BW, emitted_B


def _options(shape: BlockShape) -> dict[str, int | bool]:
    return {
        "SIZE": shape.size,
        "PART": shape.part or shape.size,
        "SHIFTED": shape.shifted,
        "REUSES": shape.reuses,
        "BLOCK_W": triton.next_power_of_2(shape.size),
    }
