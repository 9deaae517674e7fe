"""The sampling ops on a CPU against their definition; their kernels compiled."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from idlm.kernels.sampling import (
    LayoutTables,
    Tuning,
    allowed_logits,
    draft_probs,
    draw,
    emit_and_draft,
    judged_draws,
    nonfinite,
    put,
    restrict,
    row_probs,
    uniforms,
    verify,
)
from idlm.kernels.sampling.types import PlainDraftProbs, PlainProbs
from tests.kernels.cases.sampling import all_probs, check_judged, check_nonfinite, check_probs, make_case
from tests.kernels.cases.sampling_bits import check_allowed, check_restrict
from tests.kernels.cases.sampling_steps import run_steps
from tests.kernels.hopper_compiler import compiled_launches
from tests.kernels.references.sampling import (
    draw_reference,
    emitted_reference,
    probs_reference,
    residual_reference,
)

CPU = torch.device("cpu")
QWEN3_VOCABULARY = 151_936


def plain_probs(*arguments: torch.Tensor) -> torch.Tensor:
    probs = row_probs(*arguments, filters=True)
    assert isinstance(probs, PlainProbs)
    return probs.probs_XV


@pytest.mark.parametrize("seed", range(8))
def test_probabilities_equal_the_reference(seed: int) -> None:
    case = make_case(random.Random(seed), 12, [1, 2, 37, 200][seed % 4])
    check_probs(plain_probs(case.logits_XV, *case.settings), case, probs_reference)


def test_settings_come_from_lanes() -> None:
    case = make_case(random.Random(3), 6, 40)
    lanes_B = torch.tensor([4, 0])
    probs = row_probs(case.logits_XV, *case.settings, filters=True, lanes_B=lanes_B)
    lanes_X = torch.tensor([4, 4, 4, 0, 0, 0])
    expected = plain_probs(case.logits_XV, *(column[lanes_X] for column in case.settings))
    assert torch.equal(all_probs(probs, 6), expected)


def test_draws_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    probs_XV = torch.rand(60, 9, generator=generator, dtype=torch.float64)
    probs_XV = probs_XV.where(torch.rand(60, 9, generator=generator) < 0.6, 0.0)
    probs_XV[:, 4] += 0.01
    probs_XV /= probs_XV.sum(-1, keepdim=True)
    uniforms_X = torch.rand(60, generator=generator, dtype=torch.float64)
    ids_X = draw(PlainProbs(probs_XV=probs_XV), torch.arange(60), uniforms_X)
    expected = [
        draw_reference(probs, u) for probs, u in zip(probs_XV.tolist(), uniforms_X.tolist(), strict=True)
    ]
    assert ids_X.tolist() == expected
    assert draw(PlainProbs(probs_XV=probs_XV), torch.full((2,), -1), uniforms_X[:2]).tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(6))
def test_judged_draws(seed: int) -> None:
    check_judged(random.Random(seed), 2 * (seed % 4 + 1), [2, 11, 37][seed % 3], device="cpu")


@pytest.mark.parametrize("seed", range(6))
def test_nonfinite_rows_are_reported(seed: int) -> None:
    check_nonfinite(random.Random(seed), 2 * (seed % 4 + 1), [1, 11, 37][seed % 3], device="cpu")


@pytest.mark.parametrize("seed", range(6))
def test_steps(seed: int) -> None:
    run_steps(random.Random(seed), num_tokens=[2, 11, 37][seed % 3], tuning=Tuning())


@pytest.mark.parametrize("seed", range(6))
def test_masks_of_tokens(seed: int) -> None:
    num_tokens = [1, 11, 37, 64][seed % 4]
    check_allowed(random.Random(seed), num_tokens)
    check_restrict(random.Random(seed), num_tokens, tuning=Tuning(), num_drafts=seed % 3 + 1)


def one_draft(p_V: torch.Tensor, q_V: torch.Tensor, num_sequences: int) -> dict[str, Any]:
    """Arguments for `num_sequences` sequences with one draft each, p at row 0 and q in every lane."""
    lanes = torch.arange(num_sequences)
    store = draft_probs(num_sequences, 1, len(p_V), dtype=torch.float32, device=CPU)
    assert isinstance(store, PlainDraftProbs)
    store.probs_ZJV[:] = q_V
    tables = LayoutTables(
        num_drafts_Y=torch.tensor([1]),
        draft_rows_YAJ=torch.full((1, 2, 1), -1),
        next_layouts_YA=torch.zeros(1, 2, dtype=torch.int64),
    )
    zeros = torch.zeros_like(lanes)
    return {
        "probs": PlainProbs(probs_XV=torch.stack([p_V, p_V])),
        "store": store,
        "tables": tables,
        "lanes_B": lanes,
        "first_rows_B": zeros,
        "active_B": torch.ones(num_sequences, dtype=torch.bool),
        "tau_Z": torch.zeros(num_sequences, dtype=torch.float64),
        "layout_Z": zeros,
    }


def state_of(arguments: dict[str, Any], drafts_ZJ: torch.Tensor) -> dict[str, torch.Tensor]:
    names = ("lanes_B", "layout_Z")
    return {name: arguments[name] for name in names} | {"drafts_ZJ": drafts_ZJ.clone()}


@pytest.mark.parametrize("seed", range(5))
def test_the_emitted_distribution_is_p_by_enumeration(seed: int) -> None:
    """The threshold at which each draft is accepted, and the ends of each token's share of the residual."""
    case = make_case(random.Random(seed), 2, 9)
    p_V, q_V = plain_probs(case.logits_XV, *(column[[0, 0]] for column in case.settings))
    drafts_V = torch.arange(9)
    accept_V = (p_V / q_V.where(q_V > 0, 1.0)).clamp(max=1.0)
    for factor, is_accepted_V in ((1 - 1e-9, p_V > 0), (1 + 1e-9, (p_V > 0) & (accept_V == 1))):
        arguments = one_draft(p_V, q_V, 9)
        verdict = verify(
            **arguments,
            drafts_ZJ=drafts_V[:, None],
            uniforms_BJ=(accept_V * factor).clamp(max=1 - 1e-9)[:, None],
        )
        is_drawn_V = q_V > 0
        assert torch.equal((verdict.accepted_B == 1)[is_drawn_V], is_accepted_V[is_drawn_V])
    residual_V = torch.tensor(residual_reference(p_V.tolist(), q_V.tolist()), dtype=torch.float64)
    ends_V = residual_V.cumsum(-1)
    for token in torch.nonzero(residual_V > 1e-9)[:, 0].tolist():
        inside = torch.stack([ends_V[token] - residual_V[token] + 1e-10, ends_V[token] - 1e-10])
        arguments = one_draft(p_V, q_V, 2)
        drafts = (p_V - q_V).argmin().expand(2)[:, None]
        verdict = verify(
            **arguments, drafts_ZJ=drafts.contiguous(), uniforms_BJ=torch.full((2, 1), 1 - 1e-12).double()
        )
        if not verdict.rejected_B.all():
            assert torch.allclose(p_V, q_V)
            continue
        emit_and_draft(
            arguments["probs"],
            arguments["store"],
            verdict,
            **state_of(arguments, drafts),
            uniforms_BA=inside.clamp(1e-12, 1 - 1e-12)[:, None].expand(-1, 2),
        )
        assert verdict.token_ids_BA[:, 0].tolist() == [token, token]
    assert (emitted_reference(p_V[None], q_V[None]) - p_V).abs().max() <= 1e-12


def test_a_residual_without_mass_is_p() -> None:
    p_V = torch.tensor([0.0, 0.25, 0.75]).double()
    arguments = one_draft(p_V, p_V, 3)
    drafts_ZJ = torch.zeros(3, 1, dtype=torch.int64)
    verdict = verify(**arguments, drafts_ZJ=drafts_ZJ, uniforms_BJ=torch.rand(3, 1))
    assert verdict.rejected_B.all()
    emit_and_draft(
        arguments["probs"],
        arguments["store"],
        verdict,
        **state_of(arguments, drafts_ZJ),
        uniforms_BA=torch.tensor([0.1, 0.26, 0.99]).double()[:, None].expand(-1, 2),
    )
    assert verdict.token_ids_BA[:, 0].tolist() == [1, 2, 2]


def test_lanes_of_inactive_sequences_stay_as_they_are_even_when_padding_shares_a_lane() -> None:
    probs_XV = torch.eye(4).double()
    store = draft_probs(3, 1, 4, dtype=torch.float32, device=CPU)
    lanes_B, active_B = torch.tensor([1, 1, 2]), torch.tensor([True, False, False])
    probs = PlainProbs(probs_XV=probs_XV)
    put(store, lanes_B, probs, torch.tensor([[3], [0], [1]]), active_B=active_B)
    assert isinstance(store, PlainDraftProbs)
    assert store.probs_ZJV[:, 0].tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_the_published_rule_drafts_the_best_token() -> None:
    arguments = one_draft(torch.tensor([0.3, 0.3, 0.4]).double(), torch.tensor([1.0, 0, 0]).double(), 1)
    arguments["tables"].draft_rows_YAJ[:] = 0
    drafts_ZJ = torch.zeros(1, 1, dtype=torch.int64)
    verdict = verify(**arguments, drafts_ZJ=drafts_ZJ, uniforms_BJ=torch.rand(1, 1))
    emit_and_draft(
        arguments["probs"],
        arguments["store"],
        verdict,
        lanes_B=arguments["lanes_B"],
        layout_Z=arguments["layout_Z"],
        drafts_ZJ=drafts_ZJ,
        uniforms_BA=torch.tensor([[0.1, 0.1]]).double(),
        takes_best=True,
    )
    assert drafts_ZJ.tolist() == [[2]]


def run_a_step(dtype: torch.dtype) -> None:
    """Every launch of one step of Qwen3's size, on tensors that are never read."""
    tuning = Tuning()
    ints, floats = (
        torch.zeros(2, dtype=torch.int64, device="meta"),
        torch.ones(2, dtype=torch.float64, device="meta"),
    )
    lanes_B, active_B = ints[:1], torch.ones(1, dtype=torch.bool, device="meta")
    logits_XV = torch.empty(7, QWEN3_VOCABULARY, dtype=dtype, device="meta")
    settings = (floats, ints, floats, floats)
    uniforms_BD = uniforms(ints, ints, ints, 7, lanes_B=lanes_B)
    judges = row_probs(
        logits_XV, *settings, filters=False, lanes_B=lanes_B, tuning=tuning, forbidden_id=5, own=True
    )
    judged_draws(judges, uniforms_BD[0], floats, lanes_B=lanes_B)
    probs = row_probs(logits_XV, *settings, filters=True, lanes_B=lanes_B, tuning=tuning)
    store = draft_probs(2, 3, QWEN3_VOCABULARY, dtype=dtype, device=torch.device("meta"))
    tables = LayoutTables(
        num_drafts_Y=ints,
        draft_rows_YAJ=ints.new_empty(2, 4, 3),
        next_layouts_YA=ints.new_empty(2, 4),
    )
    drafts_ZJ = ints.new_empty(2, 3)
    lane = {"lanes_B": lanes_B, "drafts_ZJ": drafts_ZJ, "layout_Z": ints}
    verdict = verify(
        probs,
        store,
        tables,
        **lane,
        active_B=active_B,
        first_rows_B=lanes_B,
        tau_Z=floats,
        uniforms_BJ=uniforms_BD,
    )
    emit_and_draft(probs, store, verdict, **lane, uniforms_BA=uniforms_BD[:, 3:])
    put(store, lanes_B, probs, verdict.draft_rows_BJ, active_B=active_B)
    draw(probs, lanes_B, uniforms_BD[:, 0])
    nonfinite(probs, verdict.draft_rows_BJ)
    bits_MW = ints.new_empty(4, QWEN3_VOCABULARY // 32, dtype=torch.int32)
    allowed_logits(logits_XV, ints, bits_MW, ints)
    restrict(store, lanes_B, bits_MW[None], drafts_ZJ[:1], tuning=tuning)


@pytest.mark.sweep
def test_every_launch_of_a_step_compiles_for_hopper() -> None:
    names = [name for name, _ in compiled_launches(lambda: run_a_step(torch.bfloat16))]
    assert len(names) > len(set(names)) == 13, "some kernels have variants"
