"""The ops in plain torch with fp64 laws in memory: what a CPU runs. Same arguments and results as launch.py.

Shapes: X rows, V vocabulary, Z lanes, B sequences, J drafts, D draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.sampling.laws import LayoutTables, PlainDraftLaws, PlainLaws, Verdict


def row_laws(
    logits_XV: Tensor,
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    lanes_B: Tensor | None,
    *,
    filters: bool,
    forbidden_id: int | None = None,
    own: bool = False,
) -> PlainLaws:
    """fp64 laws; a filter that no row uses costs nothing."""
    if forbidden_id is not None:
        with torch.inference_mode():
            logits_XV[:, forbidden_id] = torch.finfo(logits_XV.dtype).min
    law_XV = _laws(logits_XV, settings, lanes_B, filters=filters)
    is_lawless_X = ~logits_XV.amax(-1).isfinite()
    if not own:
        return PlainLaws(law_XV=law_XV, is_lawless_X=is_lawless_X)
    return PlainLaws(
        law_XV=law_XV,
        is_lawless_X=is_lawless_X,
        own_XV=logits_XV.double().softmax(-1),
        best_X=logits_XV.argmax(-1),
    )


def _laws(
    logits_XV: Tensor,
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    lanes_B: Tensor | None,
    *,
    filters: bool,
) -> Tensor:
    num_rows = len(logits_XV)
    if lanes_B is not None:
        repeats = num_rows // max(1, len(lanes_B))
        lanes_X = lanes_B.repeat_interleave(repeats)
        settings = (settings[0][lanes_X], settings[1][lanes_X], settings[2][lanes_X], settings[3][lanes_X])
    temperature_X, top_k_X, top_p_X, min_p_X = settings
    if num_rows == 0:
        return logits_XV.double()
    temperatures = set(temperature_X.tolist())
    has_greedy = 0.0 in temperatures
    # From the maximum down: a tiny temperature then gives -inf for the others, and never inf - inf.
    law_XV = logits_XV.double() - logits_XV.amax(-1, keepdim=True)
    if temperatures != {1.0}:
        divisor_X = torch.where(temperature_X == 0, 1.0, temperature_X) if has_greedy else temperature_X
        law_XV /= divisor_X[:, None]
    if filters and max(top_k_X.tolist()) > 0:
        _drop_below_kth(law_XV, logits_XV, top_k_X)
    law_XV = law_XV.softmax(-1)
    is_cut = False
    if filters and min(top_p_X.tolist()) < 1:
        law_XV, is_cut = _keep_top_p(law_XV, logits_XV, top_p_X), True
    if filters and max(min_p_X.tolist()) > 0:
        floor_X1 = (min_p_X * law_XV.amax(-1))[:, None]
        law_XV, is_cut = law_XV.where(law_XV >= floor_X1, 0.0), True
    if is_cut:
        law_XV = law_XV / law_XV.sum(-1, keepdim=True)
    if has_greedy:
        best_X1 = logits_XV.argmax(-1, keepdim=True)
        one_hot_XV = torch.zeros_like(law_XV).scatter_(-1, best_X1, 1.0)
        law_XV = torch.where((temperature_X == 0)[:, None], one_hot_XV, law_XV)
    return law_XV


def _drop_below_kth(scaled_XV: Tensor, logits_XV: Tensor, top_k_X: Tensor) -> None:
    """In place; ties with the k-th stay. By the logits: scaling may round two into one."""
    num_tokens = scaled_XV.shape[-1]
    is_on_X = (top_k_X > 0) & (top_k_X < num_tokens)
    if bool(is_on_X.any()):
        k_X = torch.where(is_on_X, top_k_X, 1)
        highest_XK = logits_XV.topk(int(k_X.max()), dim=-1).values
        kth_X1 = highest_XK.gather(-1, (k_X - 1)[:, None])
        scaled_XV.masked_fill_((logits_XV < kth_X1) & is_on_X[:, None], -torch.inf)


def _keep_top_p(law_XV: Tensor, logits_XV: Tensor, top_p_X: Tensor) -> Tensor:
    # In the order of the logits: at a large temperature probabilities of different logits round into one.
    order_XV = logits_XV.sort(dim=-1, descending=True, stable=True).indices
    sorted_XV = law_XV.gather(-1, order_XV)
    before_XV = sorted_XV.cumsum(-1) - sorted_XV
    keep_XV = (before_XV < top_p_X[:, None]) | (top_p_X[:, None] >= 1.0)
    keep_XV[:, 0] = True
    return law_XV.where(torch.zeros_like(keep_XV).scatter_(-1, order_XV, keep_XV), 0.0)


def probability(laws: PlainLaws, rows: Tensor, token_ids: Tensor) -> Tensor:
    """fp64, shaped as `rows`."""
    return torch.where(rows >= 0, laws.law_XV[rows.clamp(min=0), token_ids], 0.0)


def lawless(laws: PlainLaws, rows_BJ: Tensor) -> Tensor:
    """1 + the first place [B], or 0."""
    assert laws.is_lawless_X is not None, "laws that are not those of logits"
    is_lawless_BJ = (rows_BJ >= 0) & laws.is_lawless_X[rows_BJ.clamp(min=0)]
    return torch.where(is_lawless_BJ.any(-1), is_lawless_BJ.long().argmax(-1) + 1, 0)


def draw(laws: PlainLaws, rows_B: Tensor, uniforms_B: Tensor) -> Tensor:
    """Tokens [B]; 0 for row -1."""
    return torch.where(rows_B >= 0, _invert(laws.law_XV[rows_B.clamp(min=0)], uniforms_B), 0)


def judged_draws(
    laws: PlainLaws,
    uniforms_X: Tensor,
    temperature: Tensor,
    lanes_B: Tensor | None,
    takes_best_X: Tensor | None,
    *,
    always_own: bool,
) -> tuple[Tensor, Tensor]:
    """Tokens and their probabilities [X]."""
    assert laws.own_XV is not None and laws.best_X is not None, "laws that do not know the model's own"
    if lanes_B is not None:
        temperature = temperature[lanes_B].repeat_interleave(len(laws) // max(1, len(lanes_B)))
    ids_X = _invert(laws.law_XV, uniforms_X)
    if takes_best_X is not None:
        ids_X = torch.where(takes_best_X, laws.best_X, ids_X)
    is_own_X = (temperature == 0) | always_own
    places_X1 = ids_X[:, None]
    law_X, own_X = laws.law_XV.gather(1, places_X1)[:, 0], laws.own_XV.gather(1, places_X1)[:, 0]
    return ids_X, torch.where(is_own_X, own_X, law_X)


def entropy(laws: PlainLaws) -> Tensor:
    """Nats, fp64 [X]."""
    assert laws.own_XV is not None, "laws that do not know the model's own"
    return torch.special.entr(laws.own_XV).sum(-1)


def _invert(law_MV: Tensor, uniforms_M: Tensor) -> Tensor:
    """Inversion; a token of zero mass is never drawn. Rows need not sum to 1."""
    cumulative_MV = law_MV.cumsum(-1)
    target_M1 = uniforms_M[:, None] * cumulative_MV[:, -1:]
    return (cumulative_MV <= target_M1).sum(-1)


def put(store: PlainDraftLaws, lanes_B: Tensor, laws: PlainLaws, rows_BJ: Tensor, active_B: Tensor) -> None:
    """Copy laws into their lanes."""
    place_M, draft_M = torch.nonzero((rows_BJ >= 0) & active_B[:, None], as_tuple=True)
    store.laws_ZJV[lanes_B[place_M], draft_M] = laws.law_XV[rows_BJ[place_M, draft_M]]


def verify(
    laws: PlainLaws,
    store: PlainDraftLaws,
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
    p_BJ = laws.law_XV[torch.where(is_draft_BJ, first_B[:, None] + depth_J, 0), ids_BJ]
    q_BJ = store.laws_ZJV[lanes_B[:, None], depth_J, ids_BJ]
    passes_BJ = uniforms_BJ[:, :num_masks] * q_BJ < (1.0 + tau_Z[lanes_B, None]) * p_BJ
    accepted_B = (passes_BJ & is_draft_BJ).long().cumprod(-1).sum(-1)
    rejected_B = (accepted_B < is_draft_BJ.sum(-1)).long()
    rows_BJ = tables.draft_rows_YAJ[layout_B, accepted_B]
    is_row_BJ = (rows_BJ >= 0) & active_B[:, None]
    active = active_B.long()
    values = (
        accepted_B,
        accepted_B + rejected_B,
        accepted_B + active,
        torch.where(active_B, first_B + accepted_B, -1),
        rejected_B,
        tables.next_layouts_YA[layout_B, accepted_B] * active,
    )
    accepted_ids_BJ = torch.where(depth_J < accepted_B[:, None], ids_BJ, 0)
    return Verdict(
        values_FB=torch.stack(values),
        token_ids_BA=torch.nn.functional.pad(accepted_ids_BJ, (0, 1)),
        draft_rows_BJ=torch.where(is_row_BJ, first_B[:, None] + rows_BJ, -1),
    )


def emit(
    laws: PlainLaws, store: PlainDraftLaws, verdict: Verdict, lanes_B: Tensor, uniforms_B: Tensor
) -> None:
    """One token per active sequence into `verdict.token_ids_BA`."""
    emit_rows_B, accepted_B = verdict.emit_rows_B, verdict.accepted_B
    law_BV = laws.law_XV[emit_rows_B.clamp(min=0)]
    places_R = torch.nonzero(verdict.rejected_B)[:, 0]
    if len(places_R):
        p_RV = law_BV[places_R]
        excess_RV = (p_RV - store.laws_ZJV[lanes_B[places_R], accepted_B[places_R]]).clamp_(min=0.0)
        law_BV[places_R] = excess_RV.where((excess_RV.sum(-1) > 0)[:, None], p_RV)
    ids_B = torch.where(emit_rows_B >= 0, _invert(law_BV, uniforms_B), 0)
    verdict.token_ids_BA.scatter_(1, accepted_B[:, None], ids_B[:, None])


def draw_drafts(
    laws: PlainLaws,
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
        best_bJ = laws.law_XV.argmax(-1)[rows_bJ.clamp(min=0)]
        drafts_ZJ[lanes_b] = torch.where(rows_bJ >= 0, best_bJ, 0)
    else:
        uniforms_bJ = uniforms_BJ[is_active_B, : rows_bJ.shape[1]]
        drafts_ZJ[lanes_b] = draw(laws, rows_bJ.flatten(), uniforms_bJ.flatten()).view(rows_bJ.shape)
    layout_Z[lanes_b] = verdict.next_layout_B[is_active_B]
