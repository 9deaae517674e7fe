"""SparseD (Sparse Attention for Diffusion Language Models, ICLR 2026), as MAGE's paper adapts it to blocks.

The first 20 % of a block's steps are exact; the last of them ranks the slots before the block, and the steps
behind it see the k best of each KV head, and all of the block. A ranking averages over the block's queries
as MAGE's does, of scores divided by sqrt(head dim) (the published LLaDA file: by sqrt(number of heads)).
Departure: there, steps are those of a whole answer, whose pattern is captured once. Here they are the block's
own, since what is kept ends with its block: an answer must not depend on when its sequence was preempted.
Each block thus gets a fresh pattern, which flatters SparseD. Steps are the quota's: a threshold may need
fewer, and a block that is clean within 20 % of them is never thinned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from idlm.infer.accelerators.base import ACCELERATORS
from idlm.infer.accelerators.prefix import PrefixAccelerator, PrefixPass
from idlm.infer.sparse.view import PassView

ROUNDING = 1e-9
"""0.2 * 15 is a little above 3 in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsedConfig:
    """`k`: slots before the block that a KV head keeps. `exact_share` of the block's steps, rounded up, one
    at least, see all. `exact_layers`: how many layers always do.
    """

    k: int = 512
    exact_share: float = 0.2
    exact_layers: int = 2


@ACCELERATORS.register("sparsed")
class SparseD(PrefixAccelerator):
    """Ranks once a block, in the last of its exact passes."""

    name: ClassVar[str] = "sparsed"
    Config: ClassVar[type] = SparsedConfig
    config: SparsedConfig

    def problems(self) -> list[str]:
        """Those of all such, and of the share."""
        found, share = super().problems(), self.config.exact_share
        if not (math.isfinite(share) and 0 < share <= 1):
            found.append(f"exact_share={share!r} is not in (0, 1]")
        return found

    def begin(self, view: PassView) -> PrefixPass:
        """Whoever is at its last exact step makes a set."""
        has_set_B = self.sets.memory.knows(view)
        is_last_B = view.active.num_passes_B >= self._num_exact(view.active.num_steps_B) - 1
        return PrefixPass(
            view,
            self.sets,
            is_sparse_B=view.is_working_B & has_set_B,
            ranks_B=view.is_working_B & ~has_set_B & is_last_B,
        )

    def _num_exact(self, num_steps_B: Tensor) -> Tensor:
        """Exact steps of a block of so many."""
        share_B = num_steps_B.double() * self.config.exact_share - ROUNDING
        return torch.ceil(share_B).long().clamp(min=1)
