"""MAGE (All-[MASK] Block Already Knows Where to Look, ICML 2026 workshop AdaptFM; equation 3, algorithm 1).

The first pass over a block is exact and ranks the slots before the block: by softmax over these slots of the
scores, averaged over the G * B queries of each KV head. In later passes the block's rows see the k best slots
per (layer, KV head), and all of the block. The pass that stores the clean block is exact; if it also begins
the next block, it ranks the slots it has just written with the others. The first `exact_layers` layers are
always exact.
Departures: a first block that holds a prompt's tail, or a first token, is not all masks and ranks too;
all layers are ranked at once after the last one, not each on a second stream during the layers after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from idlm.infer.accelerators.prefix import PrefixAccelerator, PrefixPass
from idlm.infer.sparse.accelerator import ACCELERATORS, PassView


@dataclass(frozen=True, slots=True, kw_only=True)
class MageConfig:
    """`k`: slots before the block that a KV head selects. `exact_layers`: number of layers that see all."""

    k: int = 512
    exact_layers: int = 2


@ACCELERATORS.register("mage")
class Mage(PrefixAccelerator):
    """Ranks once per block, in its first pass."""

    name: ClassVar[str] = "mage"
    Config: ClassVar[type] = MageConfig
    config: MageConfig

    def begin(self, view: PassView) -> PrefixPass:
        has_set_B = self.sets.memory.is_current(view)
        return PrefixPass(
            view, self.sets, is_sparse_B=view.is_working_B & has_set_B, ranks_B=view.is_working_B & ~has_set_B
        )
