"""The sampling law with drafts that are looked up in the sequence itself: the AR law, as without them.

By default few draws of one case; every strategy: `-m "sweep or not sweep"`. Of five tokens the last one
nearly always occurred before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from idlm.infer.decoders import isd
from idlm.infer.decoders.isd import IsdDecoder
from idlm.infer.state.batch import StepPlan
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.sampling.types import PlainDraftProbs
from tests.law.harness import NEUTRAL, Setting, assert_fits, build_engine, change_modes, fits, misfits, sample
from tests.law.structured import build_engine as build_structured_engine
from tests.law.structured import draw_fits, write_structured_toy

LEVEL = 1e-6 / 64
PROMPT = (1, 3, 1)
SETTINGS: tuple[Setting, ...] = (
    (PROMPT, NEUTRAL),
    (PROMPT, replace(NEUTRAL, temperature=0.6, top_k=3)),
    (PROMPT, replace(NEUTRAL, temperature=1.3, top_p=0.8)),
)
STRATEGY_CASES = [(4, "tree"), (4, "alternate"), (2, "cold"), (3, "branch"), (5, "branch_3")]


@pytest.mark.sweep_but("4-tree")
@pytest.mark.parametrize(("stride", "strategy"), STRATEGY_CASES)
def test_looked_up_drafts_leave_the_law(law_toy: Path, stride: int, strategy: str) -> None:
    engine = build_engine(law_toy, "isd", stride=stride, rejection_strategy=strategy, prompt_lookup_min=1)
    sampled = sample(engine, SETTINGS, 3_000)
    assert_fits(law_toy, sampled, LEVEL)
    assert 0.1 < sampled.acceptance < 0.6, sampled.acceptance


@pytest.mark.sweep
@pytest.mark.parametrize("minimum", [1, 2])
def test_looked_up_drafts_leave_the_law_while_modes_change(law_toy: Path, minimum: int) -> None:
    """The last commit decides the mode; a request of one token per pass stays one."""
    engine = build_engine(law_toy, "isd", stride=4, adaptive=True, prompt_lookup_min=minimum)
    change_modes(engine)
    single = replace(NEUTRAL, temperature=0.8, decoder_options={"stride": 1})
    assert_fits(law_toy, sample(engine, [*SETTINGS, (PROMPT, single)], 3_000), LEVEL)


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("options", [{"stride": 3, "rejection_strategy": "branch"}, {"stride": 4}], ids=str)
def test_structured_answers_follow_the_masked_law(tmp_path: Path, options: dict[str, Any]) -> None:
    """What the grammar does not allow is no draft."""
    toy = write_structured_toy(tmp_path / "toy")
    engine = build_structured_engine(toy, "isd", prompt_lookup_min=1, **options)
    found = draw_fits(toy, engine, 400)
    assert found.p_value >= LEVEL, found


Patch = pytest.MonkeyPatch


def _the_models_q(patch: Patch) -> None:
    """A looked-up draft is tested as if it were drawn from the mask's distribution."""
    original = isd.look_up

    def look_up(tokens_ZL: Tensor, num_known_Z: Tensor, store: PlainDraftProbs, **options: Any) -> Tensor:
        probs_ZJV = store.probs_ZJV.clone()
        is_found_B = original(tokens_ZL, num_known_Z, store, **options)
        store.probs_ZJV.copy_(probs_ZJV)
        return is_found_B

    patch.setattr(isd, "look_up", look_up)


def _where_the_next_test_would_pass(patch: Patch) -> None:
    """Whether a lookup counts follows a number of the next test."""
    _choose(patch, lambda decoder, table, plan: table.uniforms(plan.lanes_B, 1)[:, 0] < 0.5)


def _where_the_drafts_are_unwanted(patch: Patch) -> None:
    """Whether a lookup counts follows the draft that it replaces."""
    _choose(patch, lambda decoder, table, plan: decoder.drafts_ZJ[plan.lanes_B, 0] < 2)


def _a_residual_with_the_token(patch: Patch) -> None:
    """A rejection draws from p, the rejected token included."""
    original = isd.emit_and_draft

    def emit_and_draft(probs: Any, store: PlainDraftProbs, *args: Any, **options: Any) -> None:
        is_certain_ZJ1 = store.probs_ZJV.amax(-1, keepdim=True) == 1
        nothing = PlainDraftProbs(probs_ZJV=store.probs_ZJV.where(~is_certain_ZJ1, 0.0))
        original(probs, nothing, *args, **options)

    patch.setattr(isd, "emit_and_draft", emit_and_draft)


def _choose(patch: Patch, chosen: Callable[[IsdDecoder, SequenceState, StepPlan], Tensor]) -> None:
    original = IsdDecoder._look_up

    def look_up(self: IsdDecoder, table: SequenceState, plan: StepPlan) -> Tensor:
        plan = replace(plan, samples_B=plan.samples_B & chosen(self, table, plan))
        return original(self, table, plan)

    patch.setattr(IsdDecoder, "_look_up", look_up)


FAULTS = (
    _the_models_q,
    _where_the_next_test_would_pass,
    _where_the_drafts_are_unwanted,
    _a_residual_with_the_token,
)


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_caught(law_toy: Path, fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    engine = build_engine(law_toy, "isd", stride=4, rejection_strategy="branch", prompt_lookup_min=1)
    assert misfits(fits(law_toy, sample(engine, SETTINGS[:1], 10_000)), 1e-8)
