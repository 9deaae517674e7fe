"""The study beside the paper (arXiv 2604.11035): Markdown like its Tables 1, 3 and 4 and Figures 2(a) and
6(a), and a plot like its Figure 3.

The paper's models have 8 billion weights and its tasks are public benchmarks, so that only what changes from
row to row compares, never a number with its neighbour. All cells here are sampled at temperature 1. Figure
2(a) averages min(1, p/q) over tokens; here it is the share of tested drafts that were accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.training.studies.study_arms import ARMS, BASE, CHAINS, COLD, CONTROL, TAU, THRESHOLD
from idlm.acceptance import cumulative_acceptance, tokens_per_forward_cold

if TYPE_CHECKING:
    from benchmarks.training.studies.study_report import Key, Measured

BLOCK = f"threshold_{THRESHOLD}"
TABLE_1 = {
    "Qwen3-8B (AR)": (96.0, 95.8, 73.1),
    "I-DLM-8B, N=4": (95.0, 96.8, 69.6),
    "SDAR-8B (block diffusion)": (91.7, 78.6, 10.0),
}
"""GSM8K, MATH-500, AIME-24."""
TABLE_3 = {2: (1.80, 96.8, 93.4), 3: (2.48, 95.8, 92.8), 4: (2.96, 96.8, 92.2), 8: (4.01, 94.6, 88.3)}
"""By stride: tokens per forward, MATH-500, MBPP."""
TABLE_4 = {0.0: (2.63, 93.3), TAU: (2.72, 91.8)}
"""By tau: tokens per forward, HumanEval."""
FIGURE_2A = {"SDAR-8B": 0.699, "LLaDA-2.0-flash": 0.568}
"""Introspective acceptance on IFEval."""
FIGURE_6A = {
    "MMLU": (82.4, 80.0),
    "MathBench": (89.1, 71.6),
    "MBPP": (92.8, 67.4),
    "HumanEval": (92.7, 60.3),
}
"""I-DLM and block diffusion after the same data."""
STRIDES = (2, 3, 4, 8)


def beside_paper(measured: Mapping[Key, Measured]) -> str:
    """Markdown of all tables whose cells are there."""

    def quality(arm: str, strategy: str, chain: str) -> str:
        cell = measured.get((arm, strategy, 1.0, chain))
        return "" if cell is None else f"{100 * cell.exact_match:.1f} +- {100 * cell.exact_match_se:.1f}"

    def forwards(arm: str, strategy: str, chain: str) -> str:
        cell = measured.get((arm, strategy, 1.0, chain))
        return "" if cell is None else f"{cell.tokens_per_forward:.2f}"

    def both(arm: str, strategy: str) -> list[str]:
        return [quality(arm, strategy, chain) for chain in CHAINS]

    arms = {
        "AR base": (BASE, "ar"),
        "AR, trained on": (CONTROL, "ar"),
        "I-DLM, N=4": ("idlm_4", COLD),
        "R-ISD (gated LoRA), N=4": ("lora_4", COLD),
        "block diffusion, 4": ("block_4", BLOCK),
    }
    chains = [f"{chain} chains" for chain in CHAINS]
    strides = [
        [f"{n}", *(forwards(f"idlm_{n}", COLD, chain) for chain in CHAINS), *both(f"idlm_{n}", COLD)]
        for n in STRIDES
    ]
    taus = {"0": COLD, f"{TAU:g}": f"tau_{TAU}", "published rule": "published"}
    relaxed = [
        [name, *(forwards("idlm_4", strategy, chain) for chain in CHAINS), *both("idlm_4", strategy)]
        for name, strategy in taus.items()
    ]
    parts = [
        ("Table 1: exact match, %", ["model", *chains], [[name, *both(*arm)] for name, arm in arms.items()]),
        _paper(["model", "GSM8K", "MATH-500", "AIME-24"], TABLE_1),
        ("Table 3: stride", ["N", *(f"TPF, {chain}" for chain in CHAINS), *chains], strides),
        _paper(["N", "TPF", "MATH-500", "MBPP"], TABLE_3),
        ("Table 4: relaxed acceptance", ["tau", *(f"TPF, {chain}" for chain in CHAINS), *chains], relaxed),
        _paper(["tau", "TPF", "HumanEval"], TABLE_4),
        (
            "Figure 2(a): acceptance",
            ["model", *chains],
            [[f"I-DLM, N={n}", *(_rate(measured, f"idlm_{n}", chain) for chain in CHAINS)] for n in STRIDES],
        ),
        _paper(["model", "alpha"], {name: (alpha,) for name, alpha in FIGURE_2A.items()}),
        (
            "Figure 6(a): I-DLM and block diffusion at equal FLOPs",
            ["task", "I-DLM", "block diffusion"],
            [
                [f"{chain} chains", quality("idlm_4", COLD, chain), quality("block_4", BLOCK, chain)]
                for chain in CHAINS
            ],
        ),
        _paper(["task", "I-DLM", "block diffusion"], FIGURE_6A),
    ]
    return "\n".join(_markdown(*part) for part in parts if any(any(line[1:]) for line in part[2]))


def _rate(measured: Mapping[Key, Measured], arm: str, chain: str) -> str:
    cell = measured.get((arm, COLD, 1.0, chain))
    rate = None if cell is None else cell.acceptance_rate
    return "" if rate is None else f"{rate:.3f}"


def _paper(head: list[str], rows: Mapping[Any, Sequence[float]]) -> tuple[str, list[str], list[list[str]]]:
    return "The paper's", head, [[f"{name}", *map(str, values)] for name, values in rows.items()]


def _markdown(title: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    table = [head, ["---"] * len(head), *(line for line in lines if any(line[1:]))]
    return "\n".join([f"{title}:", "", *(f"| {' | '.join(line)} |" for line in table), ""])


def efficiency(acceptance_J: Sequence[float]) -> float:
    """Tokens per forward over the overhead (rows per token), for passes of 2N - 1 rows that verify and N rows
    that only draft: Table 5, ISD (var.), with an acceptance of its own for each draft.
    """
    stride = len(acceptance_J) + 1
    all_accepted = cumulative_acceptance(acceptance_J)[-1]
    forwards = tokens_per_forward_cold(acceptance_J)
    rows = (2 * stride - 1 + stride * (1 - all_accepted)) / (2 - all_accepted)
    return forwards * forwards / rows


def draw_efficiency(measured: Mapping[Key, Measured]) -> Any:
    """Figure 3: efficiency at N=4 by acceptance, of one rate for all drafts (lines) and as measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    rates = [rate / 100 for rate in range(50, 101)]
    axes.plot(rates, [efficiency([rate] * 3) for rate in rates], label="ISD, closed form")
    axes.axhline(1.0, color="gray", linestyle=":", label="AR")
    for (arm, strategy, temperature, chain), cell in measured.items():
        if strategy == COLD and temperature == 1 and ARMS[arm].stride == 4 and cell.acceptance_rate:
            label = f"{arm}, {chain}"
            axes.plot([cell.acceptance_rate], [efficiency(cell.acceptance)], "o", label=label)
        elif (arm, strategy, temperature) == ("block_4", BLOCK, 1.0):
            # Every pass has the rows of a block.
            share = cell.tokens_per_forward**2 / ARMS[arm].stride
            axes.axhline(share, linestyle="--", linewidth=0.8, color="tab:red", label=f"{arm}, {chain}")
    axes.set(
        xlabel="acceptance rate", ylabel="tokens per forward / overhead", title="stride 4, temperature 1"
    )
    axes.legend(fontsize=6)
    return figure
