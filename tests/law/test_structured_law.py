"""The law of answers that match a grammar, against enumeration of the masked AR law; and planted faults.

6e3 draws of a schema of six tokens: `-m sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.errors import UserError
from idlm.infer.decoders import isd
from idlm.infer.state.sequence_state import SequenceState
from idlm.infer.structured import pass_grammars
from idlm.infer.structured.grammar import compute_bits
from idlm.infer.structured.pass_grammars import Follower
from idlm.kernels.sampling import allowed_logits
from idlm.kernels.sampling.types import PlainProbs
from idlm.semantics import Semantics
from tests.law.structured import (
    NUM_TOKENS,
    PIECES,
    SCHEMA_TOY,
    SETTINGS,
    build_engine,
    draw_fits,
    exact_law,
    write_structured_toy,
)

LEVEL = 1e-6
FULL, REDUCED, FAULTY = 6_000, 400, 600
CASES = [
    ("ar", {}),
    *(("isd", {"stride": n, "rejection_strategy": s}) for n, s in ((2, "cold"), (4, "tree"))),
]
BRANCH: dict[str, Any] = {"stride": 3, "rejection_strategy": "branch"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_structured_toy(tmp_path_factory.mktemp("structured_toy"))


@pytest.mark.sweep_but(options={"stride": 2, "rejection_strategy": "cold"})
@pytest.mark.parametrize(("decoder", "options"), [*CASES, ("isd", {**BRANCH, "graphs": "on"})])
def test_answers_follow_the_masked_ar_law(toy: Path, decoder: str, options: dict[str, Any]) -> None:
    """Two grammars under three settings, and an answer without a constraint, share every pass."""
    found = draw_fits(toy, build_engine(toy, decoder, **options), REDUCED)
    assert found.p_value >= LEVEL / 24, found
    assert decoder == "ar" or 0.3 < found.acceptance < 0.9, found.acceptance


@pytest.mark.sweep
def test_random_ids_in_place_of_masks_leave_the_masked_law(tmp_path: Path) -> None:
    directory = write_structured_toy(tmp_path)
    Semantics(noise_range=(0, len(PIECES)), stride=NUM_TOKENS).save(directory)
    found = draw_fits(directory, build_engine(directory, "isd", **BRANCH), REDUCED)
    assert found.p_value >= LEVEL / 24, found


@pytest.mark.sweep
def test_the_law_of_a_schema_in_full(toy: Path) -> None:
    """A mean relative shift of 13 % shows (probability 0.99 at `LEVEL`)."""
    schema = [params for params in SETTINGS if params.constraint == SCHEMA_TOY]
    found = draw_fits(toy, build_engine(toy, "isd", **BRANCH), FULL, settings=schema[:1])
    assert found.p_value >= LEVEL, found


def test_the_law_has_many_answers(toy: Path) -> None:
    """What is tested is not a few answers; and temperature and top-k come after the mask."""
    found = [exact_law(toy, params) for params in SETTINGS]
    assert [len(law) > 50 for law in found] == [True, True, False] * 2
    assert all(sum(law.values()) == pytest.approx(1.0) for law in found)


def _no_mask_on_p(patch: pytest.MonkeyPatch) -> None:
    """Mask on q only."""

    def allowed(logits_XV: Tensor, rows_Y: Tensor, bits_MW: Tensor, masks_Y: Tensor) -> Tensor:
        return logits_XV[rows_Y]

    patch.setattr(pass_grammars, "allowed_logits", allowed)


def _mask_after_the_filters(patch: pytest.MonkeyPatch) -> None:
    """Temperature, top-k and top-p see all logits; what a grammar forbids is removed from the result."""
    original, seen = SequenceState.probs, dict[str, Tensor]()

    def allowed(logits_XV: Tensor, rows_Y: Tensor, *bits: Tensor) -> Tensor:
        seen["all"] = logits_XV.clone()
        return allowed_logits(logits_XV, rows_Y, *bits)

    def probs(self: SequenceState, logits_XV: Tensor, lanes_B: Tensor, filters: bool) -> PlainProbs:
        fallback = original(self, logits_XV, lanes_B, filters)
        assert isinstance(fallback, PlainProbs)
        if "all" not in seen:
            return fallback
        found = original(self, seen.pop("all"), lanes_B, filters)
        assert isinstance(found, PlainProbs)
        kept_XV = found.probs_XV * (logits_XV > -torch.inf)
        mass_X1 = kept_XV.sum(-1, keepdim=True)
        return PlainProbs(
            probs_XV=torch.where(mass_X1 > 0, kept_XV / mass_X1.clamp(min=1e-300), fallback.probs_XV),
            is_nonfinite_X=found.is_nonfinite_X,
        )

    patch.setattr(SequenceState, "probs", probs)
    patch.setattr(pass_grammars, "allowed_logits", allowed)


def _state_one_token_late(patch: pytest.MonkeyPatch) -> None:
    def late(rows: Any, bits_YW: Tensor) -> None:
        branches = [(grammar.branch(), drafts, row) for grammar, drafts, row in rows]
        for branch, _, _ in branches:
            branch.matcher.rollback(1)
        compute_bits([each for each in branches if each[0].problem is None], bits_YW)

    patch.setattr(pass_grammars, "compute_bits", late)


def _one_state_for_all_drafts(patch: pytest.MonkeyPatch) -> None:
    """Every row of a sequence gets the mask of its first one."""

    def one_state(rows: Any, bits_YW: Tensor) -> None:
        compute_bits(rows, bits_YW)
        for _, drafts, row in rows:
            bits_YW[row : row + 1 + len(drafts)] = bits_YW[row].clone()

    patch.setattr(pass_grammars, "compute_bits", one_state)


def _drafts_tested_with_a_masked_q_but_drawn_without(patch: pytest.MonkeyPatch) -> None:
    """The first candidates stay the drafts, whether they fit or not."""
    patch.setattr(pass_grammars, "choose_drafts", _keep_what_fits)


def _keep_what_fits(followers: Sequence[Follower]) -> None:
    """The masks of p go as far as the first candidates fit, and the next one is rejected."""


def _masked_drafts_tested_with_the_q_without_a_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pass_grammars, "restrict", lambda *state: None)


def _certain_drafts_tested_with_q(patch: pytest.MonkeyPatch) -> None:
    """A draft that was taken because no candidate fits counts as a draw."""
    original = pass_grammars._first_that_fits
    patch.setattr(isd, "NUM_CANDIDATES", 1)
    patch.setattr(
        pass_grammars, "_first_that_fits", lambda *arrays: [(one, False) for one, _ in original(*arrays)]
    )


FAULTS = (
    _no_mask_on_p,
    _mask_after_the_filters,
    _state_one_token_late,
    _one_state_for_all_drafts,
    _drafts_tested_with_a_masked_q_but_drawn_without,
    _masked_drafts_tested_with_the_q_without_a_mask,
    _certain_drafts_tested_with_q,
)


@pytest.mark.sweep_but("_no_mask_on_p", "_state_one_token_late", "_one_state_for_all_drafts")
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_fault_is_caught(toy: Path, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the law, or by the grammar, which takes no token that does not fit."""
    plant(monkeypatch)
    engine = build_engine(toy, "isd", stride=4, rejection_strategy="tree")
    try:
        p_value = draw_fits(toy, engine, FAULTY, settings=SETTINGS[:3]).p_value
    except UserError as error:
        p_value = 0.0 if error.code == "IDLM-0478" else 1.0
    assert p_value < LEVEL / 24


@pytest.mark.sweep
def test_a_draft_without_a_mask_is_exact_too(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactness does not rest on the mask of q: drafts outside of the grammar are rejected."""
    monkeypatch.setattr(pass_grammars, "choose_drafts", _keep_what_fits)
    monkeypatch.setattr(pass_grammars, "restrict", lambda *state: None)
    found = draw_fits(toy, build_engine(toy, "isd", stride=4, rejection_strategy="tree"), REDUCED)
    assert found.p_value >= LEVEL / 24, found
    assert found.acceptance < 0.5


@pytest.mark.sweep
def test_the_law_with_few_candidates(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the drafts are often the highest token that fits, in passes that run ahead of their results."""
    monkeypatch.setattr(isd, "NUM_CANDIDATES", 2)
    options = {"rejection_strategy": "tree", "graphs": "on", "num_inflight_steps": 3}
    found = draw_fits(toy, build_engine(toy, "isd", stride=4, **options), REDUCED)
    assert found.p_value >= LEVEL / 24, found
