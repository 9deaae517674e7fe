"""The choice of the mode, on simulated machines with a memory-bound floor and a cost per row, and what it
remembers of drafts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.acceptance import tokens_per_forward_branch, tokens_per_forward_cold
from idlm.contracts import SamplingParams
from idlm.infer.decoders import isd
from idlm.infer.decoders.base import StrideMode
from idlm.infer.runtime.draft_acceptance import MAX_WINDOW, DraftAcceptance
from idlm.infer.runtime.graphs.pass_costs import Captured
from idlm.infer.runtime.graphs.pass_shape import PassShape
from idlm.infer.runtime.stride_controller import StepLoad, StrideController, read_times
from tests.contracts.engines import build_engine, prompts_of, write_converted_toy

MODES = (
    StrideMode(stride=1, strategy="cold"),
    *(StrideMode(stride=s, strategy=name) for s in (2, 3, 4, 8) for name in ("tree", "branch")),
)
WIDTHS = (1, 3, 4, 5, 9, 7, 16, 15, 64)
FLOOR, PER_ROW = 4.0e-3, 2.7e-5
"""An H200 with 8B weights: 4 ms for up to 150 rows."""


def seconds(number: int, num_sequences: int) -> float:
    return max(FLOOR, PER_ROW * num_sequences * WIDTHS[number])


def shape_of(num_sequences: int, num_prompt_rows: int) -> PassShape:
    return PassShape(
        mode=1,
        num_sequences=num_sequences,
        num_rows=7 * num_sequences,
        max_rows=7,
        num_prompt_rows=num_prompt_rows,
        max_known=1024,
        filters=False,
        num_top=None,
    )


def tokens_of(chances: Sequence[float], mode: StrideMode) -> float:
    closed = tokens_per_forward_branch if mode.strategy == "branch" else tokens_per_forward_cold
    return closed(chances)


def tokens(number: int, acceptance: float) -> float:
    mode = MODES[number]
    return tokens_of([acceptance] * (mode.stride - 1), mode)


def run(
    controller: StrideController,
    num_sequences: int,
    acceptance: float,
    num_passes: int,
    *,
    noise: float,
    disturbed: float = 0.0,
    slowness: float = 1.0,
    mixed: float = 0.0,
) -> list[int]:
    """Modes chosen on the simulated machine, by step.

    The fraction `disturbed` of the steps takes up to 1.5 times as long; the fraction `mixed` stores prompts
    too, so that its time is not observed."""
    rng, chosen = random.Random(0), []
    for _ in range(num_passes):
        number = controller.choose(StepLoad(num_sequences=num_sequences))
        chosen.append(number)
        for _ in range(num_sequences):
            tested = MODES[number].stride - 1
            accepted = next((j for j in range(tested) if rng.random() >= acceptance), tested)
            controller.observe_drafts(accepted, min(tested, accepted + 1))
        factor = rng.uniform(1, 1.5) if rng.random() < disturbed else rng.uniform(1, 1 + noise)
        if not mixed or rng.random() >= mixed:
            took = slowness * factor * seconds(number, num_sequences)
            controller.observe_time(number, StepLoad(num_sequences=num_sequences), took)
    return chosen


@pytest.mark.sweep
@pytest.mark.parametrize("num_sequences", [8, 64])
def test_disturbed_steps_do_not_count(num_sequences: int) -> None:
    controller = StrideController(MODES, WIDTHS, tokens_of)
    chosen = run(controller, num_sequences, 0.9, 4000, noise=0.02, disturbed=0.3)
    rates = [tokens(n, 0.9) / seconds(n, num_sequences) for n in range(len(MODES))]
    assert sum(rates[number] for number in chosen) >= 0.995 * len(chosen) * max(rates)


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize(("num_slow", "num_sequences"), [(12, 16), (5, 8), (30, 32), (5, 64), (30, 8)])
def test_the_choice_recovers_from_a_slow_clock(num_sequences: int, num_slow: int) -> None:
    controller = StrideController(MODES, WIDTHS, tokens_of)
    run(controller, num_sequences, 0.9, 80, noise=0.01)
    run(controller, num_sequences, 0.9, num_slow, noise=0.01, slowness=1.3)
    chosen = run(controller, num_sequences, 0.9, 400, noise=0.01)[-100:]
    rates = [tokens(n, 0.9) / seconds(n, num_sequences) for n in range(len(MODES))]
    assert sum(rates[number] for number in chosen) >= 0.99 * len(chosen) * max(rates)


def test_a_first_time_that_includes_compilation_is_ignored() -> None:
    controller = StrideController(MODES, WIDTHS, tokens_of)
    first = controller.choose(StepLoad(num_sequences=1))
    controller.observe_time(first, StepLoad(num_sequences=1), 30.0)
    controller.observe_drafts(1, 1)
    assert controller.choose(StepLoad(num_sequences=1)) == first, "the mode is timed again"
    controller.observe_time(first, StepLoad(num_sequences=1), seconds(first, 1))
    run(controller, 1, 0.9, 60, noise=0.0)
    assert tokens(run(controller, 1, 0.9, 1, noise=0.0)[0], 0.9) >= 0.95 * max(
        tokens(n, 0.9) for n in range(9)
    )


def test_after_out_of_memory_comes_the_narrowest_and_then_fewer_rows() -> None:
    controller = StrideController(MODES, WIDTHS, tokens_of)
    free = run(controller, 4, 0.9, 60, noise=0.0)[-1]
    maximum = 4 * WIDTHS[free] - 1
    controller.observe_out_of_memory()
    later = run(controller, 4, 0.9, 900, noise=0.0)
    assert WIDTHS[later[0]] == 1
    assert 1 < max(4 * WIDTHS[number] for number in later) <= maximum
    assert run(controller, 4, 0.9, 200, noise=0.0)[-1] == free
    controller.choose(StepLoad(num_sequences=1000))
    controller.observe_out_of_memory()
    controller.observe_out_of_memory()
    assert {WIDTHS[number] for number in run(controller, 100_000, 0.9, 3, noise=0.0)} == {1}, (
        "one mode always remains"
    )


def test_modes_without_graphs_are_used_where_their_rows_hide_the_launches() -> None:
    """Mode 1 has graphs of 1, 2 and 8 sequences that decode, and beside 128 prompt rows of 1 and 2."""
    wanted = [shape_of(size, rows) for size in (1, 2, 4, 8) for rows in (0, 128)]
    missing = [shape_of(4, 0), shape_of(4, 128)]
    found = Captured.of(wanted, missing, eager_rows=500)
    assert found.maximum == {(1, 0): 8, (1, 128): 2}
    fast = [found.launches_fast(1, size, 7 * size, 0) for size in (3, 8, 9, 80)]
    assert fast == [True, True, False, True]
    others = [
        found.launches_fast(1, size, 7 * size + rows, rows) for size, rows in ((2, 9), (3, 9), (2, 200))
    ]
    assert others == [True, False, False]
    assert not found.launches_fast(2, 1, 7, 0), "another mode"
    controller = StrideController(MODES, WIDTHS, tokens_of)
    controller.captured = replace(found, maximum={})
    assert {controller.choose(StepLoad(num_sequences=1)) for _ in range(50)} == {0}


def test_no_trial_takes_longer_than_the_slowdown() -> None:
    slowest = []
    for maximum in (1.5, math.inf):
        controller = StrideController(MODES, WIDTHS, tokens_of, max_slowdown=maximum)
        run(controller, 16, 0.6, 200, noise=0.0)
        tried = {seconds(number, 16) for number in run(controller, 16, 0.6, 1500, noise=0.0)}
        slowest.append(max(tried) / min(tried))
    assert slowest[0] <= 1.5 < slowest[1]


@pytest.mark.parametrize("text", ["", "[]", '{"seconds": [[0, 1]]}', '{"seconds": [[0, 1, -1.0]]}'])
def test_a_broken_file_of_times_is_no_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    assert read_times(path) == {}


def _observe(acceptance: DraftAcceptance, chance: float, num: int, *, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(num):
        accepted = next((index for index in range(3) if rng.random() >= chance), 3)
        acceptance.observe(accepted, min(3, accepted + 1), from_masks=True)
        acceptance.average()


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.05, 0.6), (0.9, 0.3), (0.95, 0.0)])
def test_a_jump_is_believed_after_a_window(before: float, after: float) -> None:
    acceptance = DraftAcceptance([0.85] * 3)
    _observe(acceptance, before, 5000)
    assert acceptance.average()[0] == pytest.approx(before, abs=0.03)
    _observe(acceptance, after, MAX_WINDOW, seed=1)
    assert acceptance.average()[0] == pytest.approx(after, abs=0.15)
    if after > before:
        assert acceptance.average()[2] > (before + after) / 2, "positions that were hardly tested follow"


def test_drafts_from_verification_rows_count_for_requests_alone() -> None:
    acceptance = DraftAcceptance([0.8] * 3)
    for _ in range(100):
        acceptance.observe(0, 1, from_masks=False)
    assert acceptance.average() == pytest.approx([0.8] * 3)
    [chances] = acceptance.classes([(33, 300)])
    assert chances == pytest.approx([0.8] * 3, abs=0.05), "a request that accepts as little as all do"


@pytest.mark.sweep_but("3-False")
@pytest.mark.parametrize(("num_inflight_steps", "fails"), [(3, False), (0, True)])
def test_drafts_from_verification_rows_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_inflight_steps: int, fails: bool
) -> None:
    """Modes change at random; draws are rejected often. A pass that fails takes the drafts with it."""
    engine = build_engine(
        write_converted_toy(tmp_path), "isd", stride=4, adaptive=True, num_inflight_steps=num_inflight_steps
    )
    controller, rng, real = engine._stride_controller, random.Random(3), isd.verify
    assert controller is not None
    known: list[bool] = []
    shown: list[bool] = []
    num_failures = 2 if fails else 0
    # One sequence is not worth halves.
    numbers = [number for number, mode in enumerate(engine.decoder.modes) if mode.narrow is None]

    def verify(probs: Any, store: Any, tables: Any, *, layout_Z: torch.Tensor, **columns: Any) -> Any:
        buffer_B = layout_Z[columns["lanes_B"]].clone()
        verdict = real(probs, store, tables, layout_Z=layout_Z, **columns)
        num_masks = engine.decoder.num_masks
        number_B = buffer_B[verdict.tested_B > 0] % (2 * num_masks + 1)
        known.extend((number_B <= num_masks).tolist())
        return verdict

    def observe(num_accepted: int, num_tested: int, *, from_masks: bool) -> None:
        shown.extend([from_masks] * (num_tested > 0))

    def choose(load: StepLoad) -> int:
        nonlocal num_failures
        if num_failures and engine.scheduler.running[0].has_other_drafts:
            num_failures -= 1
            raise torch.OutOfMemoryError("injected")
        return rng.choice(numbers)

    monkeypatch.setattr(isd, "verify", verify)
    monkeypatch.setattr(controller, "observe_drafts", observe)
    monkeypatch.setattr(controller, "choose", choose)
    params = SamplingParams(temperature=1.0, max_tokens=120, ignore_eos=True, seed=0)
    engine.generate(prompts_of([5], vocab_size=50), params)
    assert shown == known[: len(shown)] and len(known) - len(shown) <= num_inflight_steps
    assert not num_failures
    assert len(shown) > 60 and shown.count(False) > 5
