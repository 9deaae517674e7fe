"""Arms that differ in one option from another on the same base, and which of these options become defaults.

The rule was written before the records were made. `forward_gain` is how many more tokens per forward an arm
decides than the other, as a share: the mean over the cells that ISD decodes (`cold` and `branch`, both
temperatures, short and long chains) of a seed. `match_gain` is the same for exact match, as a difference.
An option becomes the default if three seeds or more have all these cells and

- the mean of `forward_gain` is `MIN_GAIN` or more, and more than two of its standard errors over seeds,
- no seed loses tokens per forward,
- the mean of `match_gain` is not below -`MAX_LOSS`.

Of two options that exclude each other and both pass, the one with the larger gain becomes the default. All
arms have the same FLOPs, so that what an option costs is in its gain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.results import result_row
from benchmarks.training.studies.study_arms import CHAINS, STRIDED

if TYPE_CHECKING:
    from benchmarks.training.studies.study_report import Key, Measured

BENCH = "study_ablations"
OPTIONS = {"random_phase": "idlm_4", "lora_kl": "lora_4", "lora_overlap": "lora_4"}
"""Arms whose options may become defaults, and the arm without."""
ABLATIONS = OPTIONS | {"no_balance": "idlm_4", "no_curriculum": "idlm_4"}
MIN_GAIN, MAX_LOSS = 0.01, 0.005
MIN_SEEDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What an arm gains over another by seed; seeds that lack a cell of one of them are left out."""

    arm: str
    over: str
    forwards: tuple[float, ...]
    matches: tuple[float, ...]

    @property
    def problems(self) -> list[str]:
        """Why the option does not become the default; empty if it does."""
        if len(self.forwards) < MIN_SEEDS:
            return [f"{len(self.forwards)} seeds of {MIN_SEEDS}"]
        mean, error = mean_and_error(self.forwards)
        checks = {
            f"it gains less than {MIN_GAIN:.0%}": mean < MIN_GAIN,
            "the gain is within two standard errors": mean <= 2 * error,
            "a seed loses": min(self.forwards) < 0,
            f"it loses more than {100 * MAX_LOSS:g} points": statistics.fmean(self.matches) < -MAX_LOSS,
        }
        return [problem for problem, is_found in checks.items() if is_found]


def mean_and_error(values: tuple[float, ...]) -> tuple[float, float]:
    """(mean, standard error); the error of one value is 0."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def _points(values: tuple[float, ...]) -> str:
    mean, error = mean_and_error(values)
    return f"{100 * mean:+.2f} +- {100 * error:.2f}"


def gains(measured: Mapping[Key, Measured]) -> list[Gain]:
    """Of every ablation that has a seed."""
    found = []
    for arm, over in ABLATIONS.items():
        keys = [(cell.label, cell.temperature, chain) for cell in STRIDED for chain in CHAINS]
        pairs = [(measured.get((arm, *key)), measured.get((over, *key))) for key in keys]
        whole = [(mine, other) for mine, other in pairs if mine is not None and other is not None]
        if len(whole) < len(keys):
            continue
        seeds = sorted(set.intersection(*(mine.seeds_beside(other) for mine, other in whole)))
        by_seed = [[(mine.of(seed), other.of(seed)) for mine, other in whole] for seed in seeds]
        if seeds:
            found.append(
                Gain(
                    arm=arm,
                    over=over,
                    forwards=tuple(
                        statistics.fmean(
                            mine.tokens_per_forward / other.tokens_per_forward - 1 for mine, other in cells
                        )
                        for cells in by_seed
                    ),
                    matches=tuple(
                        statistics.fmean(mine.exact_match - other.exact_match for mine, other in cells)
                        for cells in by_seed
                    ),
                )
            )
    return found


def chosen(found: list[Gain]) -> dict[str, Gain]:
    """The options that become defaults, by the arm without them."""
    best: dict[str, Gain] = {}
    for gain in found:
        if gain.arm in OPTIONS and not gain.problems:
            known = best.get(gain.over)
            if known is None or statistics.fmean(gain.forwards) > statistics.fmean(known.forwards):
                best[gain.over] = gain
    return best


def decisions(measured: Mapping[Key, Measured]) -> Iterator[str]:
    """A line for each ablation: its gains, and for an option what follows."""
    found = gains(measured)
    best = chosen(found)
    for gain in found:
        line = (
            f"{gain.arm} over {gain.over}, {len(gain.forwards)} seeds: tokens per forward "
            f"{_points(gain.forwards)} % ({100 * min(gain.forwards):+.2f} at least), exact match "
            f"{_points(gain.matches)} points"
        )
        if gain.arm not in OPTIONS:
            yield line
        elif gain.problems:
            yield f"{line}; no default: {', '.join(gain.problems)}"
        elif best[gain.over] is not gain:
            yield f"{line}; no default: {best[gain.over].arm} gains more"
        else:
            yield f"{line}; BECOMES THE DEFAULT"


def ablation_rows(measured: Mapping[Key, Measured]) -> list[dict[str, Any]]:
    """Result rows of all ablations."""
    rows = []
    for gain in gains(measured):
        case = {"arm": gain.arm, "over": gain.over, "seeds": len(gain.forwards)}
        for name, values in (("forward_gain", gain.forwards), ("match_gain", gain.matches)):
            mean, error = mean_and_error(values)
            for metric, value in ((name, mean), (f"{name}_se", error), (f"{name}_least", min(values))):
                rows.append(
                    result_row(BENCH, case, metric, value, "share", command="python -m benchmarks.study")
                )
    return rows
