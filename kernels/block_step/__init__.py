"""Rows and decisions of a block-diffusion pass, as tensors by lane; contract in README.md."""

from idlm.kernels.block_step.op import decide_blocks, pack_blocks
from idlm.kernels.block_step.plain import Positions, positions_of
from idlm.kernels.block_step.resizing import Held, Resizing
from idlm.kernels.block_step.types import (
    NO_EDITS,
    PASSES_BITS,
    RULES,
    BlockLanes,
    BlockShape,
    Masks,
    PackedBlocks,
    PassBlocks,
    Proposed,
    Rules,
    WantedPositions,
)
