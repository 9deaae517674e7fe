"""The likeliest tokens of rows, and drafts drawn from their scores one after the other: plain torch on a
CPU, kernels on a GPU. Contract in README.md.

X rows, V vocabulary, M = B * J draft rows of B sequences, K candidates, W width of the tables, Z lanes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from idlm.kernels import backend
from idlm.kernels.sampling import DraftProbs, Drafts
from idlm.kernels.sampling.draws import invert
from idlm.kernels.sampling.probs import plain_row_probs
from idlm.kernels.sampling.types import TUNING, ChunkShape, PlainDraftProbs, Tuning

GROUP = 128
"""Tokens of which one program selects the likeliest; near the square root of V / K, which makes both launches
of `top_candidates` short."""
TILE = 32
"""Groups of one program."""
SMALLEST = torch.finfo(torch.float64).tiny


class Candidates(NamedTuple):
    """The K likeliest tokens of each row, in falling order: ids int64, logits fp32, both [M, K]."""

    ids_MK: Tensor
    logits_MK: Tensor


class Walk(NamedTuple):
    """What drafts are scored by. `previous_VW`, `candidate_VW`: tables A and B; `projected_MW`: H h of the
    draft rows; `anchors_B` int64: the token before the first draft of each sequence."""

    previous_VW: Tensor
    candidate_VW: Tensor
    projected_MW: Tensor
    anchors_B: Tensor


def top_candidates(logits_XV: Tensor, rows_M: Tensor, num: int) -> Candidates:
    """The `num` likeliest tokens of some rows, ties to the lower id; of row -1 anything."""
    num_rows, num_tokens = len(rows_M), logits_XV.shape[1]
    if not backend.has_kernels(logits_XV.device):
        chosen_MV = logits_XV[rows_M.clamp(min=0)].float()
        values_MV, ids_MV = chosen_MV.sort(dim=-1, descending=True, stable=True)
        return Candidates(ids_MV[:, :num].contiguous(), values_MV[:, :num].contiguous())
    import triton

    from idlm.kernels.draft_walk import kernel

    num_groups = triton.cdiv(num_tokens, GROUP)
    num_tiles = triton.cdiv(num_groups, TILE)
    largest_MG = torch.empty(num_rows, num_groups, dtype=torch.int64, device=logits_XV.device)
    ids_MK = torch.empty(num_rows, num, dtype=torch.int64, device=logits_XV.device)
    found = Candidates(ids_MK, torch.empty_like(ids_MK, dtype=torch.float32))
    sizes = (logits_XV.stride(0), num_tokens, num_groups)
    if num_rows:
        kernel.group_largest_kernel[(num_rows * num_tiles,)](
            *(logits_XV, rows_M, largest_MG, *sizes, num_tiles), GROUP=GROUP, GROUPS=TILE, num_warps=4
        )
        kernel.candidates_kernel[(num_rows,)](
            *(logits_XV, rows_M, largest_MG, found, *sizes),
            GROUP=GROUP,
            GROUPS=max(triton.next_power_of_2(num_groups), num),
            K=num,
            num_warps=8,
        )
    return found


def path_scores(
    previous_VW: Tensor,
    candidate_VW: Tensor,
    previous_M: Tensor,
    ids_MK: Tensor,
    logits_MK: Tensor,
    projected_MW: Tensor,
) -> Tensor:
    """Scores in fp32 [M, K] of candidates after the tokens `previous_M`, in plain torch."""
    query_MW = previous_VW[previous_M].float() * projected_MW.float()
    return logits_MK.float() + (candidate_VW[ids_MK].float() * query_MW[:, None]).sum(-1)


def walk(
    scored: Walk,
    candidates: Candidates,
    store: Drafts,
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    filters: bool,
    rows_BJ: Tensor,
    lanes_B: Tensor,
    uniforms_BJ: Tensor,
    drafts_ZJ: Tensor,
    tuning: Tuning = TUNING,
) -> None:
    """Draw the draft of every row of `rows_BJ` that is not -1 after the draft before it. Its lane holds the
    row's plain distribution (`sampling.put`), which becomes the one that the draft was drawn from.

    `settings` per lane and `filters`: as of `row_probs`. A lane without filters whose temperature is not 0
    keeps the tokens that are no candidates; the settings of the others apply to the scores of the candidates
    alone. The distribution is of the scores as the store keeps them."""
    if isinstance(store, PlainDraftProbs):
        _plain_walk(scored, candidates, store, settings, rows_BJ, lanes_B, uniforms_BJ, drafts_ZJ, filters)
        return
    assert isinstance(store, DraftProbs) and drafts_ZJ.is_contiguous(), f"{type(store)=}"
    if rows_BJ.numel():
        inputs = (candidates, store, settings, rows_BJ, lanes_B)
        _launch(scored, inputs, (uniforms_BJ, drafts_ZJ), filters=filters, tuning=tuning)


def _launch(
    scored: Walk,
    inputs: tuple[Candidates, DraftProbs, tuple[Tensor, ...], Tensor, Tensor],
    drawn: tuple[Tensor, Tensor],
    *,
    filters: bool,
    tuning: Tuning,
) -> None:
    """The three launches of `walk`; `drawn`: its numbers and its drafts."""
    import triton

    from idlm.kernels.draft_walk import kernel

    candidates, store, _, rows_BJ, _ = inputs
    num_sequences, num_drafts = rows_BJ.shape
    num_tokens, width = store.logits_ZJV.shape[2], scored.previous_VW.shape[1]
    shape, padded = ChunkShape(num_tokens, tuning), triton.next_power_of_2(width)
    scores_MK = torch.empty_like(candidates.logits_MK)
    products_MKW = scores_MK.new_empty(*scores_MK.shape, padded)
    sizes = (num_tokens, shape.num_chunks, num_drafts)
    constants = {
        "FILTERS": filters,
        "K": candidates.ids_MK.shape[1],
        "CHUNK": shape.chunk,
        "CHUNKS": shape.chunks,
    }
    kernel.rest_kernel[(num_sequences * num_drafts,)](
        scored, *inputs, products_MKW, *sizes, width, WIDTH=padded, **constants, num_warps=8
    )
    kernel.walk_kernel[(num_sequences,)](
        *(scored, *inputs, *drawn, scores_MK, products_MKW, drawn[0].stride(0), *sizes, width),
        WIDTH=padded,
        **constants,
        num_warps=4,
        # Scores are compared with their own copies in other lanes.
        **backend.rounds_as_written(),
    )
    kernel.put_scores_kernel[(num_sequences * num_drafts,)](
        *inputs, scores_MK, *sizes, **constants, num_warps=4
    )


def _plain_walk(
    scored: Walk,
    candidates: Candidates,
    store: PlainDraftProbs,
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    rows_BJ: Tensor,
    lanes_B: Tensor,
    uniforms_BJ: Tensor,
    drafts_ZJ: Tensor,
    filters: bool,
) -> None:
    shape, num_tokens = (*rows_BJ.shape, -1), store.probs_ZJV.shape[2]
    ids_BJK, logits_BJK = candidates.ids_MK.view(shape), candidates.logits_MK.view(shape)
    projected_BJW, previous_B = scored.projected_MW.view(shape), scored.anchors_B
    for j in range(rows_BJ.shape[1]):
        b = torch.nonzero(rows_BJ[:, j] >= 0)[:, 0]
        ids_bK, logits_bK, lanes_b = ids_BJK[b, j], logits_BJK[b, j], lanes_B[b]
        rows = ids_bK, logits_bK, projected_BJW[b, j]
        scores_bK = path_scores(scored.previous_VW, scored.candidate_VW, previous_B[b], *rows)
        own_bK = plain_row_probs(scores_bK, settings, lanes_b, filters=filters).probs_XV
        plain_bV, keeps_b1 = store.probs_ZJV[lanes_b, j], _keeps_rest(settings, lanes_b, num_tokens, filters)
        # Weights relative to the likeliest token, which is the first candidate.
        rest_bV = (plain_bV / plain_bV.amax(-1, keepdim=True)).scatter(1, ids_bK, 0.0) * keeps_b1
        rest_b1 = rest_bV.sum(-1, keepdim=True)
        temperature_b1 = settings[0][lanes_b, None].where(keeps_b1, 1.0)
        gained_bK = (scores_bK - logits_bK[:, :1]).double() / temperature_b1
        share_b1 = (gained_bK.logsumexp(-1, keepdim=True) - rest_b1.log()).sigmoid()
        rest_bV *= (1 - share_b1) / rest_b1.clamp(min=SMALLEST)
        chosen_b = invert(torch.cat((own_bK * share_b1, rest_bV), 1), uniforms_BJ[b, j])
        num = ids_bK.shape[1]
        own_b1 = ids_bK.gather(1, chosen_b.clamp(max=num - 1)[:, None])
        drafts_b = own_b1[:, 0].where(chosen_b < num, chosen_b - num)
        store.probs_ZJV[lanes_b, j] = rest_bV.scatter(1, ids_bK, own_bK * share_b1)
        drafts_ZJ[lanes_b, j] = drafts_b
        previous_B = previous_B.index_copy(0, b, drafts_b)


def _keeps_rest(
    settings: tuple[Tensor, Tensor, Tensor, Tensor], lanes_b: Tensor, num_tokens: int, filters: bool
) -> Tensor:
    """Whether the tokens that are no candidates stay drafts of these lanes, bool [b, 1]."""
    temperature_b, top_k_b, top_p_b, min_p_b = (setting[lanes_b] for setting in settings)
    is_filtered_b = ((top_k_b > 0) & (top_k_b < num_tokens)) | (top_p_b < 1) | (min_p_b > 0)
    return ((temperature_b != 0) & ~(is_filtered_b & filters))[:, None]
