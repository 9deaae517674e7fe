"""Block diffusion: passes over a block of masks decide some of them each, until it is clean; then its KV is
stored, by the pass that begins the next one.

SDAR (arXiv 2510.06303, logits in place) and Fast-dLLM v2 (arXiv 2509.26328, logits shifted inside the block,
whose first token is drawn from the last row of the clean block before). Blocks are counted from position 0;
a prompt's tail stands fixed in the first. Every sequence is at a step of its own.
Departures: the MASK is never a prediction; the first token of a shifted block obeys the request's own law,
not always the argmax; a greedy request's confidence is under the model's own law (one-hot laws have none).
Shapes: B sequences, W positions of a block, X = B * W wanted rows, V vocabulary, Z lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from idlm.contracts import StepOutcome, StepPlan
from idlm.errors import UserError
from idlm.infer.decoders.base import DECODERS, Batch, Feeding, PictureName
from idlm.infer.decoders.block_rows import BlockLanes, BlockShape, pack_blocks
from idlm.infer.decoders.block_unmask import UNMASKINGS, Masks, entropies, first_part, forbid
from idlm.infer.table import SequenceTable
from idlm.kernels.sampling import Laws, draw, probability, row_laws, uniforms
from idlm.semantics import Semantics

CONFIDENCES = ("law", "model")
PASSES_BITS = 16
"""The random stream's step is the block's number, then this many bits for the pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """`strategy`: which masks a pass decides. `steps` sets the quota, block size / steps a pass; None: one.
    `threshold`: of low_confidence_dynamic; `entropy_bound` (nats): of entropy_bounded. `sub_block_size`:
    masks are decided in parts of so many positions, left to right (Fast-dLLM v2: 8). `confidence`: the drawn
    token's probability under the request's "law" (after temperature and truncation, as published), or under
    the "model"'s own. `fused_commit`: store a clean block in the pass that begins the next one.
    """

    strategy: str = "low_confidence_dynamic"
    steps: int | None = None
    threshold: float = 0.9
    entropy_bound: float = 0.35
    sub_block_size: int | None = None
    confidence: str = "law"
    fused_commit: bool = True


@DECODERS.register("block")
class BlockDecoder:
    """Per lane: the block in work."""

    name: ClassVar[str] = "block"
    Config: ClassVar[type] = BlockConfig
    exactness = "exact"

    def __init__(self, config: BlockConfig, semantics: Semantics) -> None:
        size, mask_token_id = semantics.block_size, semantics.mask_token_id
        if semantics.causality != "block" or size is None or mask_token_id is None:
            raise UserError(
                "IDLM-0450",
                f"decoder block needs a block-causal checkpoint; this one has causality="
                f"{semantics.causality!r}, block_size={size}, mask_token_id={mask_token_id}",
                fix="say all three in idlm_config.json if the model is one, else use decoder=ar or isd",
            )
        _check(config, size)
        self.config = config
        self.shape = BlockShape(
            size=size,
            mask_token_id=mask_token_id,
            shifted=semantics.logit_shift,
            fuses=config.fused_commit,
        )
        self._strategy = UNMASKINGS.get(config.strategy)(
            threshold=config.threshold, entropy_bound=config.entropy_bound
        )
        self.pictures: tuple[PictureName, ...] = (PictureName(stride=size, strategy=config.strategy),)
        self.widths: tuple[int, ...] = (size,)
        self.feeding = Feeding(grain=size, num_pending=0)

    def allocate(self, num_lanes: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """A block per lane."""
        self.blocks = BlockLanes.empty(num_lanes, self.shape.size, device)

    def seat(self, lanes: list[int]) -> None:
        """The new sequences have decided nothing."""
        self.blocks.is_decided_ZW[lanes] = False
        self.blocks.num_passes_Z[lanes] = 0

    def plan(self, table: SequenceTable, batch: Batch) -> StepPlan:
        """Whole known blocks that are not stored yet, then the block in work."""
        return pack_blocks(table, batch, self.blocks, self.shape)

    def advance(self, table: SequenceTable, batch: Batch, plan: StepPlan, logits_XV: Tensor) -> StepOutcome:
        """Draw a token for every open mask, decide some, and emit the blocks that are clean by that."""
        lanes_B, size = plan.lanes_B, self.shape.size
        known_B = table.num_known_Z[lanes_B]
        place_W = torch.arange(size, device=table.device)
        num_fixed_B = known_B % size
        is_fixed_BW = place_W < num_fixed_B[:, None]
        is_decided_BW = self.blocks.is_decided_ZW[lanes_B]
        is_open_BW = plan.samples_B[:, None] & ~is_fixed_BW & ~is_decided_BW
        # The last row of a stored block predicts one place, no other row does anything then.
        opens_B = (plan.num_feed_B > 0) & self.shape.shifted
        is_open_BW &= ~opens_B[:, None] | (place_W == 0)
        drawn_BW, masks = self._draw(table, batch, plan, logits_XV, is_open_BW, opens_B)
        chosen_BW = torch.where(opens_B[:, None], is_open_BW, self._strategy.choose(masks))
        tokens_BW = torch.where(chosen_BW, drawn_BW, self.blocks.tokens_ZW[lanes_B])
        is_decided_BW |= chosen_BW
        is_clean_B = plan.samples_B & (is_decided_BW | is_fixed_BW).all(-1)
        num_passes_B = self.blocks.num_passes_Z[lanes_B] + (plan.samples_B & ~opens_B)
        self.blocks.tokens_ZW[lanes_B] = tokens_BW
        self.blocks.is_decided_ZW[lanes_B] = is_decided_BW & ~is_clean_B[:, None]
        self.blocks.num_passes_Z[lanes_B] = torch.where(is_clean_B, 0, num_passes_B)
        emitted_BW = tokens_BW.gather(1, (place_W + num_fixed_B[:, None]).clamp(max=size - 1))
        num_emitted_B = torch.where(is_clean_B, size - num_fixed_B, 0)
        table.commit(lanes_B, emitted_BW, num_emitted_B, plan.num_feed_B)
        none_B = torch.zeros_like(num_emitted_B)
        return StepOutcome(
            token_ids_BJ=emitted_BW, num_emitted_B=num_emitted_B, num_accepted_B=none_B, num_tested_B=none_B
        )

    def _draw(
        self,
        table: SequenceTable,
        batch: Batch,
        plan: StepPlan,
        logits_XV: Tensor,
        is_open_BW: Tensor,
        opens_B: Tensor,
    ) -> tuple[Tensor, Masks]:
        """A token for every open mask, and what strategies look at."""
        lanes_B, size = plan.lanes_B, self.shape.size
        num_passes_B = self.blocks.num_passes_Z[lanes_B]
        forbid(logits_XV, self.shape.mask_token_id)
        rows_BW = plan.first_logit_B[:, None] + torch.arange(size, device=table.device)
        rows_BW = torch.where(is_open_BW, rows_BW, -1)
        # By block and pass, so that a block begun anew is the same again. Pass 0: a shifted block's first.
        block_B = table.num_known_Z[lanes_B] // size
        step_B = (block_B << PASSES_BITS) + torch.where(opens_B, 0, 1 + num_passes_B)
        uniforms_BW = uniforms(table.seeds_Z[lanes_B], table.samples_Z[lanes_B], step_B, size)
        laws = table.laws(logits_XV, lanes_B, batch.filters)
        drawn_BW = draw(laws, rows_BW.flatten(), uniforms_BW.flatten()).view(rows_BW.shape)
        judges = self._judges(table, batch, logits_XV, lanes_B)
        entropy_X = entropies(logits_XV) if self._strategy.needs_entropy else None
        base, extra = divmod(size, self.config.steps or size)
        part_size = self.config.sub_block_size
        return drawn_BW, Masks(
            is_open_BW=is_open_BW if part_size is None else first_part(is_open_BW, part_size),
            confidence_BW=probability(judges, rows_BW, drawn_BW),
            entropy_BW=None if entropy_X is None else entropy_X.view(rows_BW.shape),
            quota_B=base + (num_passes_B < extra).long(),
        )

    def _judges(self, table: SequenceTable, batch: Batch, logits_XV: Tensor, lanes_B: Tensor) -> Laws:
        """The laws under which drawn tokens are more or less certain."""
        is_own_Z = table.temperature_Z == 0
        if self.config.confidence == "model":
            is_own_Z = torch.ones_like(is_own_Z)
        return row_laws(
            logits_XV,
            torch.where(is_own_Z, 1.0, table.temperature_Z),
            torch.where(is_own_Z, 0, table.top_k_Z),
            torch.where(is_own_Z, 1.0, table.top_p_Z),
            torch.where(is_own_Z, 0.0, table.min_p_Z),
            filters=batch.filters and self.config.confidence == "law",
            lanes_B=lanes_B,
        )


def _check(config: BlockConfig, size: int) -> None:
    """UserError IDLM-0451 for options out of range."""
    steps, part_size = config.steps, config.sub_block_size
    problems = [
        text
        for text, is_bad in (
            (
                f"steps={steps!r} is not in [1, {size}], the block size",
                steps is not None and not 1 <= steps <= size,
            ),
            (
                f"sub_block_size={part_size!r} does not divide the block size {size}",
                part_size is not None and (part_size < 1 or size % part_size != 0),
            ),
            (f"threshold={config.threshold!r} is not in [0, 1]", not 0 <= config.threshold <= 1),
            (f"entropy_bound={config.entropy_bound!r} is below 0", not config.entropy_bound >= 0),
            (
                f"confidence={config.confidence!r} is not one of {CONFIDENCES}",
                config.confidence not in CONFIDENCES,
            ),
        )
        if is_bad
    ]
    if problems:
        raise UserError("IDLM-0451", "; ".join(problems), fix="correct the decoder options named")
