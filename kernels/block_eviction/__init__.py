"""Which rows of a block remain after its first layers (FOCUS); contract in README.md."""

from idlm.kernels.block_eviction.op import begin_blocks, block_importance, finish_blocks, select_positions
from idlm.kernels.block_eviction.types import (
    BlockKeys,
    BlockState,
    Candidates,
    FedBlocks,
    Selected,
    StartedBlocks,
    StateRules,
)
