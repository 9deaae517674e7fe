"""The ops in plain torch with fp64 distributions in memory: what a CPU runs.

Arguments and results are those of launch.py.

Shapes: X, Y rows, V vocabulary, Z lanes, B sequences, J drafts, D draws; of masks W words of bits, M
sequences, A rows of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.sampling.types import LayoutTables, PlainDraftProbs, PlainProbs, Verdict

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def row_probs(
    logits_XV: Tensor,
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    lanes_B: Tensor | None,
    *,
    filters: bool,
    forbidden_id: int | None = None,
    own: bool = False,
) -> PlainProbs:
    """fp64 distributions; a filter that no row uses costs nothing."""
    if forbidden_id is not None:
        with torch.inference_mode():
            logits_XV[:, forbidden_id] = torch.finfo(logits_XV.dtype).min
    probs_XV = _warped_probs(logits_XV, settings, lanes_B, filters=filters)
    is_nonfinite_X = ~logits_XV.amax(-1).isfinite()
    return PlainProbs(
        probs_XV=probs_XV,
        is_nonfinite_X=is_nonfinite_X,
        own_XV=logits_XV.double().softmax(-1) if own else None,
        best_X=logits_XV.argmax(-1) if own else None,
    )


def _warped_probs(
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
    # Relative to the maximum: a tiny temperature then gives -inf for the others, and never inf - inf.
    probs_XV = logits_XV.double() - logits_XV.amax(-1, keepdim=True)
    if temperatures != {1.0}:
        divisor_X = torch.where(temperature_X == 0, 1.0, temperature_X) if has_greedy else temperature_X
        probs_XV /= divisor_X[:, None]
    if filters and max(top_k_X.tolist()) > 0:
        _drop_below_kth(probs_XV, logits_XV, top_k_X)
    probs_XV = probs_XV.softmax(-1)
    is_cut = False
    if filters and min(top_p_X.tolist()) < 1:
        probs_XV, is_cut = _keep_top_p(probs_XV, logits_XV, top_p_X), True
    if filters and max(min_p_X.tolist()) > 0:
        floor_X1 = (min_p_X * probs_XV.amax(-1))[:, None]
        probs_XV, is_cut = probs_XV.where(probs_XV >= floor_X1, 0.0), True
    if is_cut:
        probs_XV = probs_XV / probs_XV.sum(-1, keepdim=True)
    if has_greedy:
        best_X1 = logits_XV.argmax(-1, keepdim=True)
        one_hot_XV = torch.zeros_like(probs_XV).scatter_(-1, best_X1, 1.0)
        probs_XV = torch.where((temperature_X == 0)[:, None], one_hot_XV, probs_XV)
    return probs_XV


def _drop_below_kth(scaled_XV: Tensor, logits_XV: Tensor, top_k_X: Tensor) -> None:
    """Drop tokens in place; ties with the k-th stay. Compares logits: scaling may round two into one."""
    num_tokens = scaled_XV.shape[-1]
    is_on_X = (top_k_X > 0) & (top_k_X < num_tokens)
    if bool(is_on_X.any()):
        k_X = torch.where(is_on_X, top_k_X, 1)
        highest_XK = logits_XV.topk(int(k_X.max()), dim=-1).values
        kth_X1 = highest_XK.gather(-1, (k_X - 1)[:, None])
        scaled_XV.masked_fill_((logits_XV < kth_X1) & is_on_X[:, None], -torch.inf)


def _keep_top_p(probs_XV: Tensor, logits_XV: Tensor, top_p_X: Tensor) -> Tensor:
    # Sort by logits: at a large temperature the probabilities of different logits round into one.
    order_XV = logits_XV.sort(dim=-1, descending=True, stable=True).indices
    sorted_XV = probs_XV.gather(-1, order_XV)
    before_XV = sorted_XV.cumsum(-1) - sorted_XV
    keep_XV = (before_XV < top_p_X[:, None]) | (top_p_X[:, None] >= 1.0)
    keep_XV[:, 0] = True
    return probs_XV.where(torch.zeros_like(keep_XV).scatter_(-1, order_XV, keep_XV), 0.0)


def probability(probs: PlainProbs, rows: Tensor, token_ids: Tensor) -> Tensor:
    """fp64, shaped as `rows`."""
    return torch.where(rows >= 0, probs.probs_XV[rows.clamp(min=0), token_ids], 0.0)


def nonfinite(probs: PlainProbs, rows_BJ: Tensor) -> Tensor:
    """1 + the first position [B] with such logits, or 0."""
    assert probs.is_nonfinite_X is not None, "these probs were not computed from logits"
    is_nonfinite_BJ = (rows_BJ >= 0) & probs.is_nonfinite_X[rows_BJ.clamp(min=0)]
    return torch.where(is_nonfinite_BJ.any(-1), is_nonfinite_BJ.long().argmax(-1) + 1, 0)


def draw(probs: PlainProbs, rows_B: Tensor, uniforms_B: Tensor) -> Tensor:
    """Tokens [B]; 0 for row -1."""
    return torch.where(rows_B >= 0, _invert(probs.probs_XV[rows_B.clamp(min=0)], uniforms_B), 0)


def judged_draws(
    probs: PlainProbs,
    uniforms_X: Tensor,
    temperature: Tensor,
    lanes_B: Tensor | None,
    takes_best_X: Tensor | None,
    *,
    always_own: bool,
) -> tuple[Tensor, Tensor]:
    """Tokens and their probabilities [X]."""
    assert probs.own_XV is not None and probs.best_X is not None, "these probs lack the model's own"
    if lanes_B is not None:
        temperature = temperature[lanes_B].repeat_interleave(len(probs) // max(1, len(lanes_B)))
    ids_X = _invert(probs.probs_XV, uniforms_X)
    if takes_best_X is not None:
        ids_X = torch.where(takes_best_X, probs.best_X, ids_X)
    is_own_X = (temperature == 0) | always_own
    places_X1 = ids_X[:, None]
    probs_X, own_X = probs.probs_XV.gather(1, places_X1)[:, 0], probs.own_XV.gather(1, places_X1)[:, 0]
    return ids_X, torch.where(is_own_X, own_X, probs_X)


def entropy(probs: PlainProbs) -> Tensor:
    """Nats, fp64 [X]."""
    assert probs.own_XV is not None, "these probs lack the model's own"
    return torch.special.entr(probs.own_XV).sum(-1)


def _invert(probs_MV: Tensor, uniforms_M: Tensor) -> Tensor:
    """Inversion; a token of zero mass is never drawn. Rows need not sum to 1."""
    cumulative_MV = probs_MV.cumsum(-1)
    target_M1 = uniforms_M[:, None] * cumulative_MV[:, -1:]
    return (cumulative_MV <= target_M1).sum(-1)


def put(
    store: PlainDraftProbs, lanes_B: Tensor, probs: PlainProbs, rows_BJ: Tensor, active_B: Tensor
) -> None:
    """Copy rows of probabilities into their lanes."""
    place_M, draft_M = torch.nonzero((rows_BJ >= 0) & active_B[:, None], as_tuple=True)
    store.probs_ZJV[lanes_B[place_M], draft_M] = probs.probs_XV[rows_BJ[place_M, draft_M]]


def allowed_logits(logits_XV: Tensor, rows_Y: Tensor, bits_MW: Tensor, masks_Y: Tensor) -> Tensor:
    """Logits [Y, V]."""
    is_open_YV = allowed_tokens(bits_MW, logits_XV.shape[1])[masks_Y.clamp(min=0)] | (masks_Y < 0)[:, None]
    return logits_XV[rows_Y].masked_fill(~is_open_YV, -torch.inf)


def allowed_tokens(bits: Tensor, num_tokens: int) -> Tensor:
    """bool [..., V] of words [..., W]."""
    places = torch.arange(32, dtype=bits.dtype, device=bits.device)
    return (bits[..., None] >> places & 1).flatten(-2)[..., :num_tokens] > 0


def restrict(store: PlainDraftProbs, lanes_M: Tensor, bits_MAW: Tensor, only_MD: Tensor) -> None:
    """In place."""
    num_drafts, num_tokens = only_MD.shape[1], store.probs_ZJV.shape[2]
    q_MDV = store.probs_ZJV[lanes_M, :num_drafts] * allowed_tokens(bits_MAW[:, :num_drafts], num_tokens)
    mass_MD1 = q_MDV.sum(-1, keepdim=True)
    q_MDV = q_MDV / mass_MD1.where(mass_MD1 > 0, 1.0)
    one_MDV = torch.nn.functional.one_hot(only_MD.clamp(min=0), num_tokens).double()
    store.probs_ZJV[lanes_M, :num_drafts] = torch.where((only_MD >= 0)[..., None], one_MDV, q_MDV)


def verify(
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
    rejected_B = (accepted_B < is_draft_BJ.sum(-1)).long()
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
    accepted_ids_BJ = torch.where(depth_J < accepted_B[:, None], ids_BJ, 0)
    token_ids_BA = torch.nn.functional.pad(accepted_ids_BJ, (0, 1))
    values_FB = torch.stack(fields)
    draft_rows_BJ = torch.where(is_row_BJ, first_B[:, None] + rows_BJ, -1)
    return Verdict(values_FB, token_ids_BA, draft_rows_BJ, *values_FB)


def emit_and_draft(
    probs: PlainProbs,
    store: PlainDraftProbs,
    verdict: Verdict,
    lanes_B: Tensor,
    uniforms_BA: Tensor,
    state: tuple[Tensor, Tensor],
    *,
    takes_best: bool,
) -> None:
    """The token of `emit`, then the drafts of `draw_drafts`."""
    emit(probs, store, verdict, lanes_B, uniforms_BA[:, 0])
    draw_drafts(probs, verdict, lanes_B, uniforms_BA[:, 1:], state, takes_best=takes_best)


def emit(
    probs: PlainProbs, store: PlainDraftProbs, verdict: Verdict, lanes_B: Tensor, uniforms_B: Tensor
) -> None:
    """One token per active sequence into `verdict.token_ids_BA`."""
    emit_rows_B, accepted_B = verdict.emit_rows_B, verdict.accepted_B
    probs_BV = probs.probs_XV[emit_rows_B.clamp(min=0)]
    places_R = torch.nonzero(verdict.rejected_B)[:, 0]
    if len(places_R):
        p_RV = probs_BV[places_R]
        excess_RV = (p_RV - store.probs_ZJV[lanes_B[places_R], accepted_B[places_R]]).clamp_(min=0.0)
        probs_BV[places_R] = excess_RV.where((excess_RV.sum(-1) > 0)[:, None], p_RV)
    ids_B = torch.where(emit_rows_B >= 0, _invert(probs_BV, uniforms_B), 0)
    verdict.token_ids_BA.scatter_(1, accepted_B[:, None], ids_B[:, None])


def draw_drafts(
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


def uniforms(
    seeds: Tensor,
    samples: Tensor,
    steps: Tensor,
    lanes_B: Tensor | None,
    num_draws: int,
    *,
    steps_by_lane: bool = True,
) -> Tensor:
    """Philox4x32-10 (Salmon et al., SC 2011), the generator behind `tl.philox`: [B, num_draws], fp64.

    A number is a pure function of (request seed, sample index, sampling step, draw). Nothing is stored or
    advanced, so an answer cannot depend on the rest of the batch, on preemption or on the order of draws, and
    no number is used twice. All 64 bits of the seed are key.
    """
    if lanes_B is not None:
        seeds, samples = seeds[lanes_B], samples[lanes_B]
        steps = steps[lanes_B] if steps_by_lane else steps
    shape = (len(seeds), num_draws)
    counter = (
        torch.arange(num_draws, device=seeds.device).expand(shape),
        steps[:, None].expand(shape) & _WORD,
        (steps[:, None].expand(shape) >> 32) & _WORD,
        samples[:, None].expand(shape) & _WORD,
    )
    key = (seeds[:, None] & _WORD, (seeds[:, None] >> 32) & _WORD)
    return (philox4x32(counter, key)[0].double() + 0.5) * 2.0**-32


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four output words. All operands are int64 tensors that hold unsigned 32-bit words.

    Few operations, because launching one takes longer than the sums of a batch: words 0 and 2, which a round
    multiplies, are one tensor, and so are words 1 and 3. A product fills 64 bits, and its sign bit does not
    reach the bits that are taken.
    """
    multiplied, added = torch.stack(counter).unflatten(0, (2, 2)).unbind(1)
    keys = torch.stack(key)
    # Without a copy from the host, which a CUDA graph cannot hold.
    half = torch.arange(2, device=keys.device).view(2, *[1] * counter[0].dim())
    multipliers, steps = (first + half * (second - first) for first, second in (_MULTIPLIERS, _KEY_STEPS))
    for _ in range(_ROUNDS):
        product = (multiplied * multipliers).flip(0)
        multiplied = (product >> 32) & _WORD ^ added ^ keys
        added, keys = product & _WORD, (keys + steps) & _WORD
    return multiplied[0], added[0], multiplied[1], added[1]
