"""Which rows of a block go on behind its first layers (FOCUS); contract in README.md."""

from idlm.kernels.block_eviction.op import block_importance, select_places
from idlm.kernels.block_eviction.reference import (
    LaneState,
    begin_reference,
    finish_reference,
    importance_reference,
    select_reference,
)
from idlm.kernels.block_eviction.state import (
    Begun,
    BlockState,
    FedBlocks,
    StateRules,
    begin_blocks,
    finish_blocks,
)
from idlm.kernels.block_eviction.types import BlockKeys, Candidates, Selected

__all__ = [
    "Begun",
    "BlockKeys",
    "BlockState",
    "Candidates",
    "FedBlocks",
    "LaneState",
    "Selected",
    "StateRules",
    "begin_blocks",
    "begin_reference",
    "block_importance",
    "finish_blocks",
    "finish_reference",
    "importance_reference",
    "select_places",
    "select_reference",
]
