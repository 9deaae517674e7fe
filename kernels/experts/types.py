"""How rows choose experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIN_SUM = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How rows choose experts. `is_normalised`: divide the weights of the chosen experts by their sum.

    `capacity`: the rows of a block, `block_size` consecutive positions of one sequence, first admit so many
    experts together, those whose largest score (bias included) among these rows is highest, and choose among
    them (LLaDA2.2; sgl-project/sglang, pull requests 31743 and 31768); None: every row chooses among all. Not
    with groups."""

    num_chosen: int
    score: Literal["softmax", "sigmoid"]
    is_normalised: bool
    scaling: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    capacity: int | None = None
    block_size: int = 1

    def __post_init__(self) -> None:
        assert self.capacity is None or (self.num_groups == 1 and self.capacity >= self.num_chosen), (
            f"{self=}"
        )
