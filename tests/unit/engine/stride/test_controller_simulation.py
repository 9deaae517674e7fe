"""The stride controller on a machine of recorded step times: after a warm-up, it is near the best mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from idlm.infer.decoders.isd import SCORE_RATE
from idlm.infer.runtime.stride_controller import StepLoad, StrideController
from tests.unit.engine.stride.simulation import CONTEXT, DECODER, MODES, WIDTHS, Machine

SETTLING, MEASURED = 50, 150
tokens_of = DECODER.tokens_per_forward


def _tokens(mode: int, high: float, low: float | None = None) -> float:
    """Of a pass, the mean over sequences, the better half of which accepts `high`, the other `low`."""
    halves = (MODES[mode], high), (MODES[mode].narrow or MODES[mode], high if low is None else low)
    return sum(tokens_of([chance] * (half.stride - 1), half) for half, chance in halves) / 2


def _run(
    machine: Machine, controller: StrideController, load: StepLoad, acceptance: float, num_passes: int
) -> float:
    """Expected tokens per second of `num_passes` passes."""
    tokens = elapsed = 0.0
    for _ in range(num_passes):
        mode = controller.choose(load)
        seconds = machine.seconds(mode, load)
        tokens, elapsed = tokens + load.num_sequences * _tokens(mode, acceptance), elapsed + seconds
        controller.observe_time(mode, load, machine.disturbed(seconds))
        for _ in range(load.num_sequences):
            num = MODES[mode].stride - 1
            accepted = next((j for j in range(num) if machine.rng.random() >= acceptance), num)
            controller.observe_drafts(accepted, min(num, accepted + 1))
    return tokens / elapsed


def _load(num_sequences: int, context: int = CONTEXT) -> StepLoad:
    return StepLoad(num_sequences=num_sequences, num_slots=num_sequences * context)


def _best(
    machine: Machine, load: StepLoad, acceptance: float, modes: Sequence[int] = range(len(MODES))
) -> float:
    return max(load.num_sequences * _tokens(mode, acceptance) / machine.seconds(mode, load) for mode in modes)


@pytest.mark.sweep_but("4-0.7", "16-0.5", "1-0.9")
@pytest.mark.parametrize(
    ("num_sequences", "acceptance"),
    [(1, 0.5), (1, 0.9), (4, 0.7), (16, 0.5), (16, 0.9), (64, 0.7), (256, 0.5), (256, 0.9)],
)
def test_after_fifty_passes_it_is_within_two_percent_of_the_best_mode(
    num_sequences: int, acceptance: float
) -> None:
    machine = Machine(num_sequences)
    controller = StrideController(MODES, WIDTHS, tokens_of, times=machine.warmed())
    load = _load(num_sequences)
    best, ar = _best(machine, load, acceptance), _best(machine, load, acceptance, [0])
    settling = _run(machine, controller, load, acceptance, SETTLING)
    assert settling >= 0.95 * best or acceptance < 0.8, "the prior of acceptance is 0.85"
    assert settling >= 0.97 * ar
    assert _run(machine, controller, load, acceptance, MEASURED) >= max(0.98 * best, 0.99 * ar)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2))
def test_after_every_change_of_load_too(seed: int) -> None:
    machine = Machine(seed)
    controller = StrideController(MODES, WIDTHS, tokens_of, times=machine.warmed())
    loads = [_load(n) for n in (64, 4, 256, 16, 1, 64, 256)] + [_load(16, 8192), _load(4, 32768), _load(64)]
    for load in loads:
        _run(machine, controller, load, 0.9, SETTLING)
        found, best = _run(machine, controller, load, 0.9, MEASURED), _best(machine, load, 0.9)
        assert found >= 0.98 * best, (load, found / best)


@pytest.mark.sweep_but("1-0.02", "4-0.9", "16-0.3")
@pytest.mark.parametrize(
    ("num_sequences", "acceptance"),
    [(1, 0.02), (1, 0.6), (4, 0.9), (16, 0.3), (64, 0.02), (64, 0.6), (256, 0.3), (256, 0.9)],
)
def test_it_never_loses_more_than_a_percent_to_ar(num_sequences: int, acceptance: float) -> None:
    """The checkpoint says what its acceptance is."""
    machine = Machine(7)
    controller = StrideController(
        MODES, WIDTHS, tokens_of, times=machine.warmed(), acceptance=[acceptance] * 7
    )
    load = _load(num_sequences)
    ar = _best(machine, load, acceptance, [0])
    for _ in range(4):
        assert _run(machine, controller, load, acceptance, 100) >= 0.99 * ar


def test_prompts_make_wide_modes_dear_where_rows_are_not_free() -> None:
    """Beside 512 prompt rows every row costs its share, also at a few sequences."""
    machine = Machine(0, deviation=0.0)
    controller = StrideController(MODES, WIDTHS, tokens_of, times=machine.warmed(), acceptance=[0.9] * 7)
    alone = _load(2)
    mixed = StepLoad(num_sequences=2, num_prompt_rows=512, num_slots=alone.num_slots, num_decoding=2)
    assert WIDTHS[controller.choose(mixed)] < WIDTHS[controller.choose(alone)]
    nothing = StepLoad(num_sequences=4, num_decoding=0, num_prompt_rows=512)
    assert WIDTHS[controller.choose(nothing)] == 1, "masks behind prompts are not wanted"


def test_mixed_passes_teach_the_times_of_decoding() -> None:
    """All passes store a few prompt rows: the choice still becomes that of the best mode."""
    machine = Machine(1)
    controller = StrideController(MODES, WIDTHS, tokens_of, times=machine.warmed(slot_error=2.0))
    load = StepLoad(num_sequences=64, num_decoding=64, num_prompt_rows=32, num_slots=64 * CONTEXT)
    _run(machine, controller, load, 0.9, SETTLING)
    assert controller._timings, "no pass only decoded"
    assert _run(machine, controller, load, 0.9, MEASURED) >= 0.97 * _best(machine, load, 0.9)


def test_requests_count_with_their_own_acceptance() -> None:
    """Of sequences that accept nothing none is worth a wide pass, whatever the average of the engine is."""
    machine = Machine(2, deviation=0.0)
    controller = StrideController(MODES, WIDTHS, tokens_of, times=machine.warmed(), acceptance=[0.9] * 7)
    for _ in range(200):
        controller.observe_drafts(7, 7) if machine.rng.random() < 0.5 else controller.observe_drafts(3, 4)
    alike = StepLoad(num_sequences=64, num_slots=64 * CONTEXT, drafts=[(900, 1000)] * 64)
    hopeless = StepLoad(num_sequences=64, num_slots=64 * CONTEXT, drafts=[(100, 1000)] * 64)
    wide = controller.choose(alike)
    assert wide == controller.choose(_load(64))
    assert WIDTHS[controller.choose(hopeless)] < WIDTHS[wide]


@pytest.mark.sweep_but("32-0.9-0.5-1.05")
@pytest.mark.parametrize(
    ("num_sequences", "high", "low", "gain"),
    [
        (16, 0.9, 0.5, 0.98),
        (32, 0.9, 0.5, 1.05),
        (64, 0.9, 0.5, 1.05),
        (64, 0.9, 0.3, 1.08),
        (64, 0.7, 0.7, 0.98),
    ],
)
def test_sequences_that_differ_gain_from_halves(
    num_sequences: int, high: float, low: float, gain: float
) -> None:
    """Scores follow first drafts alone, as the decoder's do; they err while few were tested."""
    machine = Machine(3)
    controller = StrideController(MODES, WIDTHS, tokens_of, times=machine.warmed())
    chances = [high if number % 2 else low for number in range(num_sequences)]
    scores, recent = [1.0] * num_sequences, [(0.0, 0.0)] * num_sequences
    tokens = elapsed = 0.0
    for number in range(SETTLING + MEASURED):
        load = replace(_load(num_sequences), drafts=recent)
        mode = controller.choose(load)
        order = sorted(range(num_sequences), key=lambda b: -scores[b])
        seconds, emitted = machine.seconds(mode, load), 0.0
        for rank, b in enumerate(order):
            half = MODES[mode] if rank < num_sequences // 2 else MODES[mode].narrow or MODES[mode]
            emitted += tokens_of([chances[b]] * (half.stride - 1), half)
            num = (half.stride - 1) * (half.strategy != "alternate" or number % 2)
            accepted = next((j for j in range(num) if machine.rng.random() >= chances[b]), num)
            controller.observe_drafts(accepted, min(num, accepted + 1))
            recent[b] = (recent[b][0] + accepted, recent[b][1] + min(num, accepted + 1))
            if num:
                scores[b] += SCORE_RATE * ((accepted > 0) - scores[b])
        controller.observe_time(mode, load, machine.disturbed(seconds))
        if number >= SETTLING:
            tokens, elapsed = tokens + emitted, elapsed + seconds
    same = [number for number, mode in enumerate(MODES) if mode.narrow is None]
    best = max(
        num_sequences * _tokens(number, high, low) / machine.seconds(number, _load(num_sequences))
        for number in same
    )
    assert tokens / elapsed >= gain * best
