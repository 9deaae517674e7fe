"""One denoising step by the product's planned passes, over a trunk of random weights.

The proposals are those of decoder `full` at temperature 0, order low_confidence.
Shapes: R rows of the canvas, X wanted rows, Y rows of a slice, V vocabulary."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.engine.canvas.native import Canvas, Proposals, decided
from benchmarks.models import MODELS, family_of, random_model
from idlm.infer.decoders.full import SCORE_BYTES
from idlm.infer.mosaic import canvas, canvas_runner
from idlm.infer.mosaic.arena import PLAIN, open_arena
from idlm.infer.mosaic.canvas_ops import CanvasPass
from idlm.infer.mosaic.chunking import Forward, trunk_forward
from idlm.infer.mosaic.planner import ArenaPlan, live_bytes, storage_bytes
from idlm.infer.mosaic.template import PassTemplate
from idlm.infer.mosaic.trunk import TrunkShape, trunk_template
from idlm.infer.state.batch import FedCanvases, StepPlan
from idlm.infer.state.page_pool import PagePool
from idlm.kernels.sampling import judged_draws, row_probs

PRODUCT_ARMS = ("paper", "mosaic", "ours")


def forward_of(arm: str, shape: TrunkShape) -> Forward:
    """The templates of an arm: `ours` is the product, which may chunk query rows; `mosaic` computes attention
    whole, and `paper` also holds x, norm, q, k, v and heads alive together, as attention without a plan does.
    """
    assert arm in PRODUCT_ARMS, arm
    if arm == "ours":
        return trunk_forward(shape)
    whole = trunk_template(shape)
    return Forward(_with_all_of_attention(whole) if arm == "paper" else whole)


def _with_all_of_attention(whole: PassTemplate) -> PassTemplate:
    kept = PassTemplate(whole.name.replace("whole", "paper"))
    kept.tensors, kept.num_layers = whole.tensors, whole.num_layers
    held = ("x", "attention_in")
    kept.ops = [replace(op, reads=op.reads + held) if op.name == "attention" else op for op in whole.ops]
    return kept


class ExecutorArm:
    """An arm of `forward_of`; the workspace may have all that is free once the weights exist."""

    def __init__(
        self, arm: str, model: str, *, num_layers: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        loaded = random_model(model, device=str(device), dtype=dtype, num_layers=num_layers)
        self._mask_id, self._shift = MODELS[model]["mask_token_id"], int(family_of(model).logit_shift)
        self._mask_id_S = torch.tensor([self._mask_id], device=device)
        self._vocab = loaded.spec.vocab_size
        self._arena = open_arena(PLAIN, device)
        capacity = canvas.workspace_bytes(canvas.canvas_shape(loaded.spec, dtype), device)
        # Pages only count rows for the scheduler, which does not run here.
        pool = PagePool(num_pages=1, page_size=1, num_lanes=1, max_slots=1, device=device)
        with patch.object(canvas_runner, "trunk_forward", partial(forward_of, arm)):
            self._runner = canvas_runner.CanvasRunner(loaded, self._arena, pool, capacity=capacity)

    def propose(self, given: Canvas) -> Proposals:
        ids_R, positions_X = given.ids_BL[0], given.index_M
        wanted = self._runner.forward(self._step_plan(ids_R, positions_X))
        best = wanted.best(self._mask_id_S, torch.ones_like(positions_X, dtype=torch.bool))
        if best is not None:
            return best.token_X, best.own_X

        def propose(logits_YV: Tensor, rows: slice) -> tuple[Tensor, ...]:
            zeros_Y = torch.zeros(len(logits_YV), dtype=torch.float64, device=logits_YV.device)
            probs = row_probs(
                logits_YV,
                zeros_Y,
                zeros_Y.long(),
                zeros_Y,
                zeros_Y,
                filters=False,
                forbidden_id=self._mask_id,
                own=True,
            )
            return judged_draws(probs, zeros_Y + 0.5, zeros_Y)

        row_bytes = SCORE_BYTES * self._vocab if ids_R.device.type == "cpu" else 0
        tokens_X, confidence_X = wanted.proposals(propose, row_bytes=row_bytes)
        return tokens_X, confidence_X

    @torch.inference_mode()
    def step(self, given: Canvas) -> Tensor:
        """Return the ids [1, L] after one step; UserError IDLM-0466 if the canvas does not fit."""
        return decided(given, self.propose(given))

    def _step_plan(self, ids_R: Tensor, positions_X: Tensor) -> StepPlan:
        num_rows, device = len(ids_R), ids_R.device
        rows_R = torch.arange(num_rows, device=device)
        limits_R, zero_B = torch.full_like(rows_R, num_rows), rows_R[:1]
        is_true_B = torch.ones(1, dtype=torch.bool, device=device)
        return StepPlan(
            lanes_B=zero_B,
            cu_rows_B1=torch.tensor([0, num_rows], device=device),
            sequence_R=torch.zeros_like(rows_R),
            token_ids_R=ids_R,
            positions_R=rows_R,
            slots_R=rows_R,
            limits_R=limits_R,
            branch_starts_R=limits_R,
            is_mask_R=None,
            logit_rows_X=(positions_X - self._shift).clamp(min=0),
            first_logit_B=zero_B,
            num_feed_B=limits_R[:1],
            samples_B=is_true_B,
            advances_B=is_true_B,
            max_rows=num_rows,
            max_slots=num_rows,
            payload=FedCanvases(takes_best=True),
        )

    def plan(self, given: Canvas) -> ArenaPlan:
        num_rows, num_wanted = given.ids_BL.shape[1], len(given.index_M)
        found: ArenaPlan = self._runner.plan_of(num_rows, num_wanted, takes_best=True)
        return found

    def planned(self, given: Canvas) -> dict[str, int]:
        """Bytes of the workspace, the most that live in it at once, and all bytes that are planned: libraries
        may allocate some outside the workspace."""
        plan = self.plan(given)
        return {
            "workspace_bytes": plan.peak_bytes,
            "planned_live_bytes": plan.live_bytes,
            "planned_bytes": plan.peak_bytes + canvas.library_bytes(self._runner.shape),
        }

    def shrink(self) -> None:
        self._arena.resize(0)

    def timeline(self, given: Canvas) -> list[tuple[float, float]]:
        """Microseconds and bytes alive at the start of each op of one step."""
        plan, points, run_op = self.plan(given), list[tuple[float, float]](), CanvasPass.execute
        lifetimes = plan.template.lifetimes
        live = live_bytes(lifetimes, storage_bytes(lifetimes, plan.sizes))
        start = time.perf_counter()

        def timed(run: Any, step: Any, op: Any = None) -> None:
            points.append((1e6 * (time.perf_counter() - start), float(live[step.position])))
            run_op(run, step, op)

        with patch.object(CanvasPass, "execute", timed):
            self.step(given)
        return points
