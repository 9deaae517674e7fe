"""Margins of the choices that tests compare: a choice that hangs on rounding fails before it is compared.

Rounding decides a near tie (two tokens or two positions that differ by less than `MARGIN`), and it differs
between CPUs, devices and batch sizes. Exact ties have a defined order (infer/decoders/block_config.py), which
tests/unit/engine/test_ties.py checks. Every slow reference chooses through this file, and
`tests.contracts.engines.clear_answers` checks an engine that is the reference of another engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

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
    The scores of `exact` keys do not move: they have the same bits on every device."""
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


@functools.cache
def rows_keep_bits() -> bool:
    """Whether products of this CPU give a row the same bits in any number of rows, in MKL's strict mode."""
    generator = torch.Generator().manual_seed(0)
    for D, E in ((32, 48), (128, 96), (64, 300)):
        x_RD, weight_ED = (torch.randn(n, D, generator=generator) for n in (300, E))
        whole_RE = torch.nn.functional.linear(x_RD, weight_ED)
        for num in (*range(1, 65), 100):
            for first in (0, 7):
                rows = slice(first, first + num)
                if not torch.equal(torch.nn.functional.linear(x_RD[rows], weight_ED), whole_RE[rows]):
                    return False
    return True


def assert_same_rows(found_RE: Tensor, expected_RE: Tensor) -> None:
    """Compare float32 results of passes of other sizes: bit for bit where the CPU allows it."""
    if rows_keep_bits():
        assert torch.equal(found_RE, expected_RE)
    torch.testing.assert_close(found_RE, expected_RE, atol=1e-4, rtol=0)
