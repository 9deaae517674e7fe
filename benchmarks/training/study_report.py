"""Records of the study (study.py) as result rows and plots: means over seeds.

`exact_match_se` is the standard error over seeds where there are three or more, else that of the share of all
problems. `paired_difference` is to the arm `ar` on the same problems, seeds and bases, with its error.
`tokens_per_forward` leaves out prompt passes and their tokens, as eq. 3 of arXiv 2604.11035 does; `eq3_ratio`
is what was measured over the closed form of the strategy at the measured acceptance of each draft."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.arms import binomial_error
from benchmarks.results import append_rows, result_row, save_svg
from idlm.acceptance import tokens_per_forward_branch, tokens_per_forward_cold
from idlm.checkpoint import read_json

BASE, CONTROL = "base", "ar"
CHAINS = {"short": (4, 8), "long": (12, 16)}
"""Steps of the test problems; training has all from the shortest to the longest."""
STRIDES = {BASE: 1, CONTROL: 1, "idlm_4": 4, "block_4": 4, "lora_4": 4}
"""Of the arms, in the order of tables."""
MACHINE = ("gpu", "num_gpus", "torch", "triton", "commit", "date")
FORMULAS = {"cold": tokens_per_forward_cold, "branch": tokens_per_forward_branch}
SEEDS_FOR_ERROR = 3
SHOWN = ("ar", "cold", "threshold_0.9")
"""The strategy of each arm in the plot of quality."""
Record = dict[str, Any]
Key = tuple[str, str, float, str]
"""Arm, strategy, temperature, chain."""


def read_records(results: Path) -> list[Record]:
    """All records below a folder of results, in the order of arms and seeds."""
    found = [read_json(path) for path in (results / "study").glob("*.json")]
    return sorted(found, key=lambda one: (list(STRIDES).index(one["name"]), one["seed"]))


class Measured:
    """A cell over all seeds that have it."""

    def __init__(self, key: Key, cells: dict[int, dict[str, Any]], num: int) -> None:
        """`cells`: a record's values by seed, with the `base` of the record."""
        self.key, self.cells, self.num = key, cells, num
        self.marks = {
            seed: [bool(int(cell["marks"], 16) >> index & 1) for index in range(num)]
            for seed, cell in cells.items()
        }

    def common_seeds(self, other: Measured) -> set[int]:
        """Seeds in which both arms start from the same base."""
        both = self.cells.keys() & other.cells.keys()
        return {seed for seed in both if self.cells[seed]["base"] == other.cells[seed]["base"]}

    def total(self, name: str) -> float:
        return float(sum(cell[name] for cell in self.cells.values()))

    def by_position(self, name: str) -> list[int]:
        return [sum(column) for column in zip(*(cell[name] for cell in self.cells.values()), strict=True)]

    @property
    def exact_match(self) -> float:
        return statistics.mean(sum(marks) / self.num for marks in self.marks.values())

    @property
    def exact_match_se(self) -> float:
        shares = [sum(marks) / self.num for marks in self.marks.values()]
        if len(shares) >= SEEDS_FOR_ERROR:
            return statistics.stdev(shares) / math.sqrt(len(shares))
        return binomial_error(self.exact_match, self.num * len(shares))

    @property
    def acceptance(self) -> list[float]:
        """Of the drafts at each position, those before being accepted."""
        pairs = zip(self.by_position("accepted"), self.by_position("tested"), strict=True)
        return [accepted / max(1, tested) for accepted, tested in pairs]

    @property
    def acceptance_rate(self) -> float | None:
        tested = sum(self.by_position("tested"))
        return sum(self.by_position("accepted")) / tested if tested else None

    @property
    def tokens_per_forward(self) -> float:
        # The pass over a prompt emits the first token, except where whole blocks are decided.
        is_block = any(cell["decoder"] == "block" for cell in self.cells.values())
        prompts = 0.0 if is_block else self.total("num_prompt_passes")
        return (self.total("num_tokens") - prompts) / max(1.0, self.total("num_forwards") - prompts)

    @property
    def eq3_ratio(self) -> float | None:
        formula = FORMULAS.get(self.key[1])
        return None if formula is None else self.tokens_per_forward / formula(self.acceptance)

    @property
    def equal_to_ar(self) -> float | None:
        shares = [cell["equal_to_ar"] for cell in self.cells.values()]
        return None if None in shares else statistics.mean(shares)

    def difference(self, other: Measured) -> tuple[float, float]:
        """(mean, standard error) of this cell's marks less those of `other`, problem by problem; the error is
        over seeds, or, with less than `SEEDS_FOR_ERROR`, over problems."""
        by_seed = [
            [mine - theirs for mine, theirs in zip(self.marks[seed], other.marks[seed], strict=True)]
            for seed in sorted(self.common_seeds(other))
        ]
        if len(by_seed) >= SEEDS_FOR_ERROR:
            means = [statistics.fmean(pairs) for pairs in by_seed]
            return statistics.fmean(means), statistics.stdev(means) / math.sqrt(len(means))
        pairs = [pair for pairs in by_seed for pair in pairs]
        mean = statistics.fmean(pairs)
        return mean, math.sqrt(sum((one - mean) ** 2 for one in pairs)) / len(pairs)


def collect(records: Sequence[Record]) -> dict[Key, Measured]:
    """Cells by what they are; seeds with another number of problems than the last record's are left out."""
    cells: dict[Key, dict[int, dict[str, Any]]] = {}
    num = records[-1]["num"]
    for record in records:
        for cell in record["cells"] if record["num"] == num else ():
            key = (record["name"], cell["strategy"], cell["temperature"], cell["task"])
            cells.setdefault(key, {})[record["seed"]] = cell | {"base": record.get("base")}
    return {key: Measured(key, by_seed, num) for key, by_seed in cells.items()}


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Result rows of all cells, with the machine and commit of the last record."""
    measured, out = collect(records), []
    machine = max((record["machine"] for record in records), key=lambda one: one["date"])
    for (arm, strategy, temperature, chain), cell in measured.items():
        first = next(iter(cell.cells.values()))
        case = {
            "arm": arm,
            "stride": first["stride"] if first["stride"] > 1 else STRIDES[arm],
            "strategy": strategy,
            "temperature": temperature,
            "task": chain,
            "seeds": len(cell.cells),
        }
        control = measured.get((CONTROL, "ar", temperature, chain))
        exactness: str = first["exactness"]
        for metric, value, unit, baseline in metrics(cell, control):
            row = result_row("study", case, metric, value, unit, baseline=baseline, exactness=exactness)
            out.append(row | {name: machine[name] for name in MACHINE})
    return out


def metrics(cell: Measured, control: Measured | None) -> list[tuple[str, float, str, float | None]]:
    """Metric, value, unit and baseline. `control`: AR continued, at the same temperature and chains."""
    if control is not None and not control.common_seeds(cell):
        control = None
    found: list[tuple[str, float | None, str, float | None]] = [
        ("exact_match", cell.exact_match, "share", None if control is None else control.exact_match),
        ("exact_match_se", cell.exact_match_se, "share", None),
        ("tokens_per_forward", cell.tokens_per_forward, "tokens", 1.0),
        ("eq3_ratio", cell.eq3_ratio, "x", None),
        ("acceptance_rate", cell.acceptance_rate, "share", None),
        ("equal_to_ar", cell.equal_to_ar, "share", None),
    ]
    if cell.acceptance_rate is not None:
        found += [(f"acceptance_{j}", rate, "share", None) for j, rate in enumerate(cell.acceptance, start=1)]
    if control is not None and cell is not control:
        mean, error = cell.difference(control)
        found += [("paired_difference", mean, "share", None), ("paired_difference_se", error, "share", None)]
    return [(metric, value, unit, baseline) for metric, value, unit, baseline in found if value is not None]


def write(results: Path, plots: Path) -> None:
    """Replace the rows of the study by those of all its records, and draw them."""
    records = read_records(results)
    found = rows(records)
    (results / "study.jsonl").unlink(missing_ok=True)
    append_rows("study", found, results=results)
    measured = collect(records)
    save_svg(_quality(measured), plots / "study_quality.svg")
    save_svg(_forwards(measured), plots / "study_tokens_per_forward.svg")


def _quality(measured: dict[Key, Measured]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    for index, (temperature, chain) in enumerate(((t, c) for c in CHAINS for t in (0.0, 1.0)), start=1):
        axes = figure.add_subplot(2, 2, index)
        cells = {}
        for key, cell in measured.items():
            # The converted model's own strategy counts where it has AR too.
            if key[1] in SHOWN and key[2:] == (temperature, chain):
                cells[key[0]] = cell
        values = [100 * cell.exact_match for cell in cells.values()]
        errors = [100 * cell.exact_match_se for cell in cells.values()]
        axes.bar(list(cells), values, yerr=errors, capsize=3)
        axes.set(title=f"{chain} chains, temperature {temperature:g}", ylabel="exact match, %")
        axes.set_ylim(max(0.0, min(values, default=0.0) - 5), 100.5)
        axes.tick_params(axis="x", labelrotation=45, labelsize=7)
    return figure


def _forwards(measured: dict[Key, Measured]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for (strategy, formula), chain in ((one, chain) for one in FORMULAS.items() for chain in CHAINS):
        cells = [
            (STRIDES[key[0]], cell)
            for key, cell in measured.items()
            if key[0].startswith("idlm_") and key[1:] == (strategy, 1.0, chain)
        ]
        strides = [stride for stride, _ in cells]
        [line] = axes.plot(
            strides, [one.tokens_per_forward for _, one in cells], "o", label=f"{strategy}, {chain}"
        )
        axes.plot(strides, [formula(one.acceptance) for _, one in cells], "--", color=line.get_color())
    axes.set(xlabel="stride N", ylabel="tokens per forward", title="temperature 1; dashed: closed form")
    axes.legend(fontsize=7)
    return figure
