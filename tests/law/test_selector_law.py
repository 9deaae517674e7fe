"""The sampling law with a selector of drafts, which is random here: the AR law, as without one.

By default few draws of one case; every strategy: `-m "sweep or not sweep"`. Four of the five tokens are
candidates, so that the fifth keeps its logit, and q never draws it under filters."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from idlm.infer.decoders.selector import MaskRows, PathSelector
from idlm.kernels.sampling import put
from idlm.kernels.sampling.types import PlainDraftProbs
from tests.adapters import add_selector, write_adapter
from tests.law.harness import (
    MASK_ID,
    NEUTRAL,
    NUM_TOKENS,
    PROMPT,
    VOCAB,
    assert_fits,
    build_engine,
    change_modes,
    fits,
    misfits,
    sample,
)
from tests.law.structured import PIECES, REGEX_TOY, SETTINGS, draw_fits, write_structured_toy
from tests.law.structured import build_engine as build_structured_engine

LEVEL = 1e-6 / 64
WIDTH = 8
WARPED = (
    (PROMPT, replace(NEUTRAL, temperature=0.7)),
    (PROMPT, NEUTRAL),
    (PROMPT, replace(NEUTRAL, temperature=1.3)),
    (PROMPT, replace(NEUTRAL, temperature=1.3, top_p=0.8, top_k=3)),
)
STRATEGY_CASES = [(4, "tree"), (4, "alternate"), (2, "cold"), (3, "branch"), (5, "branch_3")]


@pytest.fixture(scope="module")
def selected(law_toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("selected") / "toy"
    shutil.copytree(law_toy, directory)
    return add_selector(directory, vocab_size=VOCAB, width=WIDTH)


@pytest.mark.sweep_but("4-tree")
@pytest.mark.parametrize(("stride", "strategy"), STRATEGY_CASES)
def test_a_selector_leaves_the_law(law_toy: Path, selected: Path, stride: int, strategy: str) -> None:
    engine = build_engine(selected, "isd", stride=stride, rejection_strategy=strategy)
    sampled = sample(engine, WARPED, 3_000)
    assert_fits(law_toy, sampled, LEVEL)
    assert 0.2 < sampled.acceptance < 0.9, sampled.acceptance


@pytest.mark.sweep
def test_a_selector_leaves_the_law_while_modes_change(law_toy: Path, selected: Path) -> None:
    """The last commit decides the mode."""
    engine = build_engine(selected, "isd", stride=4, adaptive=True)
    change_modes(engine)
    assert_fits(law_toy, sample(engine, WARPED, 3_000), LEVEL)


@pytest.mark.sweep
def test_a_selector_beside_an_adapter_leaves_the_law(law_toy: Path, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", law_toy, mask_token_id=MASK_ID, stride=NUM_TOKENS, size=0.7)
    add_selector(directory, vocab_size=VOCAB, width=WIDTH)
    assert_fits(law_toy, sample(build_engine(directory, "isd", stride=4), WARPED, 3_000), LEVEL)


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("options", [{"stride": 3, "rejection_strategy": "branch"}, {"stride": 4}], ids=str)
def test_structured_answers_follow_the_masked_law(tmp_path: Path, options: dict[str, Any]) -> None:
    """Drafts that do not fit are replaced; those after them were drawn after the first candidates."""
    toy = add_selector(write_structured_toy(tmp_path / "toy"), vocab_size=len(PIECES), width=WIDTH)
    settings = [one for one in SETTINGS if one.constraint == REGEX_TOY]
    found = draw_fits(toy, build_structured_engine(toy, "isd", **options), 400, settings=settings)
    assert found.p_value >= LEVEL, found


Draw = Callable[..., None]


def _q_before_the_selector(
    draw: Draw, self: PathSelector, table: Any, batch: Any, rows: MaskRows, *state: Any
) -> None:
    draw(self, table, batch, rows, *state)
    probs = table.probs(rows.wanted.logits(), batch.lanes_B, batch.filters)
    active_B = rows.rows_BJ.amax(1) >= 0
    put(state[0], batch.lanes_B, probs, rows.rows_BJ, active_B=active_B)


def _q_after_another_token(
    draw: Draw, self: PathSelector, table: Any, batch: Any, rows: MaskRows, *state: Any
) -> None:
    draw(self, table, batch, rows, *state)
    drafts_ZJ = state[1].clone()
    draw(self, table, batch, replace(rows, anchors_B=(rows.anchors_B + 1) % VOCAB), *state)
    state[1].copy_(drafts_ZJ)


def _no_q_outside_of_the_candidates(
    draw: Draw, self: PathSelector, table: Any, batch: Any, rows: MaskRows, *state: Any
) -> None:
    """The test and the residual miss what drafts have on the token that is no candidate."""
    draw(self, table, batch, rows, *state)
    store = state[0]
    assert isinstance(store, PlainDraftProbs)
    others_BJ1 = rows.logits_XV[rows.rows_BJ.clamp(min=0)].argmin(-1, keepdim=True)
    store.probs_ZJV[batch.lanes_B] = store.probs_ZJV[batch.lanes_B].scatter(-1, others_BJ1, 0.0)


def _a_number_of_the_test(
    draw: Draw, self: PathSelector, table: Any, batch: Any, rows: MaskRows, *state: Any
) -> None:
    """The next step's test would need another number: here drafts share that of the emitted token."""
    num_drafts = rows.uniforms_BJ.shape[1]
    first_B1 = table.uniforms(batch.lanes_B, num_drafts + 1)[:, num_drafts:]
    draw(self, table, batch, replace(rows, uniforms_BJ=first_B1.expand(-1, num_drafts)), *state)


FAULTS = (
    _q_before_the_selector,
    _q_after_another_token,
    _no_q_outside_of_the_candidates,
    _a_number_of_the_test,
)


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_caught(
    law_toy: Path, selected: Path, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = PathSelector.draw
    monkeypatch.setattr(PathSelector, "draw", lambda self, *args: fault(draw, self, *args))
    engine = build_engine(selected, "isd", stride=4, rejection_strategy="branch")
    assert misfits(fits(law_toy, sample(engine, WARPED[1:2], 10_000)), 1e-8)
