"""One denoising step by the product's planned passes, over a trunk of random weights.

The only file that uses names of the executor. They are looked up when an arm opens, because a tree may lack
them. The proposals are those of decoder `full` at temperature 0, order low_confidence.
Shapes: R rows of the canvas, X wanted rows, Y rows of a slice, V vocabulary.
"""

from __future__ import annotations

import math
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.engine.canvas.models import CONFIGS, family_of
from benchmarks.engine.canvas.native import Canvas, Proposals
from idlm.infer.decoders.full import SCORE_BYTES
from idlm.infer.models.base import ModelSpec
from idlm.infer.models.loader import LoadedModel, make_trunk
from idlm.infer.mosaic.arena import PLAIN, open_arena
from idlm.infer.mosaic.chunking import Forward, trunk_forward
from idlm.infer.mosaic.lifetimes import Op
from idlm.infer.mosaic.planner import ArenaPlan, live_bytes, storage_bytes
from idlm.infer.mosaic.template import PassTemplate
from idlm.infer.mosaic.trunk import ATTENTION, TrunkShape, trunk_template
from idlm.infer.state.batch import FedCanvases, StepPlan
from idlm.infer.state.page_pool import PagePool
from idlm.kernels.sampling import judged_draws, row_probs

PRODUCT_ARMS = ("paper", "mosaic", "ours")


def forward_of(arm: str, shape: TrunkShape) -> Forward:
    """The templates of an arm: `ours` is the product, which may chunk query rows; `mosaic` keeps attention
    whole, and `paper` also keeps x, norm, q, k, v and heads alive together, as attention without a plan does.
    """
    assert arm in PRODUCT_ARMS, arm
    if arm == "ours":
        return trunk_forward(shape)
    whole = trunk_template(shape)
    return Forward(_with_all_of_attention(whole) if arm == "paper" else whole)


def _with_all_of_attention(whole: PassTemplate) -> PassTemplate:
    kept = PassTemplate(whole.name.replace("whole", "paper"))
    kept.tensors, kept.aliases, kept.inputs = whole.tensors, whole.aliases, whole.inputs
    kept.num_layers, kept.ops = whole.num_layers, [*whole.ops]
    names = ("x", "attention_in", "q", "k", "v", "heads")
    barrier = Op(name="barrier", reads=names, loop=ATTENTION, in_layers=True, is_barrier=True)
    kept.ops.insert(1 + [op.name for op in kept.ops].index("attention"), barrier)
    return kept


class ExecutorArm:
    """An arm of `forward_of`; the workspace may have all that is free once the weights exist."""

    def __init__(
        self,
        arm: str,
        model: str,
        spec: ModelSpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        planned = import_module("idlm.infer.mosaic.canvas")
        runner = import_module("idlm.infer.mosaic.canvas_runner")
        self._ops = import_module("idlm.infer.mosaic.canvas_ops")
        config = CONFIGS[model]
        family = family_of(config)
        loaded = LoadedModel(
            trunk=random_trunk(spec, device=device, dtype=dtype),
            spec=spec,
            local=spec,
            semantics=family.semantics(config),
            architecture=config["architectures"][0],
            dtype=dtype,
            device=device,
            directory=Path(),
        )
        self._mask_id, self._shift = config["mask_token_id"], int(family.logit_shift)
        self._mask_id_S = torch.tensor([self._mask_id], device=device)
        self._vocab = spec.vocab_size
        shape = planned.canvas_shape(spec, dtype)
        self._arena = open_arena(PLAIN, device)
        capacity = planned.workspace_bytes(shape, device)
        # Pages only count rows for the scheduler, which does not run here.
        pool = PagePool(num_pages=1, page_size=1, num_lanes=1, max_slots=1, device=device)
        with patch.object(runner, "trunk_forward", partial(forward_of, arm)):
            self._runner = runner.CanvasRunner(loaded, self._arena, pool, capacity=capacity)

    def propose(self, canvas: Canvas) -> Proposals:
        """Tokens [X] and confidences [X] of the masks."""
        ids_R, places_X = canvas.ids_BL[0], canvas.places_M
        wanted = self._runner.forward(self._step_plan(ids_R, places_X))
        best = wanted.best(self._mask_id_S, torch.ones_like(places_X, dtype=torch.bool))
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
    def step(self, canvas: Canvas) -> Tensor:
        """Return the ids [1, L] after one step; UserError IDLM-0466 if the canvas does not fit."""
        tokens_X, confidence_X = self.propose(canvas)
        best = confidence_X.argmax()
        ids_BL = canvas.ids_BL.clone()
        ids_BL[0, canvas.places_M[best]] = tokens_X[best]
        return ids_BL

    def _step_plan(self, ids_R: Tensor, places_X: Tensor) -> StepPlan:
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
            logit_rows_X=(places_X - self._shift).clamp(min=0),
            first_logit_B=zero_B,
            num_feed_B=limits_R[:1],
            samples_B=is_true_B,
            advances_B=is_true_B,
            max_rows=num_rows,
            max_slots=num_rows,
            payload=FedCanvases(takes_best=True),
        )

    def plan(self, canvas: Canvas) -> ArenaPlan:
        """The plan of a canvas."""
        num_rows, num_wanted = canvas.ids_BL.shape[1], len(canvas.places_M)
        found: ArenaPlan = self._runner.plan_of(num_rows, num_wanted, takes_best=True)
        return found

    def library_bytes(self) -> int:
        """Bytes that libraries may allocate beside the workspace, at any length."""
        return int(self._runner.library_bytes)

    def planned(self, canvas: Canvas) -> dict[str, int]:
        """Bytes of the workspace, the most that live in it at once, and all bytes that are planned."""
        plan = self.plan(canvas)
        return {
            "workspace_bytes": plan.peak_bytes,
            "planned_live_bytes": plan.live_bytes,
            "planned_bytes": plan.peak_bytes + self.library_bytes(),
        }

    def shrink(self) -> None:
        """Give the workspace back to the card."""
        self._arena.resize(0)

    def timeline(self, canvas: Canvas) -> list[tuple[float, float]]:
        """Microseconds and bytes alive at the start of each op of one step."""
        plan, points, run_op = self.plan(canvas), [], self._ops.CanvasPass.execute
        lifetimes = plan.template.lifetimes
        live = live_bytes(lifetimes, storage_bytes(lifetimes, plan.sizes))
        start = time.perf_counter()

        def timed(run: Any, step: Any, op: Any = None) -> None:
            points.append((1e6 * (time.perf_counter() - start), float(live[step.position])))
            run_op(run, step, op)

        with patch.object(self._ops.CanvasPass, "execute", timed):
            self.step(canvas)
        return points


def random_trunk(spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """The product's trunk with random weights, made on the device."""
    trunk = make_trunk(spec, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trunk.named_parameters():
            if name.endswith("norm"):
                parameter.fill_(1.0)
            elif name == "embed":
                parameter.normal_(generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
    return trunk
