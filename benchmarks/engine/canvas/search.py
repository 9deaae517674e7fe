"""The longest canvas that a probe accepts, by bisection from a guess."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

FIRST_STEP = 0.02
"""The first distance from the guess, as a share of it; it doubles until both bounds are known."""
TOLERANCE = 0.004
"""The search ends when the bounds are this close, as a share of the length."""
MIN_TOLERANCE = 32


@dataclass(slots=True)
class Search:
    """Probes in order; `too_long` is None while every probe succeeded, `fits` 0 while none did."""

    fits: int = 0
    too_long: int | None = None
    probes: list[tuple[int, bool]] = field(default_factory=list)

    def try_length(self, probe: Callable[[int], bool], length: int) -> None:
        """Probe one length and narrow the bounds."""
        is_fit = probe(length)
        self.probes.append((length, is_fit))
        if is_fit:
            self.fits = max(self.fits, length)
        else:
            self.too_long = length if self.too_long is None else min(self.too_long, length)


def longest(
    probe: Callable[[int], bool],
    *,
    guess: int,
    shortest: int = 64,
    limit: int = 1 << 24,
    tolerance: float = TOLERANCE,
    max_probes: int = 40,
) -> Search:
    """Bisect for the longest length that `probe` accepts, to `tolerance` of it.

    A probe that accepts a length is taken to accept all shorter ones. Starting at the guess, steps double
    until one length fits and one does not. Nothing below `shortest` or above `limit` is tried.
    """
    search, step = Search(), FIRST_STEP
    length = min(limit, max(shortest, guess))
    while len(search.probes) < max_probes:
        search.try_length(probe, length)
        if search.too_long is None:
            if search.fits >= limit:
                break
            length = min(limit, max(length + 1, round(search.fits * (1 + step))))
        elif not search.fits:
            if search.too_long <= shortest:
                break
            length = max(shortest, min(search.too_long - 1, round(search.too_long * (1 - step))))
        else:
            gap = search.too_long - search.fits
            if gap <= max(MIN_TOLERANCE, round(tolerance * search.fits)):
                break
            length = search.fits + gap // 2
        step = min(1.0, 2 * step)
    return search
