"""A machine made of recorded step times: a pass takes what the step of its mode does on an H200 with
Qwen3-8B's shape, else one of as many rows. Times deviate by seed in ways that no warm-up shows."""

from __future__ import annotations

import functools
import itertools
import random
import statistics

from benchmarks.results import read_rows
from idlm.infer.decoders.base import StrideMode, rows_by_mode
from idlm.infer.decoders.isd import IsdConfig, IsdDecoder
from idlm.infer.runtime.stride_controller import StepLoad, StepTimes
from idlm.semantics import Semantics

CONTEXT, GPU = 1024, "NVIDIA H200"
SLOT_SECONDS = 3.43e-8
"""Reading the keys and values of one token: 147,456 bytes at 4.3 TB/s."""
MAX_TIMED_ROWS = 523
Arm = tuple[int, str]


def decoder_of(stride: int, strategy: str, *, adaptive: bool = True) -> IsdDecoder:
    """ISD of a checkpoint for strides up to 8."""
    config = IsdConfig(stride=stride, adaptive=adaptive, rejection_strategy=strategy)
    return IsdDecoder(config, Semantics(mask_token_id=1, stride=8))


DECODER = decoder_of(8, "tree")
MODES, WIDTHS = DECODER.modes, rows_by_mode(DECODER, 0)


class RecordedTimes:
    """Seconds of recorded steps without their contexts, by arm and number of sequences, and by rows alone."""

    def __init__(self) -> None:
        found: dict[tuple[Arm, int], list[float]] = {}
        for row in read_rows("decode"):
            case = row["case"]
            is_isd = case.get("strategy") not in (None, "adaptive") and row["metric"] == "step_ms"
            # The runs that timed as many rows in several layouts.
            is_first = "batch" in case and row["gpu"] == GPU
            if is_isd and is_first and case["context"] == CONTEXT and case["sampling"] == "T1":
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


class Machine:
    """Steps of the modes of `DECODER`, each of which deviates from its recorded times by at most `deviation`;
    `noise`: by how much a step may be longer."""

    def __init__(self, seed: int, *, deviation: float = 0.03, noise: float = 0.02) -> None:
        self.rng, self._noise = random.Random(seed), noise
        self.factors = [1 + self.rng.uniform(-deviation, deviation) for _ in MODES]
        self._times = recorded_times()

    def seconds(self, mode: int, load: StepLoad) -> float:
        """Of an undisturbed step."""
        own = self._times.seconds(MODES[mode], WIDTHS[mode], load.num_sequences, load.num_prompt_rows)
        return self.factors[mode] * own + load.num_slots * SLOT_SECONDS

    def disturbed(self, seconds: float) -> float:
        """What such a step takes this time."""
        return seconds * self.rng.uniform(1, 1 + self._noise)

    def warmed(self, *, error: float = 0.02, slot_error: float = 1.25) -> StepTimes:
        """What a warm-up measures, with errors, and contexts guessed too slow."""
        measured = {
            (mode, 1 << k): self._times.seconds(MODES[mode], width, 1 << k)
            * self.rng.uniform(1 - error, 1 + error)
            for mode, width in enumerate(WIDTHS)
            for k in range(9)
            if width << k <= MAX_TIMED_ROWS
        }
        return StepTimes(measured=measured, widths=WIDTHS, seconds_per_slot=slot_error * SLOT_SECONDS)
