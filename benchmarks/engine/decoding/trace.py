"""Drawn outcomes of draft verification, which benchmarks replay: of each test how many drafts passed.

The name `p0.90` means that every draft is accepted with that probability once its predecessors are. 0.90 is
what the authors' published tokens per forward imply by eq. 3: 1.80, 2.48, 2.96, 4.01 at strides 2, 3, 4, 8
give 0.889, 0.909, 0.905, 0.896 (I-DLM, arXiv 2604.11035).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from idlm.errors import UserError

DRAWN_TESTS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """`accepted[i]` of `num_drafts` drafts passed in test i."""

    name: str
    num_drafts: int
    accepted: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Drafts that a test accepts on average."""
        return sum(self.accepted) / len(self.accepted)

    def acceptance(self) -> list[float]:
        """Acceptance per position, given that all previous drafts were accepted."""
        reached = [sum(count >= index for count in self.accepted) for index in range(self.num_drafts + 1)]
        return [after / max(1, before) for before, after in zip(reached, reached[1:])]


def trace_of(name: str, stride: int) -> Trace:
    """The trace `name` (p0.90) for `stride`; raises IDLM-0109."""
    try:
        probability = float(name.removeprefix("p"))
    except ValueError:
        probability = -1.0
    if not name.startswith("p") or not 0.0 <= probability <= 1.0:
        raise UserError("IDLM-0109", f"no trace {name!r}", fix="use p and a probability, as in p0.90")
    return drawn(probability, stride - 1)


def drawn(probability: float, num_drafts: int) -> Trace:
    rng = random.Random(1_000_000 * probability + num_drafts)
    accepted = []
    for _ in range(DRAWN_TESTS):
        count = 0
        while count < num_drafts and rng.random() < probability:
            count += 1
        accepted.append(count)
    return Trace(name=f"p{probability:.2f}", num_drafts=num_drafts, accepted=tuple(accepted))
