"""SparseD (Sparse Attention for Diffusion Language Models, ICLR 2026), as MAGE's paper adapts it to blocks.

The first 20 % of a block's steps are exact. The last of them ranks the slots before the block; in later steps
the block's rows see the k best slots of each KV head, and all of the block. As in MAGE, scores are averaged
over the block's queries, here divided by sqrt(head dim) (the published LLaDA file divides by sqrt(number of
heads)).
Departure: the paper counts the steps of a whole answer and captures its pattern once. Here the steps are
those of the block, because state ends with its block: an answer must not depend on when its sequence was
preempted. So each block gets a fresh pattern, which flatters SparseD. Steps are those of the quota: with a
threshold a block may need fewer, and a block that is clean within 20 % of them is computed exactly
throughout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from idlm.infer.accelerators.prefix import PrefixAccelerator, PrefixPass
from idlm.infer.sparse.accelerator import ACCELERATORS, PassView

ROUNDING = 1e-9
"""0.2 * 15 is a little above 3 in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsedConfig:
    """`k`: slots before the block that a KV head selects. `exact_share`: share of the block's steps, rounded
    up and at least one, that see all. `exact_layers`: number of layers that always do."""

    k: int = 512
    exact_share: float = 0.2
    exact_layers: int = 2


@ACCELERATORS.register("sparsed")
class SparseD(PrefixAccelerator):
    """Ranks once per block, in the last of its exact passes."""

    name: ClassVar[str] = "sparsed"
    Config: ClassVar[type] = SparsedConfig
    config: SparsedConfig

    def problems(self) -> list[str]:
        found, share = super().problems(), self.config.exact_share
        if not (math.isfinite(share) and 0 < share <= 1):
            found.append(f"exact_share={share!r} is not in (0, 1]")
        return found

    def begin(self, view: PassView) -> PrefixPass:
        """Sequences at their last exact step rank."""
        working_B, has_set_B = view.is_working_B, self.sets.memory.is_current(view)
        share_B = view.active.num_steps_B.double() * self.config.exact_share - ROUNDING
        num_exact_B = torch.ceil(share_B).long().clamp(min=1)
        is_last_B = view.active.num_passes_B >= num_exact_B - 1
        ranks_B = working_B & ~has_set_B & is_last_B
        return PrefixPass(view, self.sets, is_sparse_B=working_B & has_set_B, ranks_B=ranks_B)
