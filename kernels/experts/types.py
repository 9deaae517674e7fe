"""How rows choose their experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Parameters of the router. `is_normalised`: divide the weights of the chosen experts by their sum."""

    num_chosen: int
    score: Literal["softmax", "sigmoid"]
    is_normalised: bool
    scaling: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
