"""MAGE (All-[MASK] Block Already Knows Where to Look, ICML 2026 workshop AdaptFM; equation 3, algorithm 1).

A block's first pass is exact and ranks the slots before it: scores softmaxed over these slots, averaged over
the G * B queries of each KV head. The block's other passes see the k best per (layer, KV head), and all of
the block. The pass that stores the clean block is exact; where it also begins the next block, the slots it
has just written are ranked with the others. The first `exact_layers` layers are exact throughout.
Departures: a first block that holds a prompt's tail, or a first token, is not all masks and ranks all the
same; ranking runs in line with the layer, not on a stream of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from idlm.infer.accelerators.base import ACCELERATORS
from idlm.infer.accelerators.prefix import PrefixAccelerator, PrefixPass
from idlm.infer.sparse.view import PassView


@dataclass(frozen=True, slots=True, kw_only=True)
class MageConfig:
    """`k`: slots before the block that a KV head keeps. `exact_layers`: how many layers see all."""

    k: int = 512
    exact_layers: int = 2


@ACCELERATORS.register("mage")
class Mage(PrefixAccelerator):
    """Ranks once a block, in its first pass."""

    name: ClassVar[str] = "mage"
    Config: ClassVar[type] = MageConfig
    config: MageConfig

    def begin(self, view: PassView) -> PrefixPass:
        """Whoever has no set yet makes one."""
        has_set_B = self.sets.memory.knows(view)
        return PrefixPass(
            view,
            self.sets,
            is_sparse_B=view.is_working_B & has_set_B,
            ranks_B=view.is_working_B & ~has_set_B,
        )
