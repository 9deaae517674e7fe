"""The law of answers that match a grammar, against enumeration of the masked AR law; and planted faults.

1e5 draws of a schema of six tokens: `-m slow`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.quality.structured_law import (
    SCHEMA_TOY,
    SETTINGS,
    build_engine,
    draw_fits,
    exact_law,
    write_structured_toy,
)
from idlm.errors import UserError
from idlm.infer.decoders import isd
from idlm.infer.state.sequence_state import SequenceState
from idlm.infer.structured import masks
from idlm.infer.structured.grammar import Grammar
from idlm.infer.structured.masks import Branches, PassGrammars
from idlm.kernels.sampling.types import PlainProbs

LEVEL = 1e-6
FULL, REDUCED, FAULTY = 100_000, 400, 600
CASES = [
    ("ar", {}),
    *(("isd", {"stride": n, "rejection_strategy": s}) for n, s in ((2, "cold"), (4, "tree"))),
]
BRANCH: dict[str, Any] = {"stride": 3, "rejection_strategy": "branch"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_structured_toy(tmp_path_factory.mktemp("structured_toy"))


@pytest.mark.parametrize(("decoder", "options"), [*CASES, ("isd", {**BRANCH, "graphs": "on"})])
def test_answers_follow_the_masked_ar_law(toy: Path, decoder: str, options: dict[str, Any]) -> None:
    """Two grammars under three settings, and an answer without a constraint, share every pass."""
    found = draw_fits(toy, build_engine(toy, decoder, **options), REDUCED)
    assert found.p_value >= LEVEL / 24, found
    assert decoder == "ar" or 0.3 < found.acceptance < 0.9, found.acceptance


@pytest.mark.slow
@pytest.mark.parametrize(("decoder", "options"), [CASES[2], ("isd", BRANCH)])
def test_the_law_of_a_schema_in_full(toy: Path, decoder: str, options: dict[str, Any]) -> None:
    schema = [params for params in SETTINGS if params.constraint == SCHEMA_TOY]
    found = draw_fits(toy, build_engine(toy, decoder, **options), FULL, settings=schema[:1])
    assert found.p_value >= LEVEL, found


def test_the_law_has_many_answers(toy: Path) -> None:
    """What is tested is not a few answers; and temperature and top-k come after the mask."""
    found = [exact_law(toy, params) for params in SETTINGS]
    assert [len(law) > 50 for law in found] == [True, True, False] * 2
    assert all(sum(law.values()) == pytest.approx(1.0) for law in found)


def _no_mask_on_p(patch: pytest.MonkeyPatch) -> None:
    """Mask on q only."""
    patch.setattr(isd, "masked", lambda grammars, *rest: masks.masked(None, *rest))


def _mask_after_the_filters(patch: pytest.MonkeyPatch) -> None:
    """Temperature, top-k and top-p see all logits; what a grammar forbids is removed from the result."""
    original = SequenceState.probs

    def probs(self: SequenceState, logits_XV: Tensor, lanes_B: Tensor, filters: bool) -> PlainProbs:
        is_open_XV = logits_XV > -torch.inf
        unmasked_XV = seen.get("logits", logits_XV) if len(lanes_B) != len(logits_XV) else logits_XV
        found = original(self, unmasked_XV, lanes_B, filters)
        assert isinstance(found, PlainProbs)
        kept_XV = found.probs_XV * is_open_XV
        mass_X1 = kept_XV.sum(-1, keepdim=True)
        fallback_XV = original(self, logits_XV, lanes_B, filters).probs_XV
        return PlainProbs(
            probs_XV=torch.where(mass_X1 > 0, kept_XV / mass_X1.clamp(min=1e-300), fallback_XV),
            is_nonfinite_X=found.is_nonfinite_X,
        )

    seen: dict[str, Tensor] = {}

    def masked(grammars: PassGrammars | None, logits_XV: Tensor, *rest: Any) -> Any:
        seen["logits"] = logits_XV.clone()
        return masks.masked(grammars, logits_XV, *rest)

    patch.setattr(SequenceState, "probs", probs)
    patch.setattr(isd, "masked", masked)


def _state_one_token_late(patch: pytest.MonkeyPatch) -> None:
    original = Grammar.branch

    def branch(self: Grammar) -> Grammar:
        found = original(self)
        before = original(found)
        return before if before.matcher.rollback(1) and before.problem is None else found

    patch.setattr(Grammar, "branch", branch)


def _one_state_for_all_drafts(patch: pytest.MonkeyPatch) -> None:
    """Every row of a sequence gets the mask of its first one."""
    original = masks._bits

    def bits(branches: Any, device: torch.device) -> Tensor:
        rows = [0]
        for _, drafts in branches:
            rows += [rows[-1] + 1 + len(drafts)]
        bits_YC = original(branches, device)
        for start, end in zip(rows, rows[1:]):
            bits_YC[start:end] = bits_YC[start]
        return bits_YC

    patch.setattr(masks, "_bits", bits)


def _drafts_tested_with_a_masked_q_but_drawn_without(patch: pytest.MonkeyPatch) -> None:
    """The store has the masked q, and the drafts are those drawn before it."""
    original = isd.IsdDecoder._draft_again

    def draft_again(self: isd.IsdDecoder, *state: Any) -> None:
        drafts_ZJ = self.drafts_ZJ.clone()
        original(self, *state)
        self.drafts_ZJ.copy_(drafts_ZJ)

    patch.setattr(isd.IsdDecoder, "_draft_again", draft_again)


def _masked_drafts_tested_with_the_q_without_a_mask(patch: pytest.MonkeyPatch) -> None:
    """The drafts are drawn from the masked q, and the store has the other one."""
    original = isd.IsdDecoder._draft_again

    def draft_again(self: isd.IsdDecoder, *state: Any) -> None:
        probs_ZJV = self.draft_probs.probs_ZJV.clone()
        original(self, *state)
        self.draft_probs.probs_ZJV.copy_(probs_ZJV)

    patch.setattr(isd.IsdDecoder, "_draft_again", draft_again)


FAULTS = (
    _no_mask_on_p,
    _mask_after_the_filters,
    _state_one_token_late,
    _one_state_for_all_drafts,
    _drafts_tested_with_a_masked_q_but_drawn_without,
    _masked_drafts_tested_with_the_q_without_a_mask,
)


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


def test_a_draft_without_a_mask_is_exact_too(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactness does not rest on the mask of q: drafts outside of the grammar are rejected."""
    monkeypatch.setattr(isd.IsdDecoder, "_draft_again", lambda *_: None)
    found = draw_fits(toy, build_engine(toy, "isd", stride=4, rejection_strategy="tree"), REDUCED)
    assert found.p_value >= LEVEL / 24, found
    assert found.acceptance < 0.5


def test_branches_of_no_sequence_go_nowhere() -> None:
    assert Branches({}).pushed({}).places == []
