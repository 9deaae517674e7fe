"""Introspective strided decoding: verify the last pass's drafts and draft the next ones in one causal pass.

arXiv 2604.11035, section 3.2 and Algorithm 1, with two departures: drafts are drawn from the very q that
tests them (the published rule drafts by argmax and is biased), and p and q are warped by the request's own
sampling settings before the test. What follows a rejection is a strategy (rejection.py).
Shapes: B sequences, J = stride - 1 masks, X wanted rows, V vocabulary, Z lanes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from idlm.acceptance import num_accepted, residual
from idlm.contracts import StepOutcome, StepPlan
from idlm.errors import UserError
from idlm.infer.decoders.base import DECODERS, Batch, PictureName, pack_rows
from idlm.infer.decoders.layout import NO_ROW, Picture
from idlm.infer.decoders.rejection import layouts
from idlm.infer.table import SequenceTable
from idlm.sampling import draw, to_law
from idlm.semantics import MAX_STRIDE, Semantics

ACCEPTANCES = ("exact", "published")
ADAPTIVE_STRIDES = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class IsdConfig:
    """`stride` None: the checkpoint's. `adaptive`: every pass chooses the picture, of this stride or a
    smaller one (1 is AR), that measured fastest at the load. `acceptance=published` is the authors'
    argmax-draft rule, lossy.
    """

    stride: int | None = None
    adaptive: bool = False
    on_rejection: str = "tree"
    acceptance: str = "exact"


@DECODERS.register("isd")
class IsdDecoder:
    """Up to `stride` tokens per pass. Per lane: a stock of drafts and the laws they were drawn from."""

    name: ClassVar[str] = "isd"
    Config: ClassVar[type] = IsdConfig

    def __init__(self, config: IsdConfig, semantics: Semantics) -> None:
        self.stride = semantics.stride if config.stride is None else config.stride
        self._check(config, semantics)
        self.config = config
        self.max_emitted = self.stride
        self.num_masks = self.stride - 1
        self.exactness = "exact" if config.acceptance == "exact" else "lossy"
        self._mask_token_id = semantics.mask_token_id or 0
        self.pictures = self._choices(config)
        self._layouts = [
            layouts(picture.strategy, num_masks=picture.stride - 1, max_drafts=self.num_masks)
            for picture in self.pictures
        ]
        self.widths = tuple(max(layout.width for layout in pictured) for pictured in self._layouts)

    def _choices(self, config: IsdConfig) -> tuple[PictureName, ...]:
        if not config.adaptive:
            return (PictureName(stride=self.stride, strategy=config.on_rejection),)
        strides = {*(stride for stride in ADAPTIVE_STRIDES if stride < self.stride), self.stride} - {1}
        strategies = dict.fromkeys((config.on_rejection, "branch"))
        return (
            PictureName(stride=1, strategy="cold"),
            *(PictureName(stride=s, strategy=name) for s in sorted(strides) for name in strategies),
        )

    def _check(self, config: IsdConfig, semantics: Semantics) -> None:
        if not 1 <= self.stride <= MAX_STRIDE:
            raise UserError(
                "IDLM-0402",
                f"stride={self.stride} must be in [1, {MAX_STRIDE}]",
                fix="give decoder.stride, 1 is AR",
            )
        if config.acceptance not in ACCEPTANCES:
            raise UserError(
                "IDLM-0403",
                f"acceptance={config.acceptance!r} is not one of {ACCEPTANCES}",
                fix="use acceptance=exact",
            )
        if self.stride > 1 and semantics.mask_token_id is None:
            raise UserError(
                "IDLM-0404",
                f"decoder isd at stride {self.stride} needs a mask token id; the checkpoint does not say it",
                fix="give mask_token_id=..., convert the checkpoint with idlm-train, or use decoder=ar",
            )
        if self.stride > semantics.stride:
            warnings.warn(
                f"stride {self.stride} is larger than the {semantics.stride} that the checkpoint was trained "
                "for: the output law is the same, but few of the further drafts will be accepted",
                stacklevel=3,
            )

    def allocate(self, num_lanes: int, vocab_size: int, device: torch.device) -> None:
        """Per lane: stock, drafts, and the whole law of each draft, fp64 (stride - 1) * vocab_size * 8
        bytes.
        """
        self._stacked = [Picture(pictured, device) for pictured in self._layouts]
        self.picture = self._stacked[0]
        self.stock_Z = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self.drafts_ZJ = torch.zeros(num_lanes, self.num_masks, dtype=torch.int64, device=device)
        self.draft_laws_ZJV = torch.zeros(
            num_lanes, self.num_masks, vocab_size, dtype=torch.float64, device=device
        )

    def seat(self, lanes: list[int]) -> None:
        """The new sequences have no drafts."""
        self.stock_Z[lanes] = 0

    def plan(self, table: SequenceTable, batch: Batch) -> StepPlan:
        """Known tokens, then the lane's drafts and the masks of its picture."""
        self.picture = self._stacked[batch.picture]
        return pack_rows(
            table,
            batch,
            picture=self.picture,
            stock_B=self.stock_Z[batch.lanes_B],
            drafts_BJ=self.drafts_ZJ[batch.lanes_B],
            mask_token_id=self._mask_token_id,
        )

    def advance(self, table: SequenceTable, batch: Batch, plan: StepPlan, logits_XV: Tensor) -> StepOutcome:
        """Test the drafts, emit the accepted ones and one token more, draw the next drafts."""
        lanes_B, first_B, samples_B = plan.lanes_B, plan.first_logit_B, plan.samples_B
        num_masks = self.picture.num_masks
        laws_XV = self._laws(table, batch, lanes_B, logits_XV)
        uniforms_BD = table.uniforms(lanes_B, 2 * num_masks + 1)
        emitted_BJ, accepted_B, tested_B = self._verify(table, lanes_B, first_B, laws_XV, uniforms_BD)
        draft_uniforms_BJ = uniforms_BD[:, num_masks + 1 :]
        self._draft(lanes_B, first_B, accepted_B, laws_XV, draft_uniforms_BJ, samples_B)
        accepted_B, tested_B = accepted_B * samples_B, tested_B * samples_B
        num_emitted_B = accepted_B + samples_B.long()
        num_computed_B = (plan.num_feed_B + accepted_B) * plan.advances_B
        table.commit(lanes_B, emitted_BJ, num_emitted_B, num_computed_B)
        return StepOutcome(
            token_ids_BJ=emitted_BJ,
            num_emitted_B=num_emitted_B,
            num_accepted_B=accepted_B,
            num_tested_B=tested_B,
        )

    def _laws(self, table: SequenceTable, batch: Batch, lanes_B: Tensor, logits_XV: Tensor) -> Tensor:
        """p of the chain rows and q of the mask rows alike, under each request's own settings."""
        lanes_X = lanes_B.repeat_interleave(self.picture.max_width, output_size=len(logits_XV))
        return to_law(logits_XV, table.warp(lanes_X, batch.needs))

    def _verify(
        self, table: SequenceTable, lanes_B: Tensor, first_B: Tensor, laws_XV: Tensor, uniforms_BD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Emitted tokens [B, stride], number accepted [B] and tested [B] (up to the first rejection)."""
        num_masks, num_drafts_B = self.picture.num_masks, self.picture.num_drafts_Y[self.stock_Z[lanes_B]]
        depth_J = torch.arange(num_masks, device=table.device)
        drafts_BJ = self.drafts_ZJ[lanes_B, :num_masks]
        rows_BJ = (first_B[:, None] + depth_J).clamp(max=len(laws_XV) - 1)
        accepted_B = num_accepted(
            laws_XV[rows_BJ, drafts_BJ],
            self.draft_laws_ZJV[lanes_B[:, None], depth_J, drafts_BJ],
            uniforms_BD[:, :num_masks],
            table.tau_Z[lanes_B],
            depth_J < num_drafts_B[:, None],
        )
        rejected_B = accepted_B < num_drafts_B
        law_BV = laws_XV[first_B + accepted_B]
        if num_masks:
            draft_law_BV = self.draft_laws_ZJV[lanes_B, accepted_B.clamp(max=num_masks - 1)]
            law_BV = torch.where(rejected_B[:, None], residual(law_BV, draft_law_BV), law_BV)
        last_B1 = draw(law_BV, uniforms_BD[:, num_masks])[:, None]
        emitted_BJ = torch.cat([drafts_BJ, last_B1], dim=1).scatter(1, accepted_B[:, None], last_B1)
        return emitted_BJ, accepted_B, accepted_B + rejected_B.long()

    def _draft(
        self,
        lanes_B: Tensor,
        first_B: Tensor,
        accepted_B: Tensor,
        laws_XV: Tensor,
        uniforms_BJ: Tensor,
        samples_B: Tensor,
    ) -> None:
        """Draw the next drafts from the rows that the layout names for this count of accepted drafts."""
        stock_B = self.stock_Z[lanes_B]
        rows_BJ = self.picture.draft_row_YAJ[stock_B, accepted_B]
        laws_BJV = laws_XV[torch.where(rows_BJ == NO_ROW, 0, first_B[:, None] + rows_BJ)]
        next_stock_B = self.picture.next_stock_YA[stock_B, accepted_B]
        depth_J = torch.arange(rows_BJ.shape[1], device=rows_BJ.device)
        self._store(self.draft_laws_ZJV, (lanes_B[:, None], depth_J), laws_BJV, samples_B)
        drafts_BJ = self._draw_drafts(laws_BJV, uniforms_BJ)
        self._store(self.drafts_ZJ, (lanes_B[:, None], depth_J), drafts_BJ, samples_B)
        self._store(self.stock_Z, (lanes_B,), next_stock_B, samples_B)

    @staticmethod
    def _store(state_Z: Tensor, place: tuple[Tensor, ...], new_B: Tensor, samples_B: Tensor) -> None:
        """Only for sequences that decode: the others keep what they hold."""
        samples_B = samples_B.view(-1, *[1] * (new_B.ndim - 1))
        state_Z[place] = torch.where(samples_B, new_B, state_Z[place])

    def _draw_drafts(self, laws_BJV: Tensor, uniforms_BJ: Tensor) -> Tensor:
        if self.config.acceptance == "published":
            return laws_BJV.argmax(-1)
        return draw(laws_BJV.flatten(0, 1), uniforms_BJ.flatten()).view(uniforms_BJ.shape)
