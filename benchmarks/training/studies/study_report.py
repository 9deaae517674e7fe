"""Records of the study as result rows, a table and plots: means over seeds, and what the goals are.

`exact_match_se` is the standard error over seeds where there are three or more, else that of the share of all
problems. `paired_difference` is to the arm `ar` on the same problems, seeds and bases, with its error.
`tokens_per_forward` leaves out prompt passes and their tokens, as eq. 3 of arXiv 2604.11035 does; `eq3_ratio`
is what was measured over the closed form of the strategy at the measured acceptance of each draft.

Plots: exact match of every arm, and tokens per forward by stride with eq. 3. study_paper.py has what stands
beside the paper's tables and figures, study_ablations.py the rule by which options become defaults. Ablations
have bases of their own and records in a folder of their own; they count in that rule alone.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import save_svg
from benchmarks.results import check_row, result_row
from benchmarks.training.studies.study_ablations import BENCH as ABLATIONS_BENCH
from benchmarks.training.studies.study_ablations import ablation_rows, decisions, drafted_greedily
from benchmarks.training.studies.study_arms import (
    ARMS,
    BASE,
    BRANCH,
    CHAINS,
    COLD,
    CONTROL,
    DETERMINISTIC,
    SIZES,
)
from benchmarks.training.studies.study_paper import beside_paper, draw_efficiency
from benchmarks.training.studies.study_worker import MACHINE, marks_of
from idlm.acceptance import tokens_per_forward_branch, tokens_per_forward_cold

BENCH = "study"
SEEDS_FOR_ERROR = 3
FORMULAS = {COLD: tokens_per_forward_cold, BRANCH: tokens_per_forward_branch}
Record = dict[str, Any]
Key = tuple[str, str, float, str]
"""Arm, strategy, temperature, chain."""


def read_records(results: Iterable[Path], *, seed: int | None = None) -> list[Record]:
    """The records below folders of results, those of one seed or all; of two for one arm, the later one."""
    found: dict[tuple[int, str], Record] = {}
    for folder in results:
        for path in sorted((folder / BENCH).glob("*.json")):
            record = json.loads(path.read_text())
            if record["name"] in ARMS and seed in (None, record["seed"]):
                found[record["seed"], record["name"]] = record
    return sorted(found.values(), key=lambda one: (list(ARMS).index(one["name"]), one["seed"]))


class Measured:
    """A cell over all seeds that have it."""

    def __init__(self, key: Key, cells: dict[int, dict[str, Any]], num: int) -> None:
        """`cells`: what a record says by seed, with the `base` of the record."""
        self.key, self.cells, self.num = key, cells, num
        self.marks = {seed: marks_of(cell["marks"], num) for seed, cell in cells.items()}

    def of(self, seed: int) -> Measured:
        """The cell of one seed."""
        return Measured(self.key, {seed: self.cells[seed]}, self.num)

    def seeds_beside(self, other: Measured) -> set[int]:
        """Seeds in which both arms start from the same base."""
        both = self.cells.keys() & other.cells.keys()
        return {seed for seed in both if self.cells[seed]["base"] == other.cells[seed]["base"]}

    def total(self, name: str) -> float:
        """Sum of a count over seeds."""
        return float(sum(cell[name] for cell in self.cells.values()))

    def by_position(self, name: str) -> list[int]:
        """Sums of a count of drafts at each position."""
        return [sum(column) for column in zip(*(cell[name] for cell in self.cells.values()), strict=True)]

    @property
    def exact_match(self) -> float:
        return statistics.mean(sum(marks) / self.num for marks in self.marks.values())

    @property
    def exact_match_se(self) -> float:
        shares = [sum(marks) / self.num for marks in self.marks.values()]
        if len(shares) >= SEEDS_FOR_ERROR:
            return statistics.stdev(shares) / math.sqrt(len(shares))
        return math.sqrt(self.exact_match * (1 - self.exact_match) / (self.num * len(shares)))

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
        over seeds, or, with less than `SEEDS_FOR_ERROR`, over problems.
        """
        by_seed = [
            [mine - theirs for mine, theirs in zip(self.marks[seed], other.marks[seed], strict=True)]
            for seed in sorted(self.seeds_beside(other))
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
            # Records of the first study do not name their base.
            own = {"base": record.get("base"), "trained_acceptance": record["trained"].get("acceptance", [])}
            cells.setdefault(key, {})[record["seed"]] = cell | own
    return {key: Measured(key, by_seed, num) for key, by_seed in cells.items()}


def control_of(key: Key, measured: dict[Key, Measured]) -> Measured | None:
    """AR continued at the same temperature on the same chains; None where no seed has both on one base."""
    control = measured.get((CONTROL, "ar", *key[2:]))
    return None if control is None or not control.seeds_beside(measured[key]) else control


def rows(records: Sequence[Record], bench: str = BENCH) -> list[dict[str, Any]]:
    """Result rows of all cells; those of another table than the study's name the size of the model."""
    size = {} if bench == BENCH else {"parameters": SIZES[records[-1]["size"]].parameters}
    measured, out = collect(records), []
    for key, cell in measured.items():
        arm, strategy, temperature, chain = key
        first = next(iter(cell.cells.values()))
        case = size | {
            "arm": arm,
            "stride": first["stride"] if first["stride"] > 1 else ARMS[arm].stride,
            "strategy": strategy,
            "temperature": temperature,
            "task": chain,
            "seeds": len(cell.cells),
        }
        for metric, value, unit, baseline in metrics(cell, control_of(key, measured)):
            out.append(
                result_row(
                    bench,
                    case,
                    metric,
                    value,
                    unit,
                    baseline=baseline,
                    exactness=first["exactness"],
                    command=f"python -m benchmarks.{BENCH}"
                    + (f" size={records[-1]['size']}" if size else ""),
                )
            )
    return out


def write_rows(bench: str, records: Sequence[Record], found: Iterable[dict[str, Any]], results: Path) -> None:
    """Replace the rows of earlier records, with the machine and commit of the last one of `records`."""
    machine = max((record["machine"] for record in records), key=lambda one: one["date"])
    stamped = [row | {name: machine[name] for name in MACHINE} for row in found]
    for row in stamped:
        check_row(row)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in stamped)
    (results / f"{bench}.jsonl").write_text(text, encoding="utf-8")


def metrics(cell: Measured, control: Measured | None) -> list[tuple[str, float, str, float | None]]:
    """Metric, value, unit and baseline."""
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


def report(
    records: Sequence[Record],
    *,
    ablations: Sequence[Record] = (),
    results: Path | None = None,
    plots: Path | None = None,
    bench: str = BENCH,
) -> str:
    """The table and the goals as text; with `results`, its rows replace those of earlier records there.
    Without `ablations`, they are among the records; only those of the study have rows.
    """
    if not records:
        return "there are no records"
    measured, compared = collect(records), collect(ablations or records)
    if results is not None:
        write_rows(bench, records, rows(records, bench), results)
        if bench == BENCH:
            write_rows(ABLATIONS_BENCH, ablations or records, ablation_rows(compared), results)
    if plots is not None:
        draw(measured, plots)
    lines = [*table(records, measured), ""]
    if ablations:
        lines += ["On bases of their own:", *table(ablations, compared), ""]
    lines += [*goals(measured), *equalities(compared), "", *decisions(compared)]
    if plots is not None:
        lines += ["", beside_paper(measured)]
    return "\n".join(lines)


def table(records: Sequence[Record], measured: dict[Key, Measured]) -> list[str]:
    """A line for each cell, and one for the training of each arm."""
    lines = [
        f"{'arm':<14} {'strategy':<14} {'T':>2} {'chain':<6} {'seeds':>5} {'exact match':>14} "
        f"{'less than ar':>15} {'alpha':>6} {'TPF':>5} {'eq.3':>6} {'= AR':>6}  by position"
    ]
    for (arm, strategy, temperature, chain), cell in measured.items():
        control = control_of(cell.key, measured)
        mean, error = (0.0, 0.0) if control is None else cell.difference(control)
        less = "-" if control in (None, cell) else f"{-100 * mean:.1f} +- {100 * error:.1f}"
        lines.append(
            f"{arm:<14} {strategy:<14} {temperature:>2g} {chain:<6} {len(cell.cells):>5} "
            f"{f'{100 * cell.exact_match:.1f} +- {100 * cell.exact_match_se:.1f}':>14} {less:>15} "
            f"{_shown(cell.acceptance_rate):>6} {cell.tokens_per_forward:>5.2f} {_shown(cell.eq3_ratio):>6} "
            f"{_shown(cell.equal_to_ar):>6}  {' '.join(map(_shown, cell.acceptance))}"
        )
    lines.append("")
    for record in records:
        trained = record["trained"]
        facts = " ".join(f"{key} {value:.4g}" for key, value in trained.items() if isinstance(value, float))
        lines.append(f"{record['name']:<14} seed {record['seed']}: {record['steps']} steps, {facts}")
    return lines


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def goals(measured: dict[Key, Measured]) -> list[str]:
    """What the study should reach, and whether it did; cells that are missing say nothing."""
    lines, off = [], (0.0, "no arm")

    def say(name: str, key: Key, value: float | None, goal: float, *, is_least: bool = True) -> None:
        if value is not None:
            is_met = value >= goal if is_least else value <= goal
            lines.append(
                f"{'met' if is_met else 'NOT':<4} {name}, {key[3]} T={key[2]:g}: {value:.4f} (goal {goal:g})"
            )

    for key, cell in measured.items():
        control = control_of(key, measured)
        if key[:3] == (BASE, "ar", 0.0):
            say("AR base answers", key, cell.exact_match, 0.97)
        if key[:2] == ("idlm_4", COLD) and control is not None:
            say("I-DLM N=4 less than AR", key, -cell.difference(control)[0], 0.015, is_least=False)
        if key[0] == "idlm_4" and key[1] in FORMULAS:
            say(f"alpha of {key[1]}", key, cell.acceptance_rate, 0.9)
            say(f"TPF of {key[1]}", key, cell.tokens_per_forward, {COLD: 2.6, BRANCH: 3.2}[key[1]])
        if cell.eq3_ratio is not None:
            off = max(off, (abs(cell.eq3_ratio - 1), f"{key[0]} {key[1]} {key[3]} T={key[2]:g}"))
    lines.append(f"{'met' if off[0] <= 0.02 else 'NOT':<4} eq. 3: off by {off[0]:.3f} at most, {off[1]}")
    return lines


def equalities(measured: dict[Key, Measured]) -> list[str]:
    """How many greedy answers of R-ISD are those of its base, which is the goal of `deterministic=true`."""
    lines = []
    for (_, strategy, _, chain), num, differ in drafted_greedily(measured):
        met = "-" if DETERMINISTIC not in strategy else "NOT" if differ else "met"
        lines.append(f"{met:<4} R-ISD equals its base, {strategy} {chain}: {num - differ:,} of {num:,}")
    return lines


def draw(measured: dict[Key, Measured], folder: Path) -> list[Path]:
    """Exact match of every arm, tokens per forward by stride and the efficiency of passes, as SVG."""
    return [
        save_svg(draw_efficiency(measured), folder / "study_efficiency.svg"),
        save_svg(_quality(measured), folder / "study_quality.svg"),
        save_svg(_forwards(measured), folder / "study_tokens_per_forward.svg"),
    ]


SHOWN = ("ar", COLD, "threshold_0.9")
"""The strategy of each arm in the plot of quality."""


def _quality(measured: dict[Key, Measured]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    for place, (temperature, chain) in enumerate(((t, c) for c in CHAINS for t in (0.0, 1.0)), start=1):
        axes = figure.add_subplot(2, 2, place)
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
            (ARMS[key[0]].stride, cell)
            for key, cell in measured.items()
            if key[0].startswith("idlm_") and key[1:] == (strategy, 1.0, chain)
        ]
        strides = [stride for stride, _ in sorted(cells, key=lambda one: one[0])]
        ordered = [cell for _, cell in sorted(cells, key=lambda one: one[0])]
        [line] = axes.plot(
            strides, [one.tokens_per_forward for one in ordered], "o", label=f"{strategy}, {chain}"
        )
        axes.plot(strides, [formula(one.acceptance) for one in ordered], "--", color=line.get_color())
    axes.set(xlabel="stride N", ylabel="tokens per forward", title="temperature 1; dashed: closed form")
    axes.legend(fontsize=7)
    return figure
