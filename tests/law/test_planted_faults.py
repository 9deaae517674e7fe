"""Every planted fault fails the check that guards against it, and the unchanged engine passes.

The checks are those of test_engine_law, test_greedy_parity, test_scheduler_soak and test_layouts, smaller.
test_engine_law checks the law of the unchanged engine with these settings in one batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from idlm.contracts import SamplingParams
from idlm.infer.decoders.isd import IsdDecoder
from idlm.infer.decoders.rejection import STRATEGIES, layouts
from idlm.infer.state.batch import Batch, StepPlan
from idlm.infer.state.sequence_state import SequenceState
from tests.contracts.engines import (
    CYCLE,
    MASK_ID,
    answers,
    greedy,
    prompts_of,
    write_converted_toy,
    write_foreseeing_toy,
)
from tests.contracts.engines import build_engine as build_small_engine
from tests.contracts.test_layouts import assert_rows_see_their_prefix
from tests.law.faults import FAULTS, Fault, fault
from tests.law.harness import NEUTRAL, PROMPT, Setting, build_engine, fits, misfits, sample

STRIDE = 4
LEVEL = 1e-8
SETTINGS: tuple[Setting, ...] = (
    (PROMPT, NEUTRAL),
    (PROMPT, replace(NEUTRAL, temperature=0.6, top_k=3)),
    (PROMPT, replace(NEUTRAL, temperature=1.5, top_p=0.8)),
)
LOOKS = 1_000, 6_000
"""Draws of each setting. Most faults show in few; only what passes those is drawn in full."""
CHECKS = ("law", "greedy", "repeat", "preempt", "layout")


@fault("law", "alternate")
def drafts_left_out_by_what_they_are(patch: pytest.MonkeyPatch) -> None:
    """How many drafts a pass tests may follow the past alone: here, not the first draft itself."""
    original = IsdDecoder.plan

    def plan(self: IsdDecoder, table: SequenceState, batch: Batch) -> StepPlan:
        is_left_out_Z = self.drafts_ZJ[:, 0] < 2
        self.draft_buffer_Z.masked_fill_(is_left_out_Z, 0)
        return original(self, table, batch)

    patch.setattr(IsdDecoder, "plan", plan)


@fault("law", "halves")
def half_chosen_by_the_drafts(patch: pytest.MonkeyPatch) -> None:
    """The half of a sequence may follow earlier passes: here, the second draft, which one half leaves out."""
    original = IsdDecoder._halve

    def halve(self: IsdDecoder, batch: Batch) -> None:
        self.score_Z.copy_(self.drafts_ZJ[:, 1] < 2)
        original(self, batch)

    patch.setattr(IsdDecoder, "_halve", halve)


@pytest.fixture(scope="session")
def foreseeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("toys")
    write_converted_toy(home / "converted")
    return write_foreseeing_toy(home / "foreseeing")


def _law_holds(law_toy: Path, strategy: str) -> bool:
    options = {"adaptive": True} if strategy == "halves" else {"rejection_strategy": strategy}
    engine = build_engine(law_toy, "isd", num_lanes=512, stride=STRIDE, **options)
    if strategy == "halves":
        halved = [number for number, mode in enumerate(engine.decoder.modes) if mode.narrow is not None]
        engine._stride_controller.choose = lambda load: halved[0]
    looks = (sample(engine, SETTINGS, num_draws, per_request=50) for num_draws in LOOKS)
    return not any(misfits(fits(law_toy, sampled), LEVEL) for sampled in looks)


def _greedy_agrees(foreseeing: Path, strategy: str) -> bool:
    """On the trained toy, where runs are accepted, and on a random one, where every key matters."""
    for checkpoint, vocab_size in ((foreseeing, CYCLE), (foreseeing.parent / "converted", MASK_ID)):
        prompts = prompts_of([21, 7, 14, 1, 28, 8, 3], vocab_size=vocab_size)
        expected = build_small_engine(checkpoint, "ar").generate(prompts, greedy(max_tokens=24))
        engine = build_small_engine(
            checkpoint, "isd", stride=STRIDE, rejection_strategy=strategy, max_num_batched_tokens=6
        )
        if answers(engine.generate(prompts, greedy(max_tokens=24))) != answers(expected):
            return False
    return True


def _drawn(checkpoint: Path, strategy: str, rounds: int, **options: int) -> list[list[tuple[int, ...]]]:
    prompts = prompts_of([5, 1, 17, 8, 3, 12, 20, 2, 9, 6], vocab_size=CYCLE)
    params = [SamplingParams(max_tokens=20, seed=i) for i in range(len(prompts))]
    engine = build_small_engine(checkpoint, "isd", stride=STRIDE, rejection_strategy=strategy, **options)
    drawn = [[c.token_ids for c in engine.generate(prompts, params)] for _ in range(rounds)]
    assert ("num_pages" in options) == (engine.scheduler.num_preemptions > 0)
    return drawn


def _repeats(checkpoint: Path, strategy: str) -> bool:
    """The same seeds again on used lanes, and on a single lane."""
    first, second = _drawn(checkpoint, strategy, 2, max_num_seqs=3)
    return first == second == _drawn(checkpoint, strategy, 1, max_num_seqs=1)[0]


def _survives_preemption(checkpoint: Path, strategy: str) -> bool:
    """With pages that the prefix cache still has, and without."""
    expected = _drawn(checkpoint, strategy, 1)
    return all(
        _drawn(checkpoint, strategy, 1, num_pages=20, prefix_cache=prefix_cache) == expected
        for prefix_cache in (True, False)
    )


def _layouts_are_right(strategy: str) -> bool:
    try:
        assert_rows_see_their_prefix(layouts(strategy, num_masks=STRIDE - 1, max_drafts=STRIDE - 1))
    except AssertionError:
        return False
    return True


def _passes(check: str, strategy: str, law_toy: Path, foreseeing: Path) -> bool:
    if check == "law":
        return _law_holds(law_toy, strategy)
    if check == "layout":
        return _layouts_are_right(strategy)
    by_name = {"greedy": _greedy_agrees, "repeat": _repeats, "preempt": _survives_preemption}
    try:
        return by_name[check](foreseeing, strategy)
    except AssertionError as caught:
        # The engine itself may detect that its counts do not agree with the device.
        if "decoded nothing" not in str(caught):
            raise
        return False


@pytest.mark.sweep_but(
    "layout-branch",
    "layout-cold",
    "layout-alternate",
    "layout-tree",
    "preempt-branch",
    "greedy-branch",
    "repeat-branch",
)
@pytest.mark.parametrize("strategy", STRATEGIES.names())
@pytest.mark.parametrize("check", [check for check in CHECKS if check != "law"])
def test_the_engine_as_it_is_passes(check: str, strategy: str, law_toy: Path, foreseeing: Path) -> None:
    assert _passes(check, strategy, law_toy, foreseeing)


@pytest.mark.sweep
def test_halves_keep_the_law(law_toy: Path) -> None:
    assert _law_holds(law_toy, "halves")


@pytest.mark.sweep_but(
    "tree_masks_see_the_fill_drafts",
    "prompt_chunk_taken_for_a_decoding_step",
    "chain_rows_see_the_masks_behind_them",
    "verify_positions_off_by_one",
    "bonus_token_from_the_row_before",
    "verify_row_off_by_one",
    "preemption_restarts_the_random_stream",
    "preemption_drops_drafts_but_keeps_the_layout",
    "random_steps_of_the_lanes_former_request",
    "drafts_of_the_lanes_former_request",
    "random_numbers_by_lane",
    "preemption_keeps_the_kv_pointer",
    "keys_of_a_rejected_draft_kept",
)
@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name)
def test_the_fault_is_caught(
    planted: Fault, law_toy: Path, foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.plant(monkeypatch)
    assert not _passes(planted.check, planted.strategy, law_toy, foreseeing)
