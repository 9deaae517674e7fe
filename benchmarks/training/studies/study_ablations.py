"""Arms that differ in one option from another on the same base, and which of these options become defaults.

The rule was written before the records were made. `forward_gain` is how many more tokens per forward an arm
decides than the other, as a share: the mean over the cells that ISD decodes (`cold` and `branch`, both
temperatures, short and long chains) of a seed. `match_gain` is the same for exact match, as a difference.
An option becomes the default if three seeds or more have all these cells and

- the mean of `forward_gain` is `MIN_GAIN` or more, and more than two of its standard errors over seeds,
- no seed loses tokens per forward,
- the mean of `match_gain` is not below -`MAX_LOSS`.

Of two options that exclude each other and both pass, the one with the larger gain becomes the default. All
arms have the same FLOPs, so that what an option costs is in its gain. An arm that was trained and not decoded
has `training_gain`, points of acceptance in the last steps of training, which decides nothing: the mean over
drafts, of `no_shift` over those as far from the last clean token as a draft of the other arm.

Beside these rows: in how many greedy answers R-ISD (`RISD`) differs from its base.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.results import result_row
from benchmarks.training.studies.study_arms import CHAINS, STRIDED
from benchmarks.training.studies.study_no_shift import NAME as NO_SHIFT
from benchmarks.training.studies.study_no_shift import NEAREST

if TYPE_CHECKING:
    from benchmarks.training.studies.study_report import Key, Measured

BENCH = "study_ablations"
OPTIONS = {"random_phase": "idlm_4", "lora_kl": "lora_4", "lora_overlap": "lora_4"}
"""Arms whose options may become defaults, and the arm without."""
ABLATIONS = OPTIONS | {"no_balance": "idlm_4", "no_curriculum": "idlm_4", NO_SHIFT: "idlm_4"}
MIN_GAIN, MAX_LOSS = 0.01, 0.005
MIN_SEEDS = 3
RISD = "lora_4"
UNITS = {"forward_gain": "%", "match_gain": "points"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What an arm gains over another by seed; seeds that lack a cell of one of them are left out.
    `training`: acceptance in training, the mean over drafts, of all seeds.
    """

    arm: str
    over: str
    forwards: tuple[float, ...]
    matches: tuple[float, ...]
    training: tuple[float, ...]

    @property
    def problems(self) -> list[str]:
        """Why the option does not become the default; empty if it does."""
        if len(self.forwards) < MIN_SEEDS:
            return [f"decoded in {len(self.forwards)} seeds of {MIN_SEEDS}"]
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
    """Of every ablation that has a seed, decoded or trained."""
    found = []
    for arm, over in ABLATIONS.items():
        by_seed, training = _decoded_pairs(measured, arm, over), _training_gains(measured, arm, over)
        if by_seed or training:
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
                    training=training,
                )
            )
    return found


def _decoded_pairs(
    measured: Mapping[Key, Measured], arm: str, over: str
) -> list[list[tuple[Measured, Measured]]]:
    """By seed, all cells of both arms; seeds without one of them are left out."""
    keys = [(cell.label, cell.temperature, chain) for cell in STRIDED for chain in CHAINS]
    pairs = [(measured.get((arm, *key)), measured.get((over, *key))) for key in keys]
    whole = [(mine, other) for mine, other in pairs if mine is not None and other is not None]
    if len(whole) < len(keys):
        return []
    seeds = sorted(set.intersection(*(mine.seeds_beside(other) for mine, other in whole)))
    return [[(mine.of(seed), other.of(seed)) for mine, other in whole] for seed in seeds]


def _training_gains(measured: Mapping[Key, Measured], arm: str, over: str) -> tuple[float, ...]:
    """By seed, how much higher the acceptance in training is; any cell of an arm has it."""
    mine, other = (
        {
            seed: cell
            for key, cells in measured.items()
            if key[0] == name
            for seed, cell in cells.cells.items()
        }
        for name in (arm, over)
    )
    found = []
    for seed in sorted(mine.keys() & other.keys()):
        mine_by, other_by = _by_distance(arm, mine[seed]), _by_distance(over, other[seed])
        if (common := mine_by.keys() & other_by.keys()) and mine[seed]["base"] == other[seed]["base"]:
            found.append(statistics.fmean(mine_by[one] - other_by[one] for one in sorted(common)))
    return tuple(found)


def _by_distance(arm: str, cell: Mapping[str, Any]) -> dict[int, float]:
    """Acceptance in training by the distance of a draft from the last clean token that its mask sees."""
    return dict(enumerate(cell["trained_acceptance"], start=NEAREST if arm == NO_SHIFT else 2))


def drafted_greedily(measured: Mapping[Key, Measured]) -> Iterator[tuple[Key, int, int]]:
    """Cells of R-ISD that are to equal its base: their greedy answers, and how many of them differ."""
    for key, cell in measured.items():
        is_isd = all(one["decoder"] == "isd" for one in cell.cells.values())
        if key[0] == RISD and key[2] == 0 and is_isd and cell.equal_to_ar is not None:
            num = cell.num * len(cell.cells)
            yield key, num, round((1 - cell.equal_to_ar) * num)


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
    """A line for each ablation: its gains, and for an option what follows. Options beside whose other arm
    nothing was run are named.
    """
    found = gains(measured)
    best = chosen(found)
    for gain in found:
        line = f"{gain.arm} over {gain.over}"
        if gain.forwards:
            line += (
                f", {len(gain.forwards)} seeds: tokens per forward {_points(gain.forwards)} % "
                f"({100 * min(gain.forwards):+.2f} at least), exact match {_points(gain.matches)} points"
            )
        if gain.training:
            line += f", {len(gain.training)} trained: acceptance in training {_points(gain.training)} points"
        if gain.arm not in OPTIONS:
            yield line
        elif gain.problems:
            yield f"{line}; no default: {', '.join(gain.problems)}"
        elif best[gain.over] is not gain:
            yield f"{line}; no default: {best[gain.over].arm} gains more"
        else:
            yield f"{line}; BECOMES THE DEFAULT"
    arms = {key[0] for key in measured}
    for arm, over in ABLATIONS.items():
        if over in arms and arm not in {gain.arm for gain in found}:
            yield f"{arm} over {over}: not run"


def ablation_rows(measured: Mapping[Key, Measured]) -> list[dict[str, Any]]:
    """Result rows of all ablations, and of what R-ISD answers otherwise than its base."""
    rows = []

    def add(case: dict[str, Any], metric: str, value: float, unit: str) -> None:
        rows.append(result_row(BENCH, case, metric, value, unit, command="python -m benchmarks.study"))

    for gain in gains(measured):
        case = {"arm": gain.arm, "over": gain.over, "seeds": max(len(gain.forwards), len(gain.training))}
        for name, values in (("forward_gain", gain.forwards), ("match_gain", gain.matches)):
            if values:
                mean, error = mean_and_error(values)
                for metric, value in ((name, mean), (f"{name}_se", error), (f"{name}_least", min(values))):
                    add(case, metric, 100 * value, UNITS[name])
        if gain.training:
            mean, error = mean_and_error(gain.training)
            for metric, value in (("training_gain", mean), ("training_gain_se", error)):
                add(case, metric, 100 * value, "points")
    for (_, strategy, _, chain), num, differ in drafted_greedily(measured):
        case = {"strategy": strategy, "task": chain}
        add(case, "answers", num, "")
        add(case, "not_as_base", differ, "")
    return rows
