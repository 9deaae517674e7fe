"""How often drafts are accepted: by position, of late, and of each request against all.

What was seen long ago counts half, or not at all once tests contradict it: text may turn from hard to easy.
Only tests of committed passes count, never the drafts that are still to be tested."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

PRIOR_ACCEPTANCE = 0.85
"""Assumed acceptance of a draft that nothing is known of; it weighs as much as `PRIOR_WEIGHT` tests."""
PRIOR_WEIGHT = 16
MAX_REMEMBERED_DRAFTS = 4096
"""After this many tests of a draft position, the older ones are halved."""
REQUEST_WEIGHT = 32
"""A request counts as an average one as much as so many of its own tests."""
LOG_ODDS_STEP, MAX_LOG_ODDS_STEPS = 0.25, 20
"""Requests are sorted into classes of acceptance."""
MIN_CHANGE = 0.004
"""Classes follow the average once it has moved by this much at a position: modes must be compared anew."""
MIN_WINDOW, MAX_WINDOW = 8, 64
"""Tests that together may contradict the earlier ones."""
CONTRADICTION = 5.0
"""Standard deviations by which they differ then: by chance that happens once in 10^5 windows."""


class _Drafts:
    """Numbers of tested and of accepted drafts; after many tests the older ones count half."""

    __slots__ = ("accepted", "tested")

    def __init__(self, tested: float = 0.0, accepted: float = 0.0) -> None:
        self.tested, self.accepted = tested, accepted

    def add(self, accepted: int, tested: int) -> None:
        if self.tested >= MAX_REMEMBERED_DRAFTS:
            self.tested /= 2
            self.accepted /= 2
        self.tested += tested
        self.accepted += accepted

    def acceptance(self, expected: float) -> float:
        """The accepted share, close to `expected` while few are tested."""
        return (self.accepted + PRIOR_WEIGHT * expected) / (self.tested + PRIOR_WEIGHT)


def _total(all_drafts: Sequence[_Drafts]) -> _Drafts:
    return _Drafts(sum(each.tested for each in all_drafts), sum(each.accepted for each in all_drafts))


class DraftAcceptance:
    """Estimates from tests of drafts for the next ones. `prior`: expected by position before any test."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = prior
        self._all, self._from_masks = _Drafts(), [_Drafts() for _ in prior]
        self._passes: dict[tuple[int, int], int] = {}
        """Passes by accepted and tested drafts that no position counts yet."""
        self._set_average(list(prior))
        self._compared = self._average
        self._begin_window()

    def _begin_window(self) -> None:
        """Forget the tests that may contradict the earlier ones."""
        self._window = [_Drafts() for _ in self._prior]
        self._num_tests, self._surprise, self._variance = 0, 0.0, 0.0

    def observe(self, num_accepted: int, num_tested: int, *, from_masks: bool) -> None:
        """Record drafts of one sequence, the first `num_accepted` of which were accepted. Those that are not
        from masks pass less often, and are no measure of what other modes would accept."""
        self._all.add(num_accepted, num_tested)
        if not from_masks or not num_tested:
            return
        drafts = num_accepted, num_tested
        self._passes[drafts] = self._passes.get(drafts, 0) + 1
        self._num_tests += num_tested
        self._surprise += num_accepted - self._expected[num_tested]
        self._variance += self._spread[num_tested]
        # 1 is added because tests of sure drafts hardly show how much they vary.
        bound = CONTRADICTION * math.sqrt(1 + self._variance)
        if self._num_tests >= MIN_WINDOW and abs(self._surprise) > bound:
            self._count()
            self._from_masks = self._window
            self._all = _total(self._window)
            self._begin_window()
            self.average()
        elif self._num_tests >= MAX_WINDOW:
            self._count()
            self._begin_window()

    def _count(self) -> None:
        """Count the latest passes by position."""
        for (num_accepted, num_tested), count in self._passes.items():
            for position in range(num_tested):
                for drafts in (self._from_masks[position], self._window[position]):
                    drafts.add(count * (position < num_accepted), count)
        self._passes, self._is_old = {}, True

    def _set_average(self, average: list[float]) -> None:
        """`average`; and of so many tests, the expected number of accepted drafts and its variance."""
        self._average, self._is_old = average, False
        self._expected = [0.0, *accumulate(average)]
        self._spread = [0.0, *accumulate(chance * (1 - chance) for chance in average)]

    def average(self) -> list[float]:
        """By position: the chance of a draft to be accepted once those before it were. Few tests of a
        position count together with those of all positions."""
        if self._passes:
            self._count()
        if self._is_old:
            expected, all_drafts = self._prior[0], _total(self._from_masks)
            shift = _log_odds(all_drafts.acceptance(expected)) - _log_odds(expected)
            pairs = zip(self._from_masks, self._prior, strict=True)
            self._set_average([drafts.acceptance(_shifted(chance, shift)) for drafts, chance in pairs])
        return self._average

    def classes(self, requests: Sequence[tuple[float, float]]) -> dict[tuple[float, ...], int]:
        """How many of the requests, by accepted and tested drafts of each, have which chances by position.
        They hardly vary from pass to pass: what was computed of them serves again."""
        mean = self._all.acceptance(self._prior[0])
        own_prior, mean_odds = REQUEST_WEIGHT * mean, _log_odds(mean)
        bounds = [
            _chance(mean_odds + LOG_ODDS_STEP * (step + 0.5))
            for step in range(-MAX_LOG_ODDS_STEPS, MAX_LOG_ODDS_STEPS)
        ]
        rates = [(accepted + own_prior) / (tested + REQUEST_WEIGHT) for accepted, tested in requests]
        found = Counter([bisect_right(bounds, rate) for rate in rates]) or {MAX_LOG_ODDS_STEPS: 1}
        average = self.average()
        if any(abs(new - old) > MIN_CHANGE for new, old in zip(average, self._compared, strict=True)):
            self._compared = average
        return {
            _rounded(self._compared, LOG_ODDS_STEP * (step - MAX_LOG_ODDS_STEPS)): count
            for step, count in found.items()
        }


def _rounded(chances: Sequence[float], shift: float) -> tuple[float, ...]:
    return tuple(round(256 * _shifted(chance, shift)) / 256 for chance in chances)


def _log_odds(chance: float) -> float:
    """ln(p / (1 - p)), finite also for what never or always happens."""
    chance = min(1 - 1e-4, max(1e-4, chance))
    return math.log(chance / (1 - chance))


def _chance(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))


def _shifted(chance: float, shift: float) -> float:
    return chance if shift == 0 else _chance(_log_odds(chance) + shift)
