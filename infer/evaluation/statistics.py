"""Confidence intervals of shares, and of differences between decoders on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

Z95 = 1.959963984540054


class Interval(NamedTuple):
    value: float
    low: float
    high: float


def share_interval(scores: Sequence[float]) -> Interval:
    """Wilson's interval of the mean of scores in [0, 1]; those between vary less than it allows for."""
    n, value = len(scores), sum(scores) / len(scores)
    scale = 1 + Z95**2 / n
    middle = (value + Z95**2 / (2 * n)) / scale
    half = Z95 / scale * sqrt(value * (1 - value) / n + Z95**2 / (4 * n**2))
    return Interval(value, max(0.0, middle - half), min(1.0, middle + half))


def difference_line(
    name: str, first: str, scores: Sequence[float], others: Sequence[float], *, what: str, of: str
) -> str:
    """The `paired_difference` of two decoders in the metric `what`, over prompts or other pairs (`of`)."""
    gap = paired_difference(scores, others)
    interval = f"95% interval {gap.low:+.3f} to {gap.high:+.3f}"
    return f"{name} - {first}: {gap.value:+.3f} in {what}, {interval}, {len(scores)} {of} in pairs"


def paired_difference(scores: Sequence[float], others: Sequence[float]) -> Interval:
    """The mean of `scores - others`, after Agresti and Min (2005): two prompts more, half a one better and
    half a one worse, so that few prompts do not give an interval of width 0."""
    differences = [score - other for score, other in zip(scores, others, strict=True)]
    n, total = len(differences) + 2, sum(differences)
    middle = total / n
    half = Z95 * sqrt(((sum(each**2 for each in differences) + 1) / n - middle**2) / n)
    return Interval(total / len(differences), max(-1.0, middle - half), min(1.0, middle + half))
