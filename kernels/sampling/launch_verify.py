"""Grids of the kernels that test drafts and store their probabilities. Nothing here waits for the device.

Shapes: V vocabulary, C chunks, Z lanes, B sequences, J drafts, D draws.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from idlm.kernels.sampling import kernel_verify
from idlm.kernels.sampling.launch import Shape, chunk_of, options
from idlm.kernels.sampling.types import DraftProbs, LayoutTables, RowProbs, Verdict


def put(store: DraftProbs, lanes_B: Tensor, probs: RowProbs, rows_BJ: Tensor, active_B: Tensor) -> None:
    """Copy rows into their lanes."""
    num_tokens = probs.logits_XV.shape[1]
    shape = Shape(num_tokens, probs.tuning)
    if rows_BJ.numel():
        kernel_verify.put_kernel[(rows_BJ.numel() * shape.num_half_tiles,)](
            probs.logits_XV,
            probs.numbers_XF,
            probs.masses_XC,
            store.logits_ZJV,
            store.numbers_ZJF,
            store.masses_ZJC,
            lanes_B,
            active_B,
            rows_BJ,
            probs.logits_XV.stride(0),
            num_tokens,
            shape.num_chunks,
            shape.num_half_tiles,
            rows_BJ.shape[1],
            TILE=shape.half_tile,
            CHUNK=shape.chunk,
            **shape.wide,
        )


def verify(
    probs: RowProbs,
    store: DraftProbs,
    tables: LayoutTables,
    columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    uniforms_BJ: Tensor,
) -> Verdict:
    """`columns`: lanes_B, first_rows_B, active_B, drafts_ZJ, tau_Z, layout_Z."""
    num_sequences, num_masks = len(columns[0]), columns[3].shape[1]
    verdict = Verdict.empty(num_sequences, num_masks, probs.logits_XV.device)
    if num_sequences:
        kernel_verify.verify_kernel[(num_sequences,)](
            probs.logits_XV,
            probs.numbers_XF,
            store.logits_ZJV,
            store.numbers_ZJF,
            store.masses_ZJC,
            *columns,
            tables.num_drafts_Y,
            tables.draft_rows_YAJ,
            tables.next_layouts_YA,
            uniforms_BJ,
            verdict.values_FB,
            verdict.token_ids_BA,
            verdict.draft_rows_BJ,
            probs.logits_XV.stride(0),
            uniforms_BJ.stride(0),
            probs.logits_XV.shape[1],
            probs.masses_XC.shape[1],
            num_sequences,
            num_masks,
            MASKS=triton.next_power_of_2(max(1, num_masks)),
            CHUNK=chunk_of(probs.logits_XV.shape[1], probs.tuning),
            **options(probs.tuning, warps=1),
        )
    return verdict


def residual(probs: RowProbs, store: DraftProbs, verdict: Verdict, lanes_B: Tensor) -> Tensor:
    """Chunk masses [B, C] of max(0, p - q), written for sequences with a rejected draft."""
    num_sequences, num_masks = verdict.draft_rows_BJ.shape
    num_tokens = probs.logits_XV.shape[1]
    shape = Shape(num_tokens, probs.tuning)
    excess_BC = torch.empty(num_sequences, shape.num_chunks, dtype=torch.float32, device=lanes_B.device)
    if num_sequences and num_masks:
        kernel_verify.residual_kernel[(num_sequences * shape.num_half_tiles,)](
            probs.logits_XV,
            probs.numbers_XF,
            probs.masses_XC,
            store.logits_ZJV,
            store.numbers_ZJF,
            store.masses_ZJC,
            lanes_B,
            verdict.values_FB,
            excess_BC,
            probs.logits_XV.stride(0),
            num_tokens,
            shape.num_chunks,
            shape.num_half_tiles,
            num_sequences,
            num_masks,
            TILE=shape.half_tile,
            CHUNK=shape.chunk,
            **shape.wide,
        )
    return excess_BC


def draw_verdict(
    probs: RowProbs,
    verdict: Verdict,
    lanes_B: Tensor,
    uniforms_BD: Tensor,
    *,
    token: tuple[DraftProbs, Tensor] | None,
    state: tuple[Tensor, Tensor] | None,
    takes_best: bool = False,
) -> None:
    """Draw the token after the accepted drafts if `token` (the store and `residual`'s masses) is given, and
    the next drafts and layouts into `state` (drafts_ZJ, layout_Z). Each takes a column of `uniforms_BD`, in
    order.
    """
    num_sequences, num_masks = verdict.draft_rows_BJ.shape
    shape = Shape(probs.logits_XV.shape[1], probs.tuning)
    num_draws = (token is not None) + num_masks * (state is not None)
    if not num_sequences * num_draws:
        return
    unused = (verdict.values_FB, verdict.values_FB)
    store = (probs.logits_XV, probs.numbers_XF, probs.masses_XC)
    if token is not None:
        store = (token[0].logits_ZJV, token[0].numbers_ZJF, token[0].masses_ZJC)
    kernel_verify.emit_kernel[(num_sequences * num_draws,)](
        probs.logits_XV,
        probs.numbers_XF,
        probs.masses_XC,
        *store,
        lanes_B,
        verdict.values_FB,
        probs.masses_XC if token is None else token[1],
        uniforms_BD,
        verdict.token_ids_BA,
        verdict.draft_rows_BJ,
        *(state or unused),
        probs.logits_XV.stride(0),
        uniforms_BD.stride(0),
        probs.logits_XV.shape[1],
        shape.num_chunks,
        num_sequences,
        num_masks,
        num_draws,
        FIRST_DRAW=int(token is None),
        HAS_STATE=state is not None,
        TAKES_BEST=takes_best,
        CHUNK=shape.chunk,
        CHUNKS=shape.chunks,
        **shape.narrow,
    )
