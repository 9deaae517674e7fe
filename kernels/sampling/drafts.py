"""Drafts: their stored probabilities, the test of drafts, and the tokens after it.

A step calls `row_probs`, `verify`, `emit_and_draft`, `put` in this order (put overwrites what emit needs).
Rows may be padding with any content, NaN included, and -1 means no row. Contract in README.md. Shapes: X
rows, V vocabulary, Z lanes, B sequences, J drafts, A = J + 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from idlm.kernels import backend
from idlm.kernels.sampling.draws import draw, invert
from idlm.kernels.sampling.types import (
    NUM_NUMBERS,
    TUNING,
    ChunkShape,
    DraftProbs,
    Drafts,
    LayoutTables,
    PlainDraftProbs,
    PlainProbs,
    Probs,
    RowProbs,
    Tuning,
    Verdict,
)

FIELDS = ("logits_XV", "numbers_XF", "masses_XC")
"""Of `RowProbs`, in the order of those of `DraftProbs`."""


def draft_probs(
    num_lanes: int,
    num_drafts: int,
    num_tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tuning: Tuning = TUNING,
) -> Drafts:
    """An empty store of drafts' probabilities; `dtype` of the logits; `tuning` as in `row_probs`."""
    shape = (num_lanes, num_drafts, num_tokens)
    if not backend.has_kernels(device):
        return PlainDraftProbs(probs_ZJV=torch.zeros(shape, dtype=torch.float64, device=device))
    num_chunks = ChunkShape(num_tokens, tuning).num_chunks
    return DraftProbs(
        logits_ZJV=torch.zeros(shape, dtype=dtype, device=device),
        numbers_ZJF=torch.zeros(*shape[:2], NUM_NUMBERS, dtype=torch.float64, device=device),
        masses_ZJC=torch.zeros(*shape[:2], num_chunks, dtype=torch.float32, device=device),
    )


def put(store: Drafts, lanes_B: Tensor, probs: Probs, rows_BJ: Tensor, *, active_B: Tensor) -> None:
    """Store the probabilities of `rows_BJ` in the lanes of active sequences; row -1 changes nothing."""
    if isinstance(probs, PlainProbs):
        assert isinstance(store, PlainDraftProbs), f"{type(store)=}"
        index_M, draft_M = torch.nonzero((rows_BJ >= 0) & active_B[:, None], as_tuple=True)
        store.probs_ZJV[lanes_B[index_M], draft_M] = probs.probs_XV[rows_BJ[index_M, draft_M]]
        return
    assert isinstance(store, DraftProbs), f"{type(store)=}"
    dtypes = (probs.logits_XV.dtype, torch.float32)
    assert store.logits_ZJV.dtype in dtypes, f"{store.logits_ZJV.dtype=} {dtypes=}"
    assert store.masses_ZJC.shape[2] == probs.masses_XC.shape[1], f"{probs.tuning=}"
    from idlm.kernels.sampling import kernel_verify

    num_tokens = probs.logits_XV.shape[1]
    shape = ChunkShape(num_tokens, probs.tuning)
    if rows_BJ.numel():
        kernel_verify.put_kernel[(rows_BJ.numel() * shape.num_half_tiles,)](
            *(probs.tensors(), store, lanes_B, active_B, rows_BJ),
            (probs.logits_XV.stride(0), num_tokens, shape.num_chunks, shape.num_half_tiles, rows_BJ.shape[1]),
            TILE=shape.half_tile,
            CHUNK=shape.chunk,
            num_warps=probs.tuning.num_warps,
        )


def draw_stored(store: Drafts, lanes_M: Tensor, uniforms_MJC: Tensor, *, tuning: Tuning = TUNING) -> Tensor:
    """Independent tokens [M, J, C] of the stored distributions of each draft J of some lanes."""
    probs: Probs
    if isinstance(store, PlainDraftProbs):
        probs = PlainProbs(probs_XV=store.probs_ZJV.flatten(0, 1))
        num_drafts = store.probs_ZJV.shape[1]
    else:
        stored = (tensor.flatten(0, 1) for tensor in store)
        probs = RowProbs(**dict(zip(FIELDS, stored, strict=True)), tuning=tuning)
        num_drafts = store.logits_ZJV.shape[1]
    drafts_J = torch.arange(num_drafts, device=lanes_M.device)
    rows_MJ = lanes_M[:, None] * num_drafts + drafts_J
    rows_MJC = rows_MJ[:, :, None].expand_as(uniforms_MJC)
    return draw(probs, rows_MJC.flatten(), uniforms_MJC.flatten()).view_as(rows_MJC)


def verify(
    probs: Probs,
    store: Drafts,
    tables: LayoutTables,
    *,
    lanes_B: Tensor,
    first_rows_B: Tensor,
    active_B: Tensor,
    drafts_ZJ: Tensor,
    tau_Z: Tensor,
    layout_Z: Tensor,
    uniforms_BJ: Tensor,
) -> Verdict:
    """Accept draft j while u * q < (1 + tau) * p, with p from row first + j and q from the store.

    `first_rows_B`: row of the pending token; `drafts_ZJ`, `layout_Z`, `lanes_B` int64, `active_B` bool,
    `tau_Z` and `uniforms_BJ` fp64 (at least J columns). `emit_and_draft` adds the last token."""
    assert uniforms_BJ.shape[1] >= drafts_ZJ.shape[1] and drafts_ZJ.is_contiguous(), f"{uniforms_BJ.shape=}"
    num_sequences, num_masks = len(lanes_B), drafts_ZJ.shape[1]
    assert tables.draft_rows_YAJ.shape[1:] == (num_masks + 1, num_masks), f"{tables.draft_rows_YAJ.shape=}"
    columns = (lanes_B, first_rows_B, active_B, drafts_ZJ, tau_Z, layout_Z)
    if isinstance(probs, PlainProbs):
        assert isinstance(store, PlainDraftProbs), f"{type(store)=}"
        return _plain_verify(probs, store, tables, columns, uniforms_BJ)
    assert isinstance(store, DraftProbs), f"{type(store)=}"
    import triton

    from idlm.kernels.sampling import kernel_verify

    ints: dict[str, Any] = {"dtype": torch.int64, "device": probs.logits_XV.device}
    values_FB = torch.empty(kernel_verify.NUM_VERDICT.value, num_sequences, **ints)
    token_ids_BA = torch.empty(num_sequences, num_masks + 1, **ints)
    draft_rows_BJ = torch.empty(num_sequences, num_masks, **ints)
    strides = (probs.logits_XV.stride(0), uniforms_BJ.stride(0))
    if num_sequences:
        kernel_verify.verify_kernel[(num_sequences,)](
            *(probs.tensors(), store, columns, tables, uniforms_BJ),
            (values_FB, token_ids_BA, draft_rows_BJ),
            (*strides, probs.logits_XV.shape[1], probs.masses_XC.shape[1], num_masks),
            num_sequences,
            MASKS=triton.next_power_of_2(max(1, num_masks)),
            CHUNK=ChunkShape(probs.logits_XV.shape[1], probs.tuning).chunk,
            num_warps=1,
        )
    return Verdict(values_FB, token_ids_BA, draft_rows_BJ, *values_FB)


def emit_and_draft(
    probs: Probs,
    store: Drafts,
    verdict: Verdict,
    *,
    lanes_B: Tensor,
    uniforms_BA: Tensor,
    drafts_ZJ: Tensor,
    layout_Z: Tensor,
    takes_best: bool = False,
) -> None:
    """Write the token after the accepted drafts into `verdict.token_ids_BA`, and the next drafts and layout
    of active sequences into their lanes (0 if there is no draft row).

    The token comes from normalise(max(0, p - q)) after a rejection (from p if that is zero), else from p, by
    the first column of `uniforms_BA`; the others are for the drafts. `takes_best`: drafts are the argmax
    instead of a draw, as in the published rule (lossy). Without drafts (J = 0) the layout stays."""
    assert uniforms_BA.shape[1] > drafts_ZJ.shape[1] and drafts_ZJ.is_contiguous(), f"{uniforms_BA.shape=}"
    state = (drafts_ZJ, layout_Z)
    if isinstance(probs, PlainProbs):
        assert isinstance(store, PlainDraftProbs), f"{type(store)=}"
        _plain_emit(probs, store, verdict, lanes_B, uniforms_BA[:, 0])
        _plain_drafts(probs, verdict, lanes_B, uniforms_BA[:, 1:], state, takes_best=takes_best)
        return
    assert isinstance(store, DraftProbs), f"{type(store)=}"
    from idlm.kernels.sampling import kernel_verify

    num_sequences, num_masks = verdict.draft_rows_BJ.shape
    num_tokens = probs.logits_XV.shape[1]
    shape = ChunkShape(num_tokens, probs.tuning)
    if num_sequences == 0:
        return
    excess_BC = torch.empty(num_sequences, shape.num_chunks, dtype=torch.float32, device=lanes_B.device)
    if num_masks:
        kernel_verify.residual_kernel[(num_sequences * shape.num_half_tiles,)](
            *(probs.tensors(), store, lanes_B, verdict.values_FB, excess_BC),
            (probs.logits_XV.stride(0), num_tokens, shape.num_chunks, shape.num_half_tiles, num_masks),
            num_sequences,
            TILE=shape.half_tile,
            CHUNK=shape.chunk,
            num_warps=probs.tuning.num_warps,
        )
    kernel_verify.emit_kernel[(num_sequences * (num_masks + 1),)](
        *(probs.tensors(), store),
        (verdict.values_FB, verdict.token_ids_BA, verdict.draft_rows_BJ),
        *(lanes_B, excess_BC, uniforms_BA, state),
        (probs.logits_XV.stride(0), uniforms_BA.stride(0), num_tokens, shape.num_chunks, num_masks),
        num_sequences,
        TAKES_BEST=takes_best,
        CHUNK=shape.chunk,
        CHUNKS=shape.chunks,
        num_warps=4,
    )


def _plain_verify(
    probs: PlainProbs,
    store: PlainDraftProbs,
    tables: LayoutTables,
    columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    uniforms_BJ: Tensor,
) -> Verdict:
    """`columns`: lanes_B, first_rows_B, active_B, drafts_ZJ, tau_Z, layout_Z."""
    lanes_B, first_B, active_B, drafts_ZJ, tau_Z, layout_Z = columns
    num_masks = drafts_ZJ.shape[1]
    depth_J = torch.arange(num_masks, device=lanes_B.device)
    layout_B = layout_Z[lanes_B]
    is_draft_BJ = (depth_J < tables.num_drafts_Y[layout_B][:, None]) & active_B[:, None]
    ids_BJ = torch.where(is_draft_BJ, drafts_ZJ[lanes_B], 0)
    p_BJ = probs.probs_XV[torch.where(is_draft_BJ, first_B[:, None] + depth_J, 0), ids_BJ]
    q_BJ = store.probs_ZJV[lanes_B[:, None], depth_J, ids_BJ]
    passes_BJ = uniforms_BJ[:, :num_masks] * q_BJ < (1.0 + tau_Z[lanes_B, None]) * p_BJ
    accepted_B = (passes_BJ & is_draft_BJ).long().cumprod(-1).sum(-1)
    return plain_verdict(accepted_B, tables, (lanes_B, first_B, active_B, drafts_ZJ, layout_Z))


def plain_verdict(
    accepted_B: Tensor, tables: LayoutTables, columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
) -> Verdict:
    """The verdict that accepts so many drafts of each sequence. `columns`: lanes_B, first_rows_B, active_B,
    drafts_ZJ, layout_Z."""
    lanes_B, first_B, active_B, drafts_ZJ, layout_Z = columns
    depth_J = torch.arange(drafts_ZJ.shape[1], device=lanes_B.device)
    layout_B = layout_Z[lanes_B]
    rejected_B = (accepted_B < torch.where(active_B, tables.num_drafts_Y[layout_B], 0)).long()
    rows_BJ = tables.draft_rows_YAJ[layout_B, accepted_B]
    is_row_BJ = (rows_BJ >= 0) & active_B[:, None]
    active = active_B.long()
    fields = (
        accepted_B,
        accepted_B + rejected_B,
        accepted_B + active,
        torch.where(active_B, first_B + accepted_B, -1),
        rejected_B,
        tables.next_layouts_YA[layout_B, accepted_B] * active,
    )
    accepted_ids_BJ = torch.where(depth_J < accepted_B[:, None], drafts_ZJ[lanes_B], 0)
    token_ids_BA = torch.nn.functional.pad(accepted_ids_BJ, (0, 1))
    values_FB = torch.stack(fields)
    draft_rows_BJ = torch.where(is_row_BJ, first_B[:, None] + rows_BJ, -1)
    return Verdict(values_FB, token_ids_BA, draft_rows_BJ, *values_FB)


def _plain_emit(
    probs: PlainProbs, store: PlainDraftProbs, verdict: Verdict, lanes_B: Tensor, uniforms_B: Tensor
) -> None:
    """One token per active sequence into `verdict.token_ids_BA`."""
    emit_rows_B, accepted_B = verdict.emit_rows_B, verdict.accepted_B
    probs_BV = probs.probs_XV[emit_rows_B.clamp(min=0)]
    index_R = torch.nonzero(verdict.rejected_B)[:, 0]
    if len(index_R):
        p_RV = probs_BV[index_R]
        excess_RV = (p_RV - store.probs_ZJV[lanes_B[index_R], accepted_B[index_R]]).clamp_(min=0.0)
        probs_BV[index_R] = excess_RV.where((excess_RV.sum(-1) > 0)[:, None], p_RV)
    ids_B = torch.where(emit_rows_B >= 0, invert(probs_BV, uniforms_B), 0)
    verdict.token_ids_BA.scatter_(1, accepted_B[:, None], ids_B[:, None])


def _plain_drafts(
    probs: PlainProbs,
    verdict: Verdict,
    lanes_B: Tensor,
    uniforms_BJ: Tensor,
    state: tuple[Tensor, Tensor],
    *,
    takes_best: bool,
) -> None:
    """The next drafts and layouts of active sequences, into `state` (drafts_ZJ, layout_Z)."""
    drafts_ZJ, layout_Z = state
    is_active_B = verdict.emit_rows_B >= 0
    lanes_b, rows_bJ = lanes_B[is_active_B], verdict.draft_rows_BJ[is_active_B]
    if takes_best:
        best_bJ = probs.probs_XV.argmax(-1)[rows_bJ.clamp(min=0)]
        drafts_ZJ[lanes_b] = torch.where(rows_bJ >= 0, best_bJ, 0)
    else:
        uniforms_bJ = uniforms_BJ[is_active_B, : rows_bJ.shape[1]]
        drafts_ZJ[lanes_b] = draw(probs, rows_bJ.flatten(), uniforms_bJ.flatten()).view(rows_bJ.shape)
    layout_Z[lanes_b] = verdict.next_layout_B[is_active_B]
