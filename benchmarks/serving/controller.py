"""Regret of the stride controller against its best fixed mode, simulated: no GPU, the same figures each time.

    python -m benchmarks.controller [strides=4,8] [strategy=tree] [concurrency=1,4,16,64,256]
        [acceptance=0.9] [filled=0] [seeds=3] [passes=150] [parts=steady,changes]

Step times are the recorded ones (engine/decoding/simulation.py). Part `steady` starts a controller at each
number of sequences, with the times of a warm-up and without; `changes` takes one through all of them in turn.
`first` is the regret of the first 50 passes, `after` that of the next `passes`, both means over seeds, and
`worst` the largest `after`. With noise each mode deviates by up to 3 % from what is recorded, and steps take
up to 2 % longer, a tenth of them up to half as long again. Nothing is recorded: this is no measurement.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.engine.decoding.simulation import (
    Disturbances,
    Machine,
    Run,
    Sequences,
    decoder_of,
    fixed_rates,
)
from benchmarks.options import parse_options
from idlm.cli import command
from idlm.errors import UserError

DEFAULTS = {
    "strides": "4,8",
    "strategy": "tree",
    "concurrency": "1,4,16,64,256",
    "acceptance": "0.9",
    "filled": "0",
    "seeds": "3",
    "passes": "150",
    "parts": "steady,changes",
}
SETTLING_PASSES = 50
MIN_SEQUENCE_PASSES, MIN_PASSES = 4000, 150
"""Passes of a fixed mode: its sequences' buffers are drawn."""
NOISE = {"off": Disturbances(), "on": Disturbances(deviation=0.03, noise=0.02, hiccups=0.1)}
CHANGES = (64, 4, 256, 16, 1, 64, 256, 1)
HEAD = ("stride", "start", "noise", "C", "first", "after", "worst", "over AR", "modes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Regret of the first passes and of those after them, the ratio to AR, and the modes in use."""

    first: float
    after: float
    over_ar: float
    modes: Counter[str]


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Print one line for each case; returns the exit status."""
    options = parse_options(arguments, DEFAULTS)
    unknown = {*options["parts"].split(",")} - {"steady", "changes"}
    if unknown:
        raise UserError("IDLM-0107", f"parts={options['parts']}", fix="use parts of steady,changes")
    print("| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD), sep="\n")
    concurrency = [int(part) for part in options["concurrency"].split(",")]
    strides = [int(part) for part in options["strides"].split(",")]
    for stride, is_warm, noise in itertools.product(strides, (True, False), NOISE):
        start = "warm" if is_warm else "cold"
        for part in options["parts"].split(","):
            loads = [[number] for number in concurrency] if part == "steady" else [list(CHANGES)]
            for numbers in loads:
                runs = [
                    list(simulate(options, stride, is_warm, NOISE[noise], seed, numbers))
                    for seed in range(int(options["seeds"]))
                ]
                for place, number in enumerate(numbers):
                    name = str(number) if part == "steady" else f"{number} ({place + 1})"
                    _print_line((str(stride), start, noise, name), [run[place] for run in runs])
    return 0


def simulate(
    options: dict[str, str], stride: int, is_warm: bool, noise: Disturbances, seed: int, numbers: list[int]
) -> Iterator[Found]:
    """What one controller does at these numbers of sequences, one after the other."""
    machine = Machine(decoder_of(stride, options["strategy"]), seed, noise)
    run = Run(machine=machine, controller=machine.controller(machine.warmed() if is_warm else None))
    for number in numbers:
        sequences = Sequences(
            machine=machine,
            number=number,
            acceptance=float(options["acceptance"]),
            filled=float(options["filled"]),
        )
        rates = fixed_rates(sequences, max(MIN_PASSES, MIN_SEQUENCE_PASSES // number))
        first = run.rate(sequences, SETTLING_PASSES)
        run.chosen.clear()
        after = run.rate(sequences, int(options["passes"]))
        modes = Counter(f"{machine.modes[mode].stride} {machine.modes[mode].strategy}" for mode in run.chosen)
        yield Found(
            first=1 - first / max(rates), after=1 - after / max(rates), over_ar=after / rates[0], modes=modes
        )


def _print_line(names: tuple[str, ...], found: list[Found]) -> None:
    modes = sum((one.modes for one in found), Counter[str]())
    shares = [f"{name} {num / modes.total():.0%}" for name, num in modes.most_common(3)]
    cells = (
        *names,
        f"{statistics.mean(one.first for one in found):.1%}",
        f"{statistics.mean(one.after for one in found):.1%}",
        f"{max(one.after for one in found):.1%}",
        f"{statistics.mean(one.over_ar for one in found):.2f}x",
        ", ".join(shares),
    )
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
