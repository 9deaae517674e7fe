"""Which rows of a block go on behind its first layers (FOCUS); contract in README.md."""

from idlm.kernels.block_eviction.op import block_importance, select_positions
from idlm.kernels.block_eviction.state import begin_blocks, finish_blocks
from idlm.kernels.block_eviction.types import (
    BlockKeys,
    BlockState,
    Candidates,
    FedBlocks,
    Selected,
    StartedBlocks,
    StateRules,
)
