"""Which rows of a block go on behind its first layers (FOCUS); contract in README.md."""

from idlm.kernels.block_eviction.op import block_importance, select_places
from idlm.kernels.block_eviction.reference import importance_reference, select_reference
from idlm.kernels.block_eviction.types import BlockKeys, Candidates, Selected

__all__ = [
    "BlockKeys",
    "Candidates",
    "Selected",
    "block_importance",
    "importance_reference",
    "select_places",
    "select_reference",
]
