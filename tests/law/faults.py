"""Faults that speculative decoders have really had, each planted into the engine by one patch.

A fault is a function of pytest's monkeypatch; `FAULTS` says which check must catch it. A draft from a
consistently wrong place (another branch, a mask that saw rejected drafts) is still exact when q is the law it
was drawn from; only the layout contract forbids that.
Shapes: B sequences, J drafts, X wanted rows, V vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.acceptance import num_accepted, residual
from idlm.contracts import StepPlan
from idlm.infer.decoders import isd
from idlm.infer.decoders.base import Batch, pack_rows
from idlm.infer.decoders.isd import IsdDecoder
from idlm.infer.decoders.layout import RowLayout
from idlm.infer.decoders.rejection import Tree
from idlm.infer.engine import Engine
from idlm.infer.request import Request
from idlm.infer.scheduler import Schedule, Scheduler, lane_of
from idlm.infer.table import SequenceTable
from idlm.rng import uniforms
from idlm.sampling import draw

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`check` is one of test_planted_faults.CHECKS; `strategy` is what the engine runs."""

    name: str
    plant: Plant
    check: str
    strategy: str = "cold"


FAULTS: list[Fault] = []


def fault(check: str, strategy: str = "cold") -> Callable[[Plant], Plant]:
    """Enter a planting function under its own name."""

    def enter(plant: Plant) -> Plant:
        FAULTS.append(Fault(name=plant.__name__, plant=plant, check=check, strategy=strategy))
        return plant

    return enter


def _softened(table: SequenceTable, lanes_X: Tensor, logits_XV: Tensor) -> Tensor:
    """The law with temperature but without truncation."""
    return (logits_XV.double() / table.temperature_Z[lanes_X][:, None]).softmax(-1)


def _on_laws(
    patch: pytest.MonkeyPatch, see: Callable[[IsdDecoder, SequenceTable, Tensor, Tensor], None]
) -> None:
    """Call `see(decoder, table, lanes_X, logits_XV)` whenever laws are computed."""
    original = IsdDecoder._laws

    def laws(self: IsdDecoder, table: Any, batch: Any, lanes_B: Tensor, logits_XV: Tensor) -> Tensor:
        see(self, table, lanes_B.repeat_interleave(self.picture.max_width), logits_XV)
        return original(self, table, batch, lanes_B, logits_XV)

    patch.setattr(IsdDecoder, "_laws", laws)


def _after_draft(patch: pytest.MonkeyPatch, change: Callable[..., Tensor]) -> None:
    """Replace the stored q of new drafts by `change(decoder, lanes_B, rows_BJ, laws_XV, stored_BJV)`."""
    original = IsdDecoder._draft

    def draft(self: IsdDecoder, lanes_B: Tensor, first_B: Tensor, accepted_B: Tensor, *rest: Tensor) -> None:
        rows_BJ = self.picture.draft_row_YAJ[self.stock_Z[lanes_B], accepted_B]
        rows_BJ = (first_B[:, None] + rows_BJ.clamp(min=0)).clamp(max=len(rest[0]) - 1)
        original(self, lanes_B, first_B, accepted_B, *rest)
        laws_XV, _, samples_B = rest
        stored_BJV = self.draft_laws_ZJV[lanes_B]
        changed_BJV = change(self, lanes_B, rows_BJ, laws_XV, stored_BJV)
        self.draft_laws_ZJV[lanes_B] = torch.where(samples_B[:, None, None], changed_BJV, stored_BJV)

    patch.setattr(IsdDecoder, "_draft", draft)


def _verify_with(patch: pytest.MonkeyPatch, change: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    """Change (first_B, laws_XV, uniforms_BD) before verification."""
    original = IsdDecoder._verify

    def verify(self: IsdDecoder, table: Any, lanes_B: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return original(self, table, lanes_B, *change(self, lanes_B, *rest))

    patch.setattr(IsdDecoder, "_verify", verify)


@fault("law")
def argmax_draft_tested_with_softmax_q(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IsdDecoder, "_draw_drafts", lambda self, laws_BJV, uniforms_BJ: laws_BJV.argmax(-1))


@fault("law")
def truncation_missing_in_stored_q(patch: pytest.MonkeyPatch) -> None:
    """Top-k and top-p on p only: the draft comes from the truncated q, the test divides by the full one."""
    raw: dict[str, Tensor] = {}
    _on_laws(patch, lambda _, table, lanes_X, logits: raw.update(law=_softened(table, lanes_X, logits)))
    _after_draft(patch, lambda self, lanes_B, rows_BJ, laws_XV, stored: raw["law"][rows_BJ])


@fault("law", "tree")
def draft_q_stored_before_warping(patch: pytest.MonkeyPatch) -> None:
    raw: dict[str, Tensor] = {}
    _on_laws(patch, lambda _, table, lanes_X, logits: raw.update(law=logits.double().softmax(-1)))
    _after_draft(patch, lambda self, lanes_B, rows_BJ, laws_XV, stored: raw["law"][rows_BJ])


@fault("law", "branch")
def temperature_applied_twice_to_q(patch: pytest.MonkeyPatch) -> None:
    seen: dict[str, SequenceTable] = {}
    _on_laws(patch, lambda _, table, lanes_X, logits: seen.update(table=table))

    def twice(self: IsdDecoder, lanes_B: Tensor, rows_BJ: Tensor, laws_XV: Tensor, stored: Tensor) -> Tensor:
        powered = stored ** (1 / seen["table"].temperature_Z[lanes_B][:, None, None])
        return powered / powered.sum(-1, keepdim=True)

    _after_draft(patch, twice)


@fault("law", "tree")
def truncation_missing_in_the_residual(patch: pytest.MonkeyPatch) -> None:
    raw: dict[str, Tensor] = {}
    _on_laws(patch, lambda _, table, lanes_X, logits: raw.update(law=_softened(table, lanes_X, logits)))

    def note_first(self: IsdDecoder, lanes_B: Tensor, first_B: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        raw["first"] = first_B
        return (first_B, *rest)

    def counted(*arguments: Tensor) -> Tensor:
        raw["accepted"] = num_accepted(*arguments)
        return raw["accepted"]

    _verify_with(patch, note_first)
    patch.setattr(isd, "num_accepted", counted)
    patch.setattr(isd, "residual", lambda p, q: residual(raw["law"][raw["first"] + raw["accepted"]], q))


@fault("law")
def truncation_only_on_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """The published engine: accepted drafts may lie outside the nucleus."""
    raw: dict[str, Tensor] = {}
    _on_laws(patch, lambda _, table, lanes_X, logits: raw.update(law=_softened(table, lanes_X, logits)))
    original = IsdDecoder._draft

    def verify_raw(self: IsdDecoder, lanes_B: Tensor, first_B: Tensor, laws: Tensor, u: Tensor) -> Any:
        return first_B, raw["law"], u

    def draft_raw(
        self: IsdDecoder, lanes: Tensor, first: Tensor, accepted: Tensor, laws: Tensor, *rest: Tensor
    ) -> None:
        original(self, lanes, first, accepted, raw["law"], *rest)

    _verify_with(patch, verify_raw)
    patch.setattr(IsdDecoder, "_draft", draft_raw)


@fault("law")
def accept_number_reused_for_the_last_token(patch: pytest.MonkeyPatch) -> None:
    def reuse(self: IsdDecoder, lanes_B: Tensor, first_B: Tensor, laws: Tensor, u_BD: Tensor) -> Any:
        u_BD = u_BD.clone()
        u_BD[:, self.num_masks] = u_BD[:, 0]
        return first_B, laws, u_BD

    _verify_with(patch, reuse)


@fault("law", "tree")
def one_number_for_all_drafts(patch: pytest.MonkeyPatch) -> None:
    original = IsdDecoder._draw_drafts

    def drafts(self: IsdDecoder, laws_BJV: Tensor, uniforms_BJ: Tensor) -> Tensor:
        return original(self, laws_BJV, uniforms_BJ[:, :1].expand_as(uniforms_BJ).contiguous())

    patch.setattr(IsdDecoder, "_draw_drafts", drafts)


@fault("law", "branch")
def one_stream_for_all_steps(patch: pytest.MonkeyPatch) -> None:
    def frozen(self: SequenceTable, lanes_B: Tensor, num_draws: int) -> Tensor:
        return uniforms(self.seeds_Z[lanes_B], self.samples_Z[lanes_B], 0 * lanes_B, num_draws)

    patch.setattr(SequenceTable, "uniforms", frozen)


@fault("law")
def one_stream_for_all_samples(patch: pytest.MonkeyPatch) -> None:
    def shared(self: SequenceTable, lanes_B: Tensor, num_draws: int) -> Tensor:
        return uniforms(self.seeds_Z[lanes_B], 0 * lanes_B, self.steps_Z[lanes_B], num_draws)

    patch.setattr(SequenceTable, "uniforms", shared)


@fault("law")
def residual_is_p(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(isd, "residual", lambda p, q: p)


@fault("law", "tree")
def acceptance_with_p_and_q_swapped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(isd, "num_accepted", lambda p, q, *rest: num_accepted(q, p, *rest))


@fault("law", "branch")
def drafts_tested_with_another_branchs_q(patch: pytest.MonkeyPatch) -> None:
    def other_group(
        self: IsdDecoder, lanes: Tensor, rows_BJ: Tensor, laws_XV: Tensor, stored: Tensor
    ) -> Tensor:
        return laws_XV[(rows_BJ + self.num_masks).clamp(max=len(laws_XV) - 1)]

    _after_draft(patch, other_group)


@fault("law", "branch")
def temperature_of_the_lanes_former_request(patch: pytest.MonkeyPatch) -> None:
    original = SequenceTable.seat

    def seat(self: SequenceTable, lanes: list[int], *rest: Any, **steps: Any) -> None:
        former = self.temperature_Z.clone()
        original(self, lanes, *rest, **steps)
        self.temperature_Z.copy_(former)

    patch.setattr(SequenceTable, "seat", seat)


@fault("greedy")
def verify_row_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def shift(self: IsdDecoder, lanes_B: Tensor, first_B: Tensor, laws_XV: Tensor, u_BD: Tensor) -> Any:
        return first_B, laws_XV.roll(-1, dims=0), u_BD

    _verify_with(patch, shift)


@fault("greedy", "tree")
def bonus_token_from_the_row_before(patch: pytest.MonkeyPatch) -> None:
    original = IsdDecoder._verify

    def verify(
        self: IsdDecoder, table: Any, lanes_B: Tensor, first_B: Tensor, laws_XV: Tensor, u_BD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        emitted, accepted, tested = original(self, table, lanes_B, first_B, laws_XV, u_BD)
        row_B = first_B + (accepted - 1).clamp(min=0)
        wrong_B1 = draw(laws_XV[row_B], u_BD[:, self.num_masks])[:, None]
        swept_B1 = ((accepted == tested) & (accepted > 0))[:, None]
        last_B1 = torch.where(swept_B1, wrong_B1, emitted.gather(1, accepted[:, None]))
        return emitted.scatter(1, accepted[:, None], last_B1), accepted, tested

    patch.setattr(IsdDecoder, "_verify", verify)


def _repack(patch: pytest.MonkeyPatch, change: Callable[[StepPlan], StepPlan]) -> None:
    patch.setattr(isd, "pack_rows", lambda *args, **kwargs: change(pack_rows(*args, **kwargs)))


@fault("greedy")
def chain_rows_see_the_masks_behind_them(patch: pytest.MonkeyPatch) -> None:
    def widen(plan: StepPlan) -> StepPlan:
        end_R = (plan.slots_R[plan.cu_rows_B1[1:] - 1] + 1)[plan.sequence_R]
        limits_R = plan.limits_R.clone()
        limits_R[plan.logit_rows_X] = end_R[plan.logit_rows_X]
        return replace(plan, limits_R=limits_R)

    _repack(patch, widen)


@fault("greedy", "branch")
def verify_positions_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def shift(plan: StepPlan) -> StepPlan:
        positions_R = plan.positions_R.clone()
        offset_R = torch.arange(len(positions_R)) - plan.cu_rows_B1[plan.sequence_R]
        positions_R += (offset_R % 2 == 1) & plan.samples_B[plan.sequence_R]
        return replace(plan, positions_R=positions_R)

    _repack(patch, shift)


@fault("greedy", "tree")
def keys_of_a_rejected_draft_kept(patch: pytest.MonkeyPatch) -> None:
    """The KV pointer moves past a rejected draft: one slot of the sequence holds what was never emitted."""
    original = IsdDecoder.plan

    def plan(self: IsdDecoder, table: SequenceTable, batch: Batch) -> StepPlan:
        planned = original(self, table, batch)
        late_B = (table.num_computed_Z[planned.lanes_B] > 8) & (planned.num_feed_B == 1)
        late_R = torch.repeat_interleave(late_B.long(), planned.cu_rows_B1.diff())
        moved = {name: getattr(planned, name) + late_R for name in ("slots_R", "limits_R", "branch_starts_R")}
        return replace(planned, **moved, max_slots=planned.max_slots + 1)

    patch.setattr(IsdDecoder, "plan", plan)


@fault("greedy")
def prompt_chunk_taken_for_a_decoding_step(patch: pytest.MonkeyPatch) -> None:
    original = Schedule.batch

    def batch(self: Schedule, device: torch.device) -> Batch:
        self.samples[:] = [s or n == 7 for s, n in zip(self.samples, self.num_feed, strict=True)]
        return original(self, device)

    patch.setattr(Schedule, "batch", batch)


@fault("repeat")
def drafts_of_the_lanes_former_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IsdDecoder, "seat", lambda self, lanes: None)


@fault("repeat", "branch")
def random_steps_of_the_lanes_former_request(patch: pytest.MonkeyPatch) -> None:
    original = SequenceTable.seat

    def seat(self: SequenceTable, lanes: list[int], *rest: Any, **steps: Any) -> None:
        former = self.steps_Z.clone()
        original(self, lanes, *rest, **steps)
        self.steps_Z.copy_(former)

    patch.setattr(SequenceTable, "seat", seat)


@fault("repeat", "tree")
def random_numbers_by_lane(patch: pytest.MonkeyPatch) -> None:
    def by_lane(self: SequenceTable, lanes_B: Tensor, num_draws: int) -> Tensor:
        return uniforms(lanes_B, self.samples_Z[lanes_B], self.steps_Z[lanes_B], num_draws)

    patch.setattr(SequenceTable, "uniforms", by_lane)


def _on_preemption(patch: pytest.MonkeyPatch, change: Callable[[Engine, list[int]], None]) -> None:
    original = Engine._seat

    def seat(self: Engine, schedule: Schedule) -> None:
        original(self, schedule)
        change(self, [lane_of(request) for request in schedule.preempted])

    patch.setattr(Engine, "_seat", seat)


@fault("preempt")
def preemption_drops_drafts_but_keeps_the_layout(patch: pytest.MonkeyPatch) -> None:
    def drop(engine: Engine, lanes: list[int]) -> None:
        engine.decoder.drafts_ZJ[lanes] = 0

    _on_preemption(patch, drop)


@fault("preempt", "tree")
def preemption_restarts_the_random_stream(patch: pytest.MonkeyPatch) -> None:
    def restart(engine: Engine, lanes: list[int]) -> None:
        engine.table.steps_Z[lanes] = 0

    _on_preemption(patch, restart)


@fault("preempt", "branch")
def preemption_keeps_the_kv_pointer(patch: pytest.MonkeyPatch) -> None:
    """All KV of a preempted sequence is believed to be in the pages that it comes back to."""
    original = Scheduler._sit

    def sit(self: Scheduler, request: Request, num_slots: int, schedule: Schedule) -> bool:
        has_pages = original(self, request, num_slots, schedule)
        if has_pages and request in self.running:
            request.num_computed = request.num_known - 1
        return has_pages

    patch.setattr(Scheduler, "_sit", sit)


@fault("layout", "tree")
def tree_masks_see_the_fill_drafts(patch: pytest.MonkeyPatch) -> None:
    original = Tree._fill

    def fill(self: Tree, num_drafts: int, num_masks: int) -> RowLayout:
        layout = original(self, num_drafts, num_masks)
        masks = [(source, position, num_drafts + 1, start) for source, position, _, start in layout.rows]
        chain = layout.rows[: num_drafts + 1]
        layout.__dict__["rows"] = (*chain, *masks[num_drafts + 1 :])
        return layout

    patch.setattr(Tree, "_fill", fill)
