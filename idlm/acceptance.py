"""Expected tokens per forward pass from the acceptance rate of each draft position, in closed form.

The accept/residual rule itself is in `kernels/sampling` (`drafts.py`). `acceptance_J[j]` is the
probability that draft j+1 is accepted after all before it were; J draft positions."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence


def cumulative_acceptance(acceptance_J: Sequence[float]) -> list[float]:
    """Return P_1..P_J: the probability that the first k drafts are all accepted."""
    return list(itertools.accumulate(acceptance_J, operator.mul))


def tokens_per_forward_cold(acceptance_J: Sequence[float]) -> float:
    """Return (2 + P_1 + .. + P_{N-2}) / (2 - P_{N-1}), the paper's eq. 3 (arXiv 2604.11035); J = N-1
    positions."""
    if not acceptance_J:
        return 1.0
    products = cumulative_acceptance(acceptance_J)
    return (2.0 + sum(products[:-1])) / (2.0 - products[-1])


def tokens_per_forward_branch(acceptance_J: Sequence[float]) -> float:
    """Return 1 + P_1 + .. + P_{N-1}: every rejection point has masks of its own, so no pass only drafts."""
    return 1.0 + sum(cumulative_acceptance(acceptance_J))
