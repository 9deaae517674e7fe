"""A toy of full diffusion in one file: every pass feeds the whole canvas (prompt, answer), decides the most
confident masks, and stores no KV for later. The answer is emitted once the canvas is clean.

Shapes: B sequences, R rows, Y wanted rows of a slice, L positions of the longest canvas, Z lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.base import DECODERS, Decoder, StrideMode
from idlm.infer.state.batch import Batch, StepOutcome, StepPlan, WantedRows, fill_lanes
from idlm.infer.state.kv_cache import KVWritePolicy
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.sampling import judged_draws, nonfinite, row_probs, uniforms
from idlm.semantics import Semantics


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyFullConfig:
    """`per_pass`: masks that a pass decides."""

    per_pass: int = 3


@DECODERS.register("toy_full")
class ToyFull(Decoder):
    """Per lane: the tokens decided so far, and the number of passes (the step of the random stream)."""

    name: ClassVar[str] = "toy_full"
    Config: ClassVar[type] = ToyFullConfig
    baseline: ClassVar[Mapping[str, Any] | None] = {"per_pass": 1}
    kv_policy = KVWritePolicy(kind="none")

    @classmethod
    def fits(cls, semantics: Semantics) -> int | None:
        """Full-diffusion checkpoints, before the decoder `full`."""
        return 2 if semantics.causality == "full" else None

    def __init__(self, config: ToyFullConfig, semantics: Semantics) -> None:
        if semantics.causality != "full" or semantics.mask_token_id is None or semantics.logit_shift:
            raise UserError("IDLM-0450", f"toy_full cannot run {semantics}", fix="use a toy checkpoint")
        self.config, self.mask_token_id = config, semantics.mask_token_id
        self.modes = (StrideMode(stride=config.per_pass, strategy="toy"),)

    def num_rows(self, mode: int, max_length: int) -> int:
        """The canvas."""
        return max_length

    def allocate(
        self, num_lanes: int, max_length: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """A canvas per lane."""
        self.proposal_bytes = 3 * 8 * vocab_size
        self.tokens_ZL = torch.zeros(num_lanes, max_length, dtype=torch.int64, device=device)
        self.is_decided_ZL = torch.zeros(num_lanes, max_length, dtype=torch.bool, device=device)
        self.num_passes_Z = torch.zeros(num_lanes, dtype=torch.int64, device=device)

    def admit(self, lanes: list[int], params: Sequence[SamplingParams]) -> None:
        """New canvases have no decided tokens."""
        fill_lanes(lanes, 0, self.is_decided_ZL, self.num_passes_Z)

    def plan(self, table: SequenceState, batch: Batch) -> StepPlan:
        """The whole canvas of every sequence that is not complete; all its rows see all of it."""
        lanes_B, device = batch.lanes_B, table.device
        ends_B, known_B = table.ends_Z[lanes_B], table.num_known_Z[lanes_B]
        advances_B = known_B < ends_B
        samples_B = batch.samples_B & advances_B
        cu_rows_B1 = torch.nn.functional.pad((ends_B * samples_B).cumsum(0), (1, 0))
        num_rows = max(1, int(cu_rows_B1[-1])) if batch.num_rows is None else batch.num_rows
        rows_R = torch.arange(num_rows, device=device)
        is_fed_R = rows_R < cu_rows_B1[-1]
        sequence_R = torch.searchsorted(cu_rows_B1[1:], rows_R, right=True).clamp(max=len(lanes_B) - 1)
        slots_R = torch.where(is_fed_R, rows_R - cu_rows_B1[sequence_R], 0)
        lane_R = lanes_B[sequence_R]
        is_known_R, is_decided_R = slots_R < known_B[sequence_R], self.is_decided_ZL[lane_R, slots_R]
        decided_R = torch.where(is_decided_R, self.tokens_ZL[lane_R, slots_R], self.mask_token_id)
        limits_R = torch.where(is_fed_R, ends_B[sequence_R], 1)
        return StepPlan(
            lanes_B=lanes_B,
            cu_rows_B1=cu_rows_B1,
            sequence_R=sequence_R,
            token_ids_R=torch.where(is_known_R, table.tokens_ZL[lane_R, slots_R], decided_R),
            positions_R=slots_R,
            slots_R=slots_R,
            limits_R=limits_R,
            branch_starts_R=limits_R,
            is_mask_R=is_fed_R & ~is_known_R & ~is_decided_R,
            logit_rows_X=rows_R,
            first_logit_B=cu_rows_B1[:-1],
            num_feed_B=batch.num_feed_B,
            samples_B=samples_B,
            advances_B=advances_B,
            max_rows=batch.max_rows,
            max_slots=batch.max_rows,
        )

    def advance(self, table: SequenceState, batch: Batch, plan: StepPlan, wanted: WantedRows) -> StepOutcome:
        """Decide the most confident masks; emit the answers whose canvas is clean."""
        lanes_B, num_positions = plan.lanes_B, batch.max_rows
        ids_R, confidence_R, bad_R = self._propose(table, batch, plan, wanted)
        assert plan.is_mask_R is not None

        size = len(lanes_B) * num_positions
        index_R = torch.where(plan.is_mask_R, plan.sequence_R * num_positions + plan.slots_R, size)

        def by_index(values_R: Tensor, fill: float) -> Tensor:
            """Values of the masks [B, L], the others `fill`. The last entry takes what belongs nowhere."""
            flat = torch.full((size + 1,), fill, dtype=values_R.dtype, device=table.device)
            return flat.scatter_(0, index_R, values_R)[:-1].view(-1, num_positions)

        ids_BL, confidence_BL = by_index(ids_R, 0), by_index(confidence_R, -1.0)
        is_mask_BL = by_index(plan.is_mask_R.long(), 0) > 0
        order_BL = confidence_BL.argsort(dim=-1, descending=True, stable=True)
        is_chosen_BL = is_mask_BL & (order_BL.argsort(dim=-1) < self.config.per_pass)
        is_decided_BL = self.is_decided_ZL[lanes_B, :num_positions] | is_chosen_BL
        tokens_BL = torch.where(is_chosen_BL, ids_BL, self.tokens_ZL[lanes_B, :num_positions])
        self.tokens_ZL[lanes_B, :num_positions], self.is_decided_ZL[lanes_B, :num_positions] = (
            tokens_BL,
            is_decided_BL,
        )
        self.num_passes_Z[lanes_B] += plan.samples_B.long()
        known_B, ends_B = table.num_known_Z[lanes_B], table.ends_Z[lanes_B]
        is_clean_B = plan.samples_B & ~(is_mask_BL & ~is_chosen_BL).any(dim=-1)
        positions_L = torch.arange(num_positions, device=table.device)
        emitted_BL = tokens_BL.gather(1, (positions_L + known_B[:, None]).clamp(max=num_positions - 1))
        num_emitted_B = torch.where(is_clean_B, ends_B - known_B, 0)
        table.commit(lanes_B, emitted_BL, num_emitted_B, torch.zeros_like(num_emitted_B))
        return StepOutcome(
            token_ids_BJ=emitted_BL,
            num_emitted_B=num_emitted_B,
            nonfinite_B=by_index(bad_R, 0).amax(dim=-1).clamp(max=1),
        )

    def _propose(
        self, table: SequenceState, batch: Batch, plan: StepPlan, wanted: WantedRows
    ) -> tuple[Tensor, ...]:
        """Of every row a token, its confidence, and whether its logits are not finite; the head streams."""
        seeds, samples, steps = (
            column_Z[plan.lanes_B] for column_Z in (table.seeds_Z, table.samples_Z, self.num_passes_Z)
        )
        uniforms_BL = uniforms(seeds, samples, steps, batch.max_rows)
        uniforms_R = uniforms_BL[plan.sequence_R, plan.slots_R]
        lane_R = plan.lanes_B[plan.sequence_R]

        def propose(logits_YV: Tensor, rows: slice) -> tuple[Tensor, ...]:
            lane_Y = lane_R[rows]
            probs = row_probs(
                logits_YV,
                table.temperature_Z[lane_Y],
                table.top_k_Z[lane_Y],
                table.top_p_Z[lane_Y],
                table.min_p_Z[lane_Y],
                filters=batch.filters,
                forbidden_id=self.mask_token_id,
                own=True,
            )
            ids_Y, confidence_Y = judged_draws(
                probs, uniforms_R[rows].contiguous(), table.temperature_Z[lane_Y]
            )
            rows_Y1 = torch.arange(len(ids_Y), device=ids_Y.device)[:, None]
            return ids_Y, confidence_Y, nonfinite(probs, rows_Y1)

        return wanted.proposals(propose, row_bytes=self.proposal_bytes)
