"""How well importance tells which masks a pass decides (FOCUS, figures 4, 12 and 13), from recorded passes.

A percentile is that of a mask among the masks of its pass, so that passes with few masks count as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.engine.unmasking.record import PassRecord

BINS = 5
DELTA, RAW = "delta", "raw"
SIGNALS = (DELTA, RAW)
MIN_MASKS = BINS
"""Passes with fewer masks have no percentiles."""


@dataclass(slots=True, kw_only=True)
class Bin:
    """The masks whose signal lies between two percentiles of their pass."""

    percentile: str
    num_masks: int = 0
    num_decided: int = 0

    @property
    def decoded_share(self) -> float:
        """Share of these masks that their pass decided."""
        return self.num_decided / max(1, self.num_masks)


def bins_of(passes: Iterable[PassRecord], signal: str) -> list[Bin]:
    """The masks of all passes in bins of a fifth, lowest first; of equal signals the left one is lower."""
    bins = [Bin(percentile=f"{100 * n // BINS}-{100 * (n + 1) // BINS}") for n in range(BINS)]
    for record in passes:
        values, count = record.deltas if signal == DELTA else record.raw, len(record.masks)
        if count < MIN_MASKS:
            continue
        order = sorted(range(count), key=lambda n: (values[n], n))
        for rank, n in enumerate(order):
            chosen = bins[rank * BINS // count]
            chosen.num_masks += 1
            chosen.num_decided += record.masks[n] in record.decided
    return bins


def concentration(bins: list[Bin]) -> list[float]:
    """Share of all decided masks that lies in each bin, as in figure 13."""
    total = max(1, sum(each.num_decided for each in bins))
    return [each.num_decided / total for each in bins]
