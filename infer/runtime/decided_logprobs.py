"""Log-probabilities of decided tokens: a token is emitted some passes after it was decided, so the numbers of
the pass that decided it are kept.

Shapes: B sequences, W positions of a block, X wanted rows, V vocabulary, Z lanes, K likeliest tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from idlm.infer.decoders.block_rows import deciding
from idlm.infer.runtime.logprobs import Logprobs, token_logprobs
from idlm.infer.state.batch import StepPlan
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.block_step import BlockLanes, BlockShape, Proposed

MAX_TOP = 20
"""Alternatives of a token that are kept at most."""


class DecidedScores:
    """Per lane, those of the tokens [Z, W] of the active block, and of the likeliest ones [Z, W, K]."""

    def __init__(self, blocks: BlockLanes, shape: BlockShape, vocab_size: int) -> None:
        self._blocks, self._shape = blocks, shape
        sizes, maximum = (*blocks.tokens_ZW.shape,), min(MAX_TOP, vocab_size)
        self._kept = Logprobs(
            blocks.tokens_ZW.new_zeros(sizes, dtype=torch.float64),
            blocks.tokens_ZW.new_zeros((*sizes, maximum)),
            blocks.tokens_ZW.new_zeros((*sizes, maximum), dtype=torch.float64),
        )

    def begin(self, table: SequenceState, plan: StepPlan, is_read_BW: Tensor) -> None:
        """Remember the active blocks before a pass decides, which may use the proposals of `is_read_BW`."""
        lanes_B, blocks = plan.lanes_B, self._blocks
        self._before = blocks.tokens_ZW[lanes_B], blocks.is_decided_ZW[lanes_B], is_read_BW
        self._num_fixed_B = table.num_known_Z[lanes_B] % self._shape.size

    def note(
        self, plan: StepPlan, logits_XV: Tensor, proposed: Proposed, num_emitted_B: Tensor, *, num_top: int
    ) -> Logprobs:
        """Keep the numbers of what the pass has decided or rewritten; returns those of the emitted tokens."""
        lanes_B, blocks, wanted = plan.lanes_B, self._blocks, deciding(plan).wanted
        (tokens_before_BW, decided_before_BW, is_read_BW), tokens_BW = self._before, blocks.tokens_ZW[lanes_B]
        decided_BW = blocks.is_decided_ZW[lanes_B] | (num_emitted_B > 0)[:, None]
        is_new_BW = decided_BW & (~decided_before_BW | (tokens_BW != tokens_before_BW)) & is_read_BW
        # The MASK is never predicted.
        logits_XV = logits_XV.clone()
        logits_XV[:, self._shape.mask_token_id] = -math.inf
        ids_X = proposed.token_ids_BW.flatten()[wanted.positions_X]
        scored = token_logprobs(logits_XV, ids_X, num_top=self._kept.top.shape[-1])
        number_BW = wanted.number_BW.clamp(min=0)
        for kept, values in zip(self._kept, scored, strict=True):
            is_new = is_new_BW if kept.ndim == 2 else is_new_BW[..., None]
            kept[lanes_B] = torch.where(is_new, values[number_BW], kept[lanes_B])
        return self._emitted(lanes_B, num_top=num_top)

    def _emitted(self, lanes_B: Tensor, *, num_top: int) -> Logprobs:
        """Those of the tokens after the fixed ones, [B, W]."""
        size = self._shape.size
        index_W = torch.arange(size, device=lanes_B.device)
        positions_BW = (index_W + self._num_fixed_B[:, None]).clamp(max=size - 1)
        chosen_BW = self._kept.chosen[lanes_B].gather(1, positions_BW)
        positions_BW1 = positions_BW[..., None]
        ids_BWK = torch.take_along_dim(self._kept.top_ids[lanes_B], positions_BW1, dim=1)
        top_BWK = torch.take_along_dim(self._kept.top[lanes_B], positions_BW1, dim=1)
        return Logprobs(chosen_BW, ids_BWK[..., :num_top], top_BWK[..., :num_top])
