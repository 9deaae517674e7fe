"""Margins of the choices that tests compare: a choice that hangs on rounding fails before it is compared.

Rounding decides a near tie (two tokens or two places that differ by less than `MARGIN`), and it differs
between CPUs, devices and batch sizes. Exact ties have a defined order (infer/decoders/block_unmask.py), which
tests/unit/engine/test_ties.py checks. Every slow reference chooses through this file, and
`tests.contracts.engines.clear_answers` checks an engine that is the reference of another engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TypeVar

MARGIN = 1e-4
"""The smallest difference between what is chosen and what is not: of logits, probabilities, entropies."""
DRAW_MARGIN = 1e-5
"""The smallest distance of a random number from the borders of the token that it draws, in probability."""

Key = TypeVar("Key", bound=Hashable)
Choice = TypeVar("Choice")


class NearTie(AssertionError):
    """The case is unfit for a comparison: give it another prompt or seed."""


def clear_choice(
    choose: Callable[[dict[Key, float]], Choice],
    scores: Mapping[Key, float],
    *,
    exact: Collection[Key] = (),
    margin: float = MARGIN,
) -> Choice:
    """What is chosen by the scores; a `NearTie` where one score that moves by the margin changes the choice.
    The scores of `exact` keys do not move: they have the same bits on every device.
    """
    chosen = choose(dict(scores))
    for key, score in scores.items():
        for moved in () if key in exact else (score - margin, score + margin):
            if choose({**scores, key: moved}) != chosen:
                raise NearTie(f"{key} at {score} is within {margin} of another choice: {dict(scores)}")
    return chosen


def assert_gap(scores: Sequence[float], num: int = 1, *, margin: float = MARGIN) -> None:
    """The `num` largest scores are larger than all others by the margin."""
    ranked = sorted(scores, reverse=True)
    if 0 < num < len(ranked) and ranked[num - 1] - ranked[num] < margin:
        raise NearTie(f"choice {num} is at {ranked[num - 1]}, the next at {ranked[num]}")


def assert_apart(number: float, border: float, *, margin: float = MARGIN) -> None:
    """The number lies clearly on one side of the border."""
    if abs(number - border) < margin:
        raise NearTie(f"{number} is within {margin} of {border}")
