"""Block diffusion: passes over a block of masks decide some of them each, until it is clean; then its KV is
stored, by the pass that begins the next one.

SDAR (arXiv 2510.06303, logits in place), Fast-dLLM v2 (arXiv 2509.26328, logits shifted inside the block,
whose first token is drawn from the last row of the clean block before) and LLaDA2.x, of which 2.1 also edits
what is decided. Blocks are counted from position 0; a prompt's tail stands fixed in the first. Every sequence
is at a step of its own.
Departures: the MASK is never a prediction; the first token of a shifted block obeys the request's own law,
not always the argmax; a greedy request's confidence is under the model's own law (one-hot laws have none); an
edit writes the argmax whatever the temperature, or it would never come to rest.
Shapes: B sequences, W positions of a block, X = B * W wanted rows, V vocabulary, Z lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from idlm.contracts import BlocksInWork, StepOutcome, StepPlan
from idlm.errors import UserError
from idlm.infer.decoders.base import DECODERS, Batch, Feeding, PictureName, request_config
from idlm.infer.decoders.block_config import NO_EDITS, REQUEST_OPTIONS, BlockConfig, LaneOptions, check
from idlm.infer.decoders.block_rows import BlockLanes, BlockShape, fed_places, pack_blocks
from idlm.infer.decoders.block_unmask import UNMASKINGS, Masks, entropies, first_part, forbid
from idlm.infer.table import SequenceTable
from idlm.kernels.sampling import Laws, draw, probability, row_laws, uniforms
from idlm.semantics import Semantics

PASSES_BITS = 16
"""The random stream's step is the block's number, then this many bits for the pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Of the block in work, bool [B, W]: `fixed` ones are known, `decided` ones not yet, `open` ones may be
    decided and `editable` ones rewritten in this pass. `opens_B`: it only begins a shifted block.
    """

    fixed_BW: Tensor
    decided_BW: Tensor
    open_BW: Tensor
    editable_BW: Tensor | None
    opens_B: Tensor


@DECODERS.register("block")
class BlockDecoder:
    """Per lane: the block in work, and options of the request's own."""

    name: ClassVar[str] = "block"
    Config: ClassVar[type] = BlockConfig

    def __init__(self, config: BlockConfig, semantics: Semantics) -> None:
        size, mask_token_id = semantics.block_size, semantics.mask_token_id
        if semantics.causality != "block" or size is None or mask_token_id is None:
            raise UserError(
                "IDLM-0450",
                f"decoder block needs a block-causal checkpoint; this one has causality="
                f"{semantics.causality!r}, block_size={size}, mask_token_id={mask_token_id}",
                fix="say all three in idlm_config.json if the model is one, else use decoder=ar or isd",
            )
        check(config, size)
        self.config = config
        self.exactness = "lossy" if config.dual_cache else "exact"
        self.shape = BlockShape(
            size=size,
            mask_token_id=mask_token_id,
            shifted=semantics.logit_shift,
            fuses=config.fused_commit,
            reused_part=config.sub_block_size if config.dual_cache else None,
        )
        self._strategy = UNMASKINGS.get(config.strategy)()
        self._edits = config.sure_edit < NO_EDITS
        self.pictures: tuple[PictureName, ...] = (PictureName(stride=size, strategy=config.strategy),)
        self.widths: tuple[int, ...] = (size,)
        self.feeding = Feeding(grain=size, num_pending=0)

    def configure(self, options: Mapping[str, Any]) -> BlockConfig:
        """See `Decoder.configure`. Edits cannot begin in an engine that has none: its passes do not look."""
        config: BlockConfig = request_config(self.name, self.config, options, REQUEST_OPTIONS)
        try:
            check(config, self.shape.size)
        except UserError as error:
            raise UserError("IDLM-0453", f"decoder_options: {error.message}", fix=error.fix) from error
        if config.sure_edit < NO_EDITS and not self._edits:
            raise UserError(
                "IDLM-0453",
                f"decoder_options: edit_threshold={config.edit_threshold!r}, but this engine has no edits",
                fix="build it with decoder.edit_threshold= or decoder.mode=quality, or leave it out",
            )
        return config

    def allocate(self, num_lanes: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """A block per lane."""
        self.blocks = BlockLanes.empty(num_lanes, self.shape.size, device)
        self.options = LaneOptions.empty(num_lanes, device)

    def seat(self, lanes: list[int], options: Sequence[Mapping[str, Any]]) -> None:
        """The new sequences have decided nothing."""
        self.blocks.reset(lanes)
        configs = [self.configure(given) if given else self.config for given in options]
        self.options.seat(lanes, configs, block_size=self.shape.size)

    def rewind(self, lanes: list[int]) -> None:
        """Their blocks begin anew, and come out the same: what parts of a block or an accelerator have kept
        of earlier passes is gone.
        """
        self.blocks.reset(lanes)

    def plan(self, table: SequenceTable, batch: Batch) -> StepPlan:
        """Whole known blocks that are not stored yet, then the block in work."""
        lanes_B, size = batch.lanes_B, self.shape.size
        plan, known_B = pack_blocks(table, batch, self.blocks, self.shape), table.num_known_Z[lanes_B]
        work = BlocksInWork(
            starts_B=known_B // size * size,
            open_BW=self._open(known_B, plan),
            num_passes_B=self.blocks.num_passes_Z[lanes_B],
            num_steps_B=self.options.steps_Z[lanes_B],
            size=size,
        )
        return replace(plan, work=work)

    def advance(self, table: SequenceTable, batch: Batch, plan: StepPlan, logits_XV: Tensor) -> StepOutcome:
        """Draw a token for every open mask, decide some, and emit the blocks that are clean by that."""
        lanes_B, size, blocks = plan.lanes_B, self.shape.size, self.blocks
        known_B = table.num_known_Z[lanes_B]
        places = self._places(known_B, plan)
        tokens_BW = blocks.tokens_ZW[lanes_B]
        proposed_BW, masks = self._propose(table, batch, plan, logits_XV, places)
        chosen_BW = torch.where(places.opens_B[:, None], places.open_BW, self._strategy.choose(masks))
        is_clean_B = plan.samples_B & (places.decided_BW | places.fixed_BW | chosen_BW).all(-1)
        if places.editable_BW is not None:
            sure_B1 = self.options.edit_threshold_Z[lanes_B, None]
            edited_BW = places.editable_BW & (proposed_BW != tokens_BW) & (masks.confidence_BW > sure_B1)
            is_clean_B &= self._is_settled(plan, places, edited_BW)
            chosen_BW = chosen_BW | edited_BW
        tokens_BW = torch.where(chosen_BW, proposed_BW, tokens_BW)
        num_passes_B = blocks.num_passes_Z[lanes_B] + (plan.samples_B & ~places.opens_B)
        if self.shape.reused_part is not None:
            fed = fed_places(blocks, lanes_B, known_B, plan.num_feed_B, self.shape)
            part_B = torch.where(plan.samples_B & ~places.opens_B, fed.part_B, blocks.whole_part_Z[lanes_B])
            blocks.whole_part_Z[lanes_B] = torch.where(is_clean_B, -1, part_B)
        blocks.tokens_ZW[lanes_B] = tokens_BW
        blocks.is_decided_ZW[lanes_B] = (places.decided_BW | chosen_BW) & ~is_clean_B[:, None]
        blocks.num_passes_Z[lanes_B] = torch.where(is_clean_B, 0, num_passes_B)
        num_fixed_B = known_B % size
        place_W = torch.arange(size, device=table.device)
        emitted_BW = tokens_BW.gather(1, (place_W + num_fixed_B[:, None]).clamp(max=size - 1))
        num_emitted_B = torch.where(is_clean_B, size - num_fixed_B, 0)
        table.commit(lanes_B, emitted_BW, num_emitted_B, plan.num_feed_B)
        none_B = torch.zeros_like(num_emitted_B)
        return StepOutcome(
            token_ids_BJ=emitted_BW, num_emitted_B=num_emitted_B, num_accepted_B=none_B, num_tested_B=none_B
        )

    def _open(self, known_B: Tensor, plan: StepPlan) -> Tensor:
        """Masks that this pass may decide, bool [B, W], if all its wanted rows have logits."""
        place_W = torch.arange(self.shape.size, device=known_B.device)
        is_fixed_BW = place_W < (known_B % self.shape.size)[:, None]
        open_BW = plan.samples_B[:, None] & ~is_fixed_BW & ~self.blocks.is_decided_ZW[plan.lanes_B]
        # The last row of a stored block predicts one place, no other row does anything then.
        open_BW &= ~self._opens(plan)[:, None] | (place_W == 0)
        part_size = self.config.sub_block_size
        return open_BW if part_size is None else first_part(open_BW, part_size)

    def _opens(self, plan: StepPlan) -> Tensor:
        """Who decides the first place of a shifted block, bool [B]."""
        return (plan.num_feed_B > 0) & self.shape.shifted

    def _places(self, known_B: Tensor, plan: StepPlan) -> _Places:
        """What this pass may do where."""
        assert plan.work is not None
        place_W = torch.arange(self.shape.size, device=known_B.device)
        fixed_BW = place_W < (known_B % self.shape.size)[:, None]
        decided_BW, opens_B = self.blocks.is_decided_ZW[plan.lanes_B], self._opens(plan)
        open_BW, editable_BW = plan.work.open_BW, None
        if self._edits:
            # Inside a shifted block no row predicts the first place.
            has_row_W = place_W >= int(self.shape.shifted)
            editable_BW = (plan.samples_B & ~opens_B)[:, None] & decided_BW & ~fixed_BW & has_row_W
        if plan.has_logits_X is not None:
            has_logits_BW = plan.has_logits_X.view(open_BW.shape)
            open_BW = open_BW & has_logits_BW
            editable_BW = None if editable_BW is None else editable_BW & has_logits_BW
        return _Places(
            fixed_BW=fixed_BW,
            decided_BW=decided_BW,
            open_BW=open_BW,
            editable_BW=editable_BW,
            opens_B=opens_B,
        )

    def _is_settled(self, plan: StepPlan, places: _Places, edited_BW: Tensor) -> Tensor:
        """Whether no further edits are due, bool [B]; counts passes that began without a mask."""
        lanes_B, blocks = plan.lanes_B, self.blocks
        began_clean_B = plan.samples_B & ~places.opens_B & (places.decided_BW | places.fixed_BW).all(-1)
        num_clean_B = blocks.num_clean_passes_Z[lanes_B] + began_clean_B
        is_last_B = ~edited_BW.any(-1) | (num_clean_B >= self.config.max_edit_passes)
        has_none_B = self.options.edit_threshold_Z[lanes_B] >= NO_EDITS
        is_settled_B = has_none_B | (began_clean_B & is_last_B)
        blocks.num_clean_passes_Z[lanes_B] = torch.where(is_settled_B, 0, num_clean_B)
        return is_settled_B

    def _propose(
        self, table: SequenceTable, batch: Batch, plan: StepPlan, logits_XV: Tensor, places: _Places
    ) -> tuple[Tensor, Masks]:
        """A token for every place that may change, and what strategies look at."""
        lanes_B, size, options = plan.lanes_B, self.shape.size, self.options
        num_passes_B = self.blocks.num_passes_Z[lanes_B]
        forbid(logits_XV, self.shape.mask_token_id)
        own_rows_BW = plan.first_logit_B[:, None] + torch.arange(size, device=table.device)
        rows_BW = torch.where(places.open_BW, own_rows_BW, -1)
        # By block and pass, so that a block begun anew is the same again. Pass 0: a shifted block's first.
        block_B = table.num_known_Z[lanes_B] // size
        step_B = (block_B << PASSES_BITS) + torch.where(places.opens_B, 0, 1 + num_passes_B)
        uniforms_BW = uniforms(table.seeds_Z[lanes_B], table.samples_Z[lanes_B], step_B, size)
        laws = table.laws(logits_XV, lanes_B, batch.filters)
        proposed_BW = draw(laws, rows_BW.flatten(), uniforms_BW.flatten()).view(rows_BW.shape)
        if places.editable_BW is not None:
            rows_BW = torch.where(places.editable_BW, own_rows_BW, rows_BW)
            best_BW = logits_XV.argmax(-1).view(rows_BW.shape)
            proposed_BW = torch.where(places.editable_BW, best_BW, proposed_BW)
        judges = self._judges(table, batch, logits_XV, lanes_B)
        entropy_X = entropies(logits_XV) if self._strategy.needs_entropy else None
        steps_B = options.steps_Z[lanes_B]
        return proposed_BW, Masks(
            is_open_BW=places.open_BW,
            confidence_BW=probability(judges, rows_BW, proposed_BW),
            entropy_BW=None if entropy_X is None else entropy_X.view(rows_BW.shape),
            quota_B=size // steps_B + (num_passes_B < size % steps_B).long(),
            threshold_B=options.threshold_Z[lanes_B],
            entropy_bound_B=options.entropy_bound_Z[lanes_B],
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
