"""The stride controller in the virtual clock of `benchmarks.controller`: what it loses and what it learns."""

from __future__ import annotations

import pytest

from benchmarks.engine.decoding.simulation import (
    Disturbances,
    Machine,
    Run,
    Sequences,
    decoder_of,
    fixed_rates,
)
from benchmarks.serving import controller as benchmark
from idlm.errors import UserError
from idlm.infer.runtime import stride_controller
from idlm.infer.runtime.stride_controller import TRIAL_PASSES

NOISE = Disturbances(deviation=0.03, noise=0.02, hiccups=0.1)


def _run(stride: int, *, is_warm: bool = True, noise: Disturbances = NOISE, seed: int = 0) -> Run:
    machine = Machine(decoder_of(stride, "tree"), seed, noise)
    return Run(machine=machine, controller=machine.controller(machine.warmed() if is_warm else None))


@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("stride", [4, 8])
@pytest.mark.parametrize("number", [1, 4, 16, 64, 256])
def test_after_fifty_passes_it_is_within_two_percent_of_the_best_mode(
    number: int, stride: int, is_warm: bool
) -> None:
    run = _run(stride, is_warm=is_warm)
    sequences = Sequences(machine=run.machine, number=number, acceptance=0.9)
    rates = fixed_rates(sequences, max(20, 3000 // number))
    run.rate(sequences, 50)
    assert run.rate(sequences, 120) >= max(0.98 * max(rates), 0.99 * rates[0])


@pytest.mark.parametrize("is_warm", [True, False])
def test_after_every_change_of_load_too(is_warm: bool) -> None:
    run = _run(4, is_warm=is_warm)
    for number in (64, 4, 256, 16, 1, 64):
        sequences = Sequences(machine=run.machine, number=number, acceptance=0.9)
        rates = fixed_rates(sequences, max(20, 3000 // number))
        run.rate(sequences, 50)
        assert run.rate(sequences, 100) >= max(0.98 * max(rates), 0.99 * rates[0])


@pytest.mark.parametrize("filled", [0.0, 0.25])
def test_acceptance_is_learned_from_drafts_from_masks(filled: float) -> None:
    """`tree` also tests drafts from verification rows, of which few pass."""
    run = _run(4)
    sequences = Sequences(machine=run.machine, number=16, acceptance=0.9, filled=filled)
    run.rate(sequences, 100)
    assert {run.machine.modes[mode].strategy for mode in run.chosen[50:]} >= {"tree"}
    assert run.controller.acceptance(0) == pytest.approx(0.9, abs=0.02)


def test_trials_beside_ar_test_drafts() -> None:
    """AR drops the drafts of a pass before it: a trial of one pass would never learn what is accepted now."""
    run = _run(4, seed=1)
    run.rate(Sequences(machine=run.machine, number=32, acceptance=0.05), 60)
    assert {*run.chosen[40:]} == {0}, "AR is in use"
    sequences = Sequences(machine=run.machine, number=32, acceptance=0.9)
    run.rate(sequences, 400)
    run.chosen.clear()
    run.rate(sequences, 100)
    assert run.chosen.count(0) < 10 and run.controller.acceptance(0) > 0.8


@pytest.mark.parametrize("stride", [4, 8])
@pytest.mark.parametrize("number", [1, 4, 16, 64, 256])
def test_a_jump_of_acceptance_is_found_within_two_hundred_passes(number: int, stride: int) -> None:
    """Until then, what tests drafts beside AR costs a percent at most, and half of that in the long run."""
    run = _run(stride)
    hopeless = Sequences(machine=run.machine, number=number, acceptance=0.0)
    ar = number / run.machine.seconds(0, hopeless.load())
    run.rate(hopeless, 200)
    assert run.rate(hopeless, 600) >= 0.99 * ar
    sequences = Sequences(machine=run.machine, number=number, acceptance=0.9)
    best = max(fixed_rates(sequences, max(20, 3000 // number)))
    run.rate(sequences, 200)
    assert run.rate(sequences, 150) >= 0.98 * best


@pytest.mark.parametrize(("best", "tried"), [(6, 0), (6, 5), (0, 6), (4, 6), (6, 7)])
def test_a_trial_is_charged_with_what_it_loses(best: int, tried: int) -> None:
    """Where every draft is accepted, the tokens that a trial and the pass after it emit are known. Not those
    of `alternate`, which depend on the pass before.
    """
    machine = Machine(decoder_of(4, "tree"), 0, Disturbances())
    sequences = Sequences(machine=machine, number=16, acceptance=1.0)
    load = sequences.load()
    for _ in range(4):
        usual, _ = sequences.run(best)
    emitted = sum(sequences.run(mode)[0] for mode in [tried] * TRIAL_PASSES + [best])
    takes = machine.seconds(tried, load) / machine.seconds(best, load)
    emits = machine.modes[tried].stride / machine.modes[best].stride
    lost = TRIAL_PASSES * takes + 1 - emitted / usual
    assert stride_controller._trial_cost(emits, takes) == pytest.approx(lost)


def test_the_command_prints_a_line_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["strides=4", "concurrency=1,4", "seeds=1", "passes=10", "parts=steady"]
    assert benchmark.measure(arguments) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 4 |")]
    assert len(lines) == 2 * 2 * 2
    assert benchmark.measure(arguments) == 0
    again = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 4 |")]
    assert again == lines, "a seed decides everything"
    with pytest.raises(UserError, match="IDLM-0107"):
        benchmark.measure(["parts=stedy"])
