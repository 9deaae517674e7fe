"""The stride controller in a virtual clock: recorded step times, and drafts that pass with a given chance.

A pass takes what the recorded step of its mode does on an H200 with Qwen3-8B's shape, else one of as many
rows; times deviate by seed in ways that no warm-up shows. It emits what its sequences' draft buffers let it
expect, so that no draw decides a figure, while the controller sees draws. Drafts from verification rows have
a chance of their own; the trace `p0.90` has none that pass.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.results import read_rows
from idlm.infer.decoders.base import StrideMode, rows_by_mode
from idlm.infer.decoders.isd import IsdConfig, IsdDecoder
from idlm.infer.decoders.rejection import DraftBuffer
from idlm.infer.runtime.stride_controller import StepLoad, StepTimes, StrideController
from idlm.semantics import Semantics

CONTEXT = 1024
SLOT_SECONDS = 3.43e-8
"""Reading the keys and values of one token: 147,456 bytes at 4.3 TB/s."""
CAPTURE_SECONDS = 0.11
"""A CUDA graph: a recorded warm-up captures 110 in 12.2 s."""
MAX_TIMED_ROWS = 523
Arm = tuple[int, str]


def decoder_of(stride: int, strategy: str, *, adaptive: bool = True) -> IsdDecoder:
    """ISD of a checkpoint for strides up to 8."""
    config = IsdConfig(stride=stride, adaptive=adaptive, rejection_strategy=strategy)
    return IsdDecoder(config, Semantics(mask_token_id=1, stride=8))


class RecordedTimes:
    """Seconds of recorded steps without their contexts, by arm and number of sequences, and by rows alone."""

    def __init__(self) -> None:
        found: dict[tuple[Arm, int], list[float]] = {}
        for row in read_rows("decode"):
            case = row["case"]
            is_isd = case.get("strategy") not in (None, "adaptive") and row["metric"] == "step_ms"
            if is_isd and case["context"] == CONTEXT and case["sampling"] == "T1":
                seconds = row["value"] / 1e3 - case["batch"] * CONTEXT * SLOT_SECONDS
                arm = case["stride"], case["strategy"]
                found.setdefault((arm, case["batch"]), []).append(seconds)
        self.by_arm = {key: statistics.median(values) for key, values in found.items()}
        by_rows: dict[int, list[float]] = {}
        for ((stride, strategy), size), seconds in self.by_arm.items():
            [width] = rows_by_mode(decoder_of(stride, strategy, adaptive=False), 0)
            by_rows.setdefault(size * width, []).append(seconds)
        self.points = [(rows, statistics.mean(values)) for rows, values in sorted(by_rows.items())]

    def seconds(self, mode: StrideMode, width: int, num_sequences: int, num_prompt_rows: int = 0) -> float:
        """Of a pass. `tree` has the rows of `cold`."""
        arm = mode.stride, mode.strategy.replace("tree", "cold")
        known = self.by_arm.get((arm, num_sequences))
        own = self._by_rows(num_sequences * width)
        return (
            (own if known is None else known) + self._by_rows(num_sequences * width + num_prompt_rows) - own
        )

    def _by_rows(self, num_rows: int) -> float:
        for (before, low), (after, high) in itertools.pairwise(self.points):
            if num_rows <= after:
                return low + (high - low) * max(0, num_rows - before) / (after - before)
        return self.points[-1][1] * num_rows / self.points[-1][0]


recorded_times = functools.cache(RecordedTimes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbances:
    """`deviation` of every mode, by at most this, from its recorded times; `noise`: by how much a step may be
    longer; the fraction `hiccups` of steps takes up to 1.5 times as long."""

    deviation: float = 0.0
    noise: float = 0.0
    hiccups: float = 0.0


class Machine:
    """Steps of the modes of a decoder."""

    def __init__(self, decoder: IsdDecoder, seed: int, disturbances: Disturbances) -> None:
        self.decoder, self.modes, self.widths = decoder, decoder.modes, rows_by_mode(decoder, 0)
        self.rng, self._noise = random.Random(seed), disturbances
        maximum = disturbances.deviation
        self.factors = [1 + self.rng.uniform(-maximum, maximum) for _ in self.modes]
        self._times = recorded_times()

    def seconds(self, mode: int, load: StepLoad) -> float:
        """Of an undisturbed step."""
        own = self._times.seconds(
            self.modes[mode], self.widths[mode], load.num_sequences, load.num_prompt_rows
        )
        return self.factors[mode] * own + load.num_slots * SLOT_SECONDS

    def disturbed(self, seconds: float) -> float:
        """What such a step takes this time."""
        noise = self._noise
        if self.rng.random() < noise.hiccups:
            return seconds * self.rng.uniform(1, 1.5)
        return seconds * self.rng.uniform(1, 1 + noise.noise)

    def warmed(self, *, error: float = 0.02, slot_error: float = 1.25) -> StepTimes:
        """What a warm-up measures, with errors, and contexts guessed too slow."""
        measured = {
            (mode, 1 << k): self._times.seconds(self.modes[mode], width, 1 << k)
            * self.rng.uniform(1 - error, 1 + error)
            for mode, width in enumerate(self.widths)
            for k in range(9)
            if width << k <= MAX_TIMED_ROWS
        }
        return StepTimes(measured=measured, widths=self.widths, seconds_per_slot=slot_error * SLOT_SECONDS)

    def controller(self, times: StepTimes | None, acceptance: Sequence[float] = ()) -> StrideController:
        """A fresh one."""
        return StrideController(
            self.modes, self.widths, self.decoder.tokens_per_forward, acceptance=acceptance, times=times
        )


@dataclass(slots=True, kw_only=True)
class Sequences:
    """`number` sequences in mid-answer, each with its draft buffer. `acceptance` of drafts from masks, once
    those before them were accepted, and `filled` of those from verification rows."""

    machine: Machine
    number: int
    acceptance: float
    filled: float = 0.0
    buffers: list[DraftBuffer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffers = [DraftBuffer(0)] * self.number

    def load(self, context: int = CONTEXT) -> StepLoad:
        """What the controller is asked with."""
        return StepLoad(num_sequences=self.number, num_slots=self.number * context)

    def run(self, mode: int) -> tuple[float, list[tuple[int, int, bool]]]:
        """A pass: expected tokens, and accepted and tested drafts and whether they are from masks."""
        rng, tokens, tests = self.machine.rng, 0.0, []
        layouts = self.machine.decoder._layouts[mode]
        for index, buffer in enumerate(self.buffers):
            layout = layouts[buffer.index(self.machine.decoder.num_masks)]
            num, chance = layout.num_drafts, self.filled if buffer.from_verify_rows else self.acceptance
            tokens += sum(chance**at for at in range(num + 1))
            accepted = next((at for at in range(num) if rng.random() >= chance), num)
            tests.append((accepted, min(num, accepted + 1), not buffer.from_verify_rows))
            self.buffers[index] = layout.next_buffers[accepted]
        return tokens, tests


@dataclass(slots=True, kw_only=True)
class Run:
    """A controller at work. Results are told `num_inflight` passes late. `captures`: the first pass of a
    shape also captures its graph."""

    machine: Machine
    controller: StrideController
    num_inflight: int = 4
    captures: bool = False
    chosen: list[int] = field(default_factory=list)
    _captured: set[tuple[int, int]] = field(default_factory=set)
    _inflight: deque[tuple[int, StepLoad, float, list[tuple[int, int, bool]]]] = field(default_factory=deque)

    def rate(self, sequences: Sequences, num_passes: int, context: int = CONTEXT) -> float:
        """Tokens per second of so many passes."""
        tokens = elapsed = 0.0
        for _ in range(num_passes):
            load = sequences.load(context)
            mode = self.controller.choose(load)
            self.chosen.append(mode)
            seconds = self.machine.seconds(mode, load)
            emitted, tests = sequences.run(mode)
            shown = self.machine.disturbed(seconds)
            if self.captures and (mode, load.num_sequences) not in self._captured:
                self._captured.add((mode, load.num_sequences))
                seconds, shown = seconds + CAPTURE_SECONDS, shown + CAPTURE_SECONDS
            tokens, elapsed = tokens + emitted, elapsed + seconds
            self._inflight.append((mode, load, shown, tests))
            self._collect(self.num_inflight)
        self._collect(0)
        return tokens / elapsed

    def _collect(self, maximum: int) -> None:
        while len(self._inflight) > maximum:
            mode, load, seconds, tests = self._inflight.popleft()
            self.controller.observe_time(mode, load, seconds)
            for accepted, tested, from_masks in tests:
                self.controller.observe_drafts(accepted, tested, from_masks=from_masks)


def fixed_rates(sequences: Sequences, num_passes: int, context: int = CONTEXT) -> list[float]:
    """Tokens per second of each mode alone, over so many passes after eight."""
    machine, rates = sequences.machine, []
    for mode in range(len(machine.modes)):
        own = replace(sequences, buffers=[])
        for _ in range(8):
            own.run(mode)
        tokens = sum(own.run(mode)[0] for _ in range(num_passes))
        rates.append(tokens / num_passes / machine.seconds(mode, own.load(context)))
    return rates
