"""Two decoding steps through the sampling ops, checked against the definition, for tests on any device.

X rows, V vocabulary, B sequences, J drafts, Z lanes, D draws."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from idlm.kernels.sampling import (
    DraftProbs,
    Drafts,
    LayoutTables,
    RowProbs,
    Tuning,
    Verdict,
    draft_probs,
    emit_and_draft,
    put,
    row_probs,
    verify,
)
from tests.kernels.cases.sampling import (
    SLACK,
    Case,
    all_probs,
    check_draws,
    make_case,
    poisoned,
    random_tables,
)
from tests.kernels.references.sampling import dense_probs, residual_reference, verify_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """State of the lanes and one batch over them."""

    tables: LayoutTables
    store: Drafts
    lanes_B: Tensor
    active_B: Tensor
    first_B: Tensor
    drafts_ZJ: Tensor
    layout_Z: Tensor
    tau_Z: Tensor


def run_steps(
    draw: random.Random,
    *,
    num_tokens: int,
    device: str = "cpu",
    tuning: Tuning,
    sizes: tuple[int, int] | None = None,
    count: int = 3,
) -> None:
    """A step that only drafts, then `count` - 1 steps that verify; with padding rows and inactive sequences.

    `sizes`: sequences and masks. Half of the runs have no filters and many rejections."""
    num_sequences, num_masks = sizes or (draw.randint(1, 6), draw.choice([0, 1, 3, 7]))
    width = 2 * num_masks + 1
    num_lanes = num_sequences + 2
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    dtype = draw.choice([torch.float32, torch.bfloat16])
    state = Step(
        tables=random_tables(draw, num_masks, width, device=device),
        store=draft_probs(
            num_lanes, num_masks, num_tokens, dtype=dtype, device=torch.device(device), tuning=tuning
        ),
        lanes_B=torch.randperm(num_lanes, generator=generator)[:num_sequences].to(device),
        active_B=(torch.rand(num_sequences, generator=generator) < 0.8).to(device),
        first_B=torch.arange(num_sequences, device=device) * width,
        drafts_ZJ=torch.zeros(num_lanes, num_masks, dtype=torch.int64, device=device),
        layout_Z=torch.zeros(num_lanes, dtype=torch.int64, device=device),
        tau_Z=torch.full((num_lanes,), draw.choice([0.0, 0.3]), dtype=torch.float64, device=device),
    )
    state.tables.num_drafts_Y[0] = 0
    base = make_case(draw, num_lanes, num_tokens, device=device)
    if draw.random() < 0.5:
        temperature_Z, top_k_Z, top_p_Z, min_p_Z = (torch.zeros_like(column) for column in base.settings)
        base = replace(base, settings=(temperature_Z + 1, top_k_Z, top_p_Z + 1, min_p_Z))
    shared_V = 2 * torch.randn(num_tokens, generator=generator)
    for _ in range(count):
        noise_XV = torch.randn(num_sequences * width, num_tokens, generator=generator)
        logits_XV = (shared_V + draw.choice([0.3, 1.0]) * noise_XV).to(device=device, dtype=dtype)
        uniforms_BD = torch.rand(num_sequences, width + 2, generator=generator, dtype=torch.float64)
        _step(state, logits_XV, base, uniforms_BD.to(device), tuning)


def _step(state: Step, logits_XV: Tensor, base: Case, uniforms_BD: Tensor, tuning: Tuning) -> None:
    num_masks, width = state.drafts_ZJ.shape[1], len(logits_XV) // len(state.lanes_B)
    is_padding_X = (~state.active_B).repeat_interleave(width)
    fed_XV = poisoned(logits_XV.masked_fill(is_padding_X[:, None], torch.nan), padding_rows=0)
    probs = row_probs(fed_XV, *base.settings, filters=base.has_filters, lanes_B=state.lanes_B, tuning=tuning)
    p_XV = all_probs(probs, len(logits_XV))
    q_ZJV = stored_probs(state.store, tuning)
    before = (state.drafts_ZJ.clone(), state.layout_Z.clone(), q_ZJV.clone())
    verdict = verify(
        probs,
        state.store,
        state.tables,
        lanes_B=state.lanes_B,
        first_rows_B=state.first_B,
        active_B=state.active_B,
        drafts_ZJ=state.drafts_ZJ,
        tau_Z=state.tau_Z,
        layout_Z=state.layout_Z,
        uniforms_BJ=uniforms_BD,
    )
    drafted = replace(state, drafts_ZJ=before[0], layout_Z=before[1])
    lanes = {"lanes_B": state.lanes_B}
    held = {"drafts_ZJ": state.drafts_ZJ, "layout_Z": state.layout_Z}
    uniforms_BA = uniforms_BD[:, num_masks:]
    emit_and_draft(probs, state.store, verdict, **lanes, **held, uniforms_BA=uniforms_BA)
    _check_verdict(drafted, verdict, p_XV, q_ZJV, uniforms_BD)
    put(state.store, state.lanes_B, probs, verdict.draft_rows_BJ, active_B=state.active_B)
    kept_ZJV = stored_probs(state.store, tuning)
    _check_lanes(state, verdict, p_XV, (*before, kept_ZJV), uniforms_BD[:, num_masks + 1 :])


def stored_probs(store: Drafts, tuning: Tuning | None) -> Tensor:
    """The stored probabilities [Z, J, V]; `tuning` of the kernels, where they stored them."""
    if not isinstance(store, DraftProbs):
        return store.probs_ZJV.clone()
    assert tuning is not None
    logits_XV, numbers_XF, masses_XC = (tensor.flatten(0, 1) for tensor in store)
    rows = RowProbs(logits_XV=logits_XV, numbers_XF=numbers_XF, masses_XC=masses_XC, tuning=tuning)
    return dense_probs(rows).view_as(store.logits_ZJV)


def _check_verdict(state: Step, verdict: Verdict, p_XV: Tensor, q_ZJV: Tensor, uniforms_BD: Tensor) -> None:
    num_masks = state.drafts_ZJ.shape[1]
    for b, lane in enumerate(state.lanes_B.tolist()):
        values = verdict.values_FB[:, b].tolist()
        if not state.active_B[b]:
            assert values == [0, 0, 0, -1, 0, 0], f"{values=}"
            assert not verdict.token_ids_BA[b].any() and (verdict.draft_rows_BJ[b] == -1).all()
            continue
        layout, first = int(state.layout_Z[lane]), int(state.first_B[b])
        num_drafts = int(state.tables.num_drafts_Y[layout])
        drafts = state.drafts_ZJ[lane, :num_drafts].tolist()
        p_JV, q_JV = p_XV[first : first + num_drafts].tolist(), q_ZJV[lane, :num_drafts].tolist()
        accepted = verify_reference(
            p_JV, q_JV, drafts, uniforms_BD[b].tolist()[:num_drafts], float(state.tau_Z[lane])
        )
        rejected = int(accepted < num_drafts)
        following = int(state.tables.next_layouts_YA[layout, accepted])
        expected = [accepted, accepted + rejected, accepted + 1, first + accepted, rejected, following]
        assert values == expected, f"{values=} {expected=}"
        assert verdict.token_ids_BA[b, :accepted].tolist() == drafts[:accepted]
        assert not verdict.token_ids_BA[b, accepted + 1 :].any()
        probs = p_XV[first + accepted].tolist()
        if rejected:
            probs = residual_reference(probs, q_JV[accepted])
        probs_1V = torch.tensor([probs], dtype=torch.float64, device=p_XV.device)
        token_1 = verdict.token_ids_BA[b, accepted][None]
        check_draws(token_1, probs_1V, uniforms_BD[b, num_masks][None])
        rows = [
            row + first if row >= 0 else -1 for row in state.tables.draft_rows_YAJ[layout, accepted].tolist()
        ]
        assert verdict.draft_rows_BJ[b].tolist() == rows


def _check_lanes(
    state: Step, verdict: Verdict, p_XV: Tensor, stored: tuple[Tensor, ...], uniforms_BJ: Tensor
) -> None:
    """Active lanes hold the new drafts and their probabilities; all other lanes are unchanged.

    `stored`: drafts, layouts and probabilities before, and the probabilities now."""
    drafts_ZJ, layout_Z, q_ZJV, kept_ZJV = (tensor.clone() for tensor in stored)
    for b, lane in enumerate(state.lanes_B.tolist()):
        if not state.active_B[b]:
            continue
        layout_Z[lane] = verdict.next_layout_B[b]
        for index, row in enumerate(verdict.draft_rows_BJ[b].tolist()):
            drafts_ZJ[lane, index] = state.drafts_ZJ[lane, index] if row >= 0 else 0
            if row >= 0:
                q_ZJV[lane, index] = p_XV[row]
                check_draws(drafts_ZJ[lane, index][None], p_XV[row][None], uniforms_BJ[b, index][None])
    assert torch.equal(state.drafts_ZJ, drafts_ZJ) and torch.equal(state.layout_Z, layout_Z)
    assert not q_ZJV.numel() or float((kept_ZJV - q_ZJV).abs().max()) <= SLACK
