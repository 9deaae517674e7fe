"""Faults that speculative decoders have had, each planted into the engine by one patch.

A fault is a function of pytest's monkeypatch; `FAULTS` gives the check that must catch it. A draft from a
consistently wrong position (another branch, a mask that saw rejected drafts) is still exact if q is the
distribution it was drawn from; only the layout contract forbids that. Shapes: B sequences, J drafts, X wanted
rows, V vocabulary, R rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.infer.decoders import isd
from idlm.infer.decoders.isd import IsdDecoder
from idlm.infer.decoders.rejection import RowLayout, Tree, plan_rows
from idlm.infer.parts import EngineParts
from idlm.infer.request import Request
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.worker import Worker
from idlm.infer.scheduler import Scheduler
from idlm.infer.state.batch import Batch, Schedule, StepPlan, lane_of
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels import sampling
from idlm.kernels.sampling import Probs, Verdict
from tests.kernels.cases.sampling_steps import stored_probs
from tests.kernels.references.sampling import dense_probs
from tests.law.sampling_halves import PARTS

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`check` is one of test_planted_faults.CHECKS; `strategy` is the engine's rejection strategy."""

    name: str
    plant: Plant
    check: str
    strategy: str = "cold"


FAULTS: list[Fault] = []


def fault(check: str, strategy: str = "cold") -> Callable[[Plant], Plant]:
    """Register a planting function under its own name."""

    def enter(plant: Plant) -> Plant:
        FAULTS.append(Fault(name=plant.__name__, plant=plant, check=check, strategy=strategy))
        return plant

    return enter


def _replace(patch: pytest.MonkeyPatch, op: str, change: Callable[..., Any]) -> None:
    """Make the decoder call `change(op, *args, **kwargs)` in place of a sampling op."""
    if op in PARTS:
        _part(patch)
    patch.setattr(isd, op, functools.partial(change, PARTS.get(op) or getattr(sampling, op)))


def _part(patch: pytest.MonkeyPatch) -> None:
    """Make the decoder emit and draft by two ops that can be replaced, in place of the combined op."""

    def emit_and_draft(
        probs: Probs, store: Any, verdict: Verdict, *, lanes_B: Tensor, uniforms_BA: Tensor, **state: Any
    ) -> None:
        ops, given, first_B = vars(isd), (probs, store, verdict), uniforms_BA[:, 0].contiguous()
        ops["emit"](*given, lanes_B=lanes_B, uniforms_B=first_B, drafts_ZJ=state["drafts_ZJ"])
        ops["draw_drafts"](*given, lanes_B=lanes_B, uniforms_BJ=uniforms_BA[:, 1:], **state)

    patch.setattr(isd, "emit_and_draft", emit_and_draft)
    for name in PARTS.keys() - vars(isd).keys():
        patch.setattr(isd, name, PARTS[name], raising=False)


def _seen(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Table, logits and lanes of the pass, updated whenever probabilities are computed."""
    seen: dict[str, Any] = {}
    original = SequenceState.probs

    def probs(self: SequenceState, logits_XV: Tensor, lanes_B: Tensor, filters: bool) -> Probs:
        seen.update(table=self, logits=logits_XV, lanes=lanes_B)
        return original(self, logits_XV, lanes_B, filters)

    patch.setattr(SequenceState, "probs", probs)
    return seen


def _probs_of(seen: dict[str, Any], *, tempered: bool = True, filters: bool = False, power: int = 1) -> Probs:
    """Probabilities of the pass with some of the settings, the temperature applied `power` times."""
    table: SequenceState = seen["table"]
    temperature_Z = table.temperature_Z**power if tempered else torch.ones_like(table.temperature_Z)
    return sampling.row_probs(
        seen["logits"],
        temperature_Z,
        table.top_k_Z,
        table.top_p_Z,
        table.min_p_Z,
        filters=filters,
        lanes_B=seen["lanes"],
    )


def _keep_as_q(patch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Keep as q of new drafts what `_probs_of` makes of the rows that they were drawn from."""
    seen = _seen(patch)

    def put(op: Any, store: Any, lanes_B: Tensor, probs: Probs, rows_BJ: Tensor, *, active_B: Tensor) -> None:
        op(store, lanes_B, _probs_of(seen, **settings), rows_BJ, active_B=active_B)

    _replace(patch, "put", put)


@fault("law")
def argmax_draft_tested_with_softmax_q(patch: pytest.MonkeyPatch) -> None:
    _replace(patch, "draw_drafts", lambda op, *args, **kwargs: op(*args, **{**kwargs, "takes_best": True}))


@fault("law")
def truncation_missing_in_stored_q(patch: pytest.MonkeyPatch) -> None:
    """Top-k and top-p on p only: the draft comes from the truncated q, the test divides by the full one."""
    _keep_as_q(patch)


@fault("law", "tree")
def draft_q_stored_before_warping(patch: pytest.MonkeyPatch) -> None:
    _keep_as_q(patch, tempered=False)


@fault("law", "branch")
def temperature_applied_twice_to_q(patch: pytest.MonkeyPatch) -> None:
    _keep_as_q(patch, filters=True, power=2)


@fault("law", "tree")
def truncation_missing_in_the_residual(patch: pytest.MonkeyPatch) -> None:
    seen = _seen(patch)

    def emit(op: Any, probs: Probs, store: Any, verdict: Verdict, **columns: Tensor) -> None:
        op(probs, store, verdict, **columns)
        truncated_BA = verdict.token_ids_BA.clone()
        op(_probs_of(seen), store, verdict, **columns)
        is_rejected_B1 = verdict.rejected_B[:, None] > 0
        verdict.token_ids_BA.copy_(torch.where(is_rejected_B1, verdict.token_ids_BA, truncated_BA))

    _replace(patch, "emit", emit)


@fault("law")
def truncation_only_on_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """The published engine: accepted drafts may lie outside the nucleus."""
    seen = _seen(patch)
    for name in ("verify", "draw_drafts"):
        _replace(patch, name, lambda op, probs, *args, **kwargs: op(_probs_of(seen), *args, **kwargs))
    _keep_as_q(patch)


@fault("law")
def accept_number_reused_for_the_last_token(patch: pytest.MonkeyPatch) -> None:
    noted: dict[str, Tensor] = {}

    def verify(op: Any, *args: Any, uniforms_BJ: Tensor, **columns: Any) -> Verdict:
        noted["first"] = uniforms_BJ[:, 0].clone()
        return op(*args, uniforms_BJ=uniforms_BJ, **columns)

    _replace(patch, "verify", verify)
    _replace(patch, "emit", lambda op, *args, **kwargs: op(*args, **{**kwargs, "uniforms_B": noted["first"]}))


@fault("law", "tree")
def one_number_for_all_drafts(patch: pytest.MonkeyPatch) -> None:
    def drafts(op: Any, *args: Any, uniforms_BJ: Tensor, **columns: Any) -> None:
        op(*args, uniforms_BJ=uniforms_BJ[:, :1].expand_as(uniforms_BJ).contiguous(), **columns)

    _replace(patch, "draw_drafts", drafts)


@fault("law", "branch")
def one_stream_for_all_steps(patch: pytest.MonkeyPatch) -> None:
    def frozen(self: SequenceState, lanes_B: Tensor, num_draws: int) -> Tensor:
        return sampling.uniforms(self.seeds_Z[lanes_B], self.samples_Z[lanes_B], 0 * lanes_B, num_draws)

    patch.setattr(SequenceState, "uniforms", frozen)


@fault("law")
def one_stream_for_all_samples(patch: pytest.MonkeyPatch) -> None:
    def shared(self: SequenceState, lanes_B: Tensor, num_draws: int) -> Tensor:
        return sampling.uniforms(self.seeds_Z[lanes_B], 0 * lanes_B, self.steps_Z[lanes_B], num_draws)

    patch.setattr(SequenceState, "uniforms", shared)


@fault("law")
def residual_is_p(patch: pytest.MonkeyPatch) -> None:
    def emit(op: Any, probs: Probs, store: Any, verdict: Verdict, **columns: Tensor) -> None:
        verdict.rejected_B.zero_()
        op(probs, store, verdict, **columns)

    _replace(patch, "emit", emit)


@fault("law", "tree")
def acceptance_with_p_and_q_swapped(patch: pytest.MonkeyPatch) -> None:
    """u * p < q; the same numbers are accepted as by u' * q < p with u' = u * p^2 / q^2."""

    def verify(op: Any, probs: Any, store: Any, tables: Any, *, uniforms_BJ: Tensor, **columns: Any) -> Any:
        lanes_B, first_B, drafts_ZJ = (columns[name] for name in ("lanes_B", "first_rows_B", "drafts_ZJ"))
        num_rows = len(lanes_B) * (drafts_ZJ.shape[1] + 1)
        depth_J = torch.arange(drafts_ZJ.shape[1], device=lanes_B.device)
        ids_BJ, rows_BJ = drafts_ZJ[lanes_B], (first_B[:, None] + depth_J).clamp(max=num_rows - 1)
        p_BJ, q_ZJV = dense_probs(probs)[rows_BJ, ids_BJ], stored_probs(store, getattr(probs, "tuning", None))
        q_BJ = q_ZJV[lanes_B[:, None], depth_J, ids_BJ].clamp(min=1e-300)
        return op(probs, store, tables, uniforms_BJ=uniforms_BJ * (p_BJ / q_BJ) ** 2, **columns)

    _replace(patch, "verify", verify)


@fault("law", "branch")
def drafts_tested_with_another_branchs_q(patch: pytest.MonkeyPatch) -> None:
    def put(op: Any, store: Any, lanes_B: Tensor, probs: Probs, rows_BJ: Tensor, *, active_B: Tensor) -> None:
        others_BJ = torch.minimum(rows_BJ + rows_BJ.shape[1], rows_BJ.max())
        others_BJ = torch.where(rows_BJ < 0, rows_BJ, others_BJ)
        op(store, lanes_B, probs, others_BJ, active_B=active_B)

    _replace(patch, "put", put)


@fault("law", "branch")
def temperature_of_the_lanes_former_request(patch: pytest.MonkeyPatch) -> None:
    original = SequenceState.admit

    def admit(self: SequenceState, lanes: list[int], *rest: Any, **steps: Any) -> None:
        former = self.temperature_Z.clone()
        original(self, lanes, *rest, **steps)
        self.temperature_Z.copy_(former)

    patch.setattr(SequenceState, "admit", admit)


@fault("greedy")
def verify_row_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def verify(op: Any, *args: Any, first_rows_B: Tensor, **columns: Any) -> Verdict:
        return op(*args, first_rows_B=first_rows_B + 1, **columns)

    _replace(patch, "verify", verify)


@fault("greedy", "tree")
def bonus_token_from_the_row_before(patch: pytest.MonkeyPatch) -> None:
    def emit(op: Any, probs: Probs, store: Any, verdict: Verdict, **columns: Tensor) -> None:
        is_swept_B = (verdict.rejected_B == 0) & (verdict.accepted_B > 0)
        verdict.emit_rows_B.sub_(is_swept_B.long())
        op(probs, store, verdict, **columns)

    _replace(patch, "emit", emit)


def _repack(patch: pytest.MonkeyPatch, change: Callable[[StepPlan], StepPlan]) -> None:
    patch.setattr(isd, "plan_rows", lambda *args, **kwargs: change(plan_rows(*args, **kwargs)))


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
        rows_R = torch.arange(len(positions_R), device=positions_R.device)
        offset_R = rows_R - plan.cu_rows_B1[plan.sequence_R]
        positions_R += (offset_R % 2 == 1) & plan.samples_B[plan.sequence_R]
        return replace(plan, positions_R=positions_R)

    _repack(patch, shift)


@fault("greedy", "tree")
def keys_of_a_rejected_draft_kept(patch: pytest.MonkeyPatch) -> None:
    """The KV pointer moves past a rejected draft: one slot keeps KV of a token that was never emitted."""
    original = IsdDecoder.plan

    def plan(self: IsdDecoder, table: SequenceState, batch: Batch) -> StepPlan:
        planned = original(self, table, batch)
        late_B = (table.num_computed_Z[planned.lanes_B] > 8) & (planned.num_feed_B == 1)
        late_R = late_B[planned.sequence_R].long()
        moved = {name: getattr(planned, name) + late_R for name in ("slots_R", "limits_R", "branch_starts_R")}
        return replace(planned, **moved, max_slots=planned.max_slots + 1)

    patch.setattr(IsdDecoder, "plan", plan)


@fault("greedy")
def prompt_chunk_taken_for_a_decoding_step(patch: pytest.MonkeyPatch) -> None:
    def mistaken(original: Callable[..., Batch]) -> Callable[..., Batch]:
        def batch(*args: Any, **options: Any) -> Batch:
            true = original(*args, **options)
            return replace(true, samples_B=true.samples_B | (true.num_feed_B == 7))

        return batch

    patch.setattr(Schedule, "batch", mistaken(Schedule.batch))
    patch.setattr(StaticStep, "_batch", mistaken(StaticStep._batch))


@fault("repeat")
def drafts_of_the_lanes_former_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IsdDecoder, "admit", lambda self, *_: None)


@fault("repeat", "branch")
def random_steps_of_the_lanes_former_request(patch: pytest.MonkeyPatch) -> None:
    original = SequenceState.admit

    def admit(self: SequenceState, requests: Sequence[Request]) -> None:
        former = self.steps_Z.clone()
        original(self, requests)
        self.steps_Z.copy_(former)

    patch.setattr(SequenceState, "admit", admit)


@fault("repeat", "tree")
def random_numbers_by_lane(patch: pytest.MonkeyPatch) -> None:
    def by_lane(self: SequenceState, lanes_B: Tensor, num_draws: int) -> Tensor:
        return sampling.uniforms(lanes_B, self.samples_Z[lanes_B], self.steps_Z[lanes_B], num_draws)

    patch.setattr(SequenceState, "uniforms", by_lane)


def _on_preemption(patch: pytest.MonkeyPatch, change: Callable[[EngineParts, list[int]], None]) -> None:
    original = Worker._admit

    def admit(self: Worker, schedule: Schedule) -> None:
        original(self, schedule)
        change(self.parts, [lane_of(request) for request in schedule.preempted])

    patch.setattr(Worker, "_admit", admit)


@fault("preempt")
def preemption_drops_drafts_but_keeps_the_layout(patch: pytest.MonkeyPatch) -> None:
    def drop(parts: EngineParts, lanes: list[int]) -> None:
        parts.decoder.drafts_ZJ[lanes] = 0

    _on_preemption(patch, drop)


@fault("preempt", "tree")
def preemption_restarts_the_random_stream(patch: pytest.MonkeyPatch) -> None:
    def restart(parts: EngineParts, lanes: list[int]) -> None:
        parts.table.steps_Z[lanes] = 0

    _on_preemption(patch, restart)


@fault("preempt", "branch")
def preemption_keeps_the_kv_pointer(patch: pytest.MonkeyPatch) -> None:
    """After preemption, the engine assumes that all KV is still in the pages that the sequence gets."""
    original = Scheduler._allocate

    def allocate(self: Scheduler, request: Request, num_slots: int) -> bool:
        has_pages = original(self, request, num_slots)
        if has_pages and request in self.running:
            request.num_computed = request.num_known - 1
        return has_pages

    patch.setattr(Scheduler, "_allocate", allocate)


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
