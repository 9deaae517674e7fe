"""Runs full-diffusion passes in one planned workspace: the template of the trunk is the program.

Mosaic (its section 4): a pass plans the lifetimes of all its tensors, chunks what does not fit, and gives
every op the offsets it writes to. A plan belongs to a number of rows and is made again only when that number
changes or more rows are wanted than ever before with it; a decoder's first pass needs the most.
Departure from the paper: keys and values of a layer are tensors of the plan, and nothing is stored in pages;
the pool's pages only count rows.
Shapes: R rows of a pass, X wanted rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace
from itertools import chain

import torch

from idlm.errors import UserError
from idlm.infer.decoders.base import KVWritePolicy
from idlm.infer.models.base import USUAL
from idlm.infer.models.dense import DenseTrunk
from idlm.infer.models.loader import LoadedModel, Outline
from idlm.infer.mosaic.arena import Arena
from idlm.infer.mosaic.canvas import canvas_shape, fused_head
from idlm.infer.mosaic.canvas_ops import BestRows, CanvasPass, CanvasRows
from idlm.infer.mosaic.chunking import MIN_CHUNK_ROWS, plan_forward, search, trunk_forward
from idlm.infer.mosaic.planner import ArenaPlan
from idlm.infer.mosaic.template import Sizes
from idlm.infer.mosaic.trunk import FUSED_HEAD, HEAD
from idlm.infer.runtime.model_runner import PassRunner
from idlm.infer.settings import EngineSettings
from idlm.infer.state.batch import StepPlan, WantedRows
from idlm.infer.state.page_pool import PagePool

MAX_PLANS = 256
"""Numbers of rows whose plans are cached."""


def resolve_canvases(
    settings: EngineSettings, policy: KVWritePolicy, outline: Outline, accelerators: Collection[str]
) -> EngineSettings:
    """The settings of an engine whose passes run in one workspace: they are eager, because a plan follows
    their rows. Raises UserError IDLM-0471 for what is not in the template."""
    name = f"memory={settings.memory}"
    if not policy.shares_layers:
        raise UserError(
            "IDLM-0471",
            f"{name} runs decoders that store nothing between passes, and this one stores pages of keys "
            "and values",
            fix="use memory=caching, or decoder=full without decoder.cache on a full-diffusion checkpoint",
        )
    moe, backend = outline.spec.moe, settings.attention
    refused = {
        "a gated adapter": bool(outline.adapters),
        "experts in some layers only": bool(moe and (moe.dense_layers or moe.layer_step != 1)),
        "layers whose norms, scales or rotations are not those of Llama": outline.spec.variant != USUAL,
        "a shared expert": moe is not None and moe.shared_ffn_width > 0,
        f"accelerators=[{','.join(accelerators)}]": bool(accelerators),
        f"tensor_parallel={settings.tensor_parallel}": settings.tensor_parallel > 1,
        f"weights={settings.weights}": settings.weights == "fp8",
        f"kv_cache={settings.kv_cache}": settings.kv_cache == "fp8",
        "graphs=on": settings.graphs == "on",
        "deterministic=true": settings.deterministic is True,
        f"attention={backend}, which chooses paged attention": backend != "auto",
    }
    found = [what for what, is_refused in refused.items() if is_refused]
    if found:
        raise UserError(
            "IDLM-0471",
            f"{name} does not support {'; '.join(found)}",
            fix="leave it out, or use memory=caching",
        )
    return replace(settings, graphs="off")


class CanvasRunner(PassRunner):
    """`capacity`: bytes that the workspace may have."""

    def __init__(self, model: LoadedModel, arena: Arena, pool: PagePool, *, capacity: int) -> None:
        assert isinstance(model.trunk, DenseTrunk) and not model.trunk.num_adapters, type(model.trunk)
        self._trunk, self.arena, self.pool = model.trunk, arena, pool
        self.capacity, self.min_rows = capacity, MIN_CHUNK_ROWS
        self.shape = canvas_shape(model.spec, model.dtype)
        self._templates = trunk_forward(self.shape)
        has_best = model.trunk.head_weight is not None
        self._best_templates = trunk_forward(fused_head(self.shape)) if has_best else None
        self._plans: OrderedDict[tuple[int, bool], ArenaPlan] = OrderedDict()

    def plan_of(
        self, num_rows: int, num_wanted: int, group: int = 1, *, takes_best: bool = False
    ) -> ArenaPlan:
        """The plan of passes of `num_rows` rows, for at least `num_wanted` wanted ones, in groups of `group`;
        UserError IDLM-0466."""
        key = num_rows, takes_best
        plan = self._plans.get(key)
        if plan is None or plan.sizes.wanted < num_wanted or plan.sizes.group < group:
            known = Sizes(length=num_rows) if plan is None else plan.sizes
            wanted, group = max(num_wanted, known.wanted), max(group, known.group)
            sizes = Sizes(length=num_rows, wanted=wanted, group=group)
            self._plans[key] = plan = self._plan(sizes, takes_best=takes_best)
        self._plans.move_to_end(key)
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def check_canvas(self, num_rows: int, num_wanted: int, num_canvases: int = 1) -> None:
        """Raise UserError IDLM-0466 for canvases of a request that do not fit even alone."""
        wanted = num_canvases * min(num_rows, num_wanted)
        self._plan(Sizes(length=num_canvases * num_rows, wanted=wanted, group=num_canvases))

    def _plan(self, sizes: Sizes, *, takes_best: bool = False) -> ArenaPlan:
        limits = {"capacity": self.capacity, "min_rows": min(self.min_rows, sizes.length)}
        if takes_best and self._best_templates is not None:
            plan = search(self._best_templates, replace(sizes, group=1), **limits)
            # Its constant workspace may not fit where a few rows of logits do.
            if isinstance(plan, ArenaPlan):
                return plan
        return plan_forward(self._templates, sizes, **limits)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> WantedRows:
        """Run the trunk over the rows of `plan`, and return its wanted rows, whose head is still to run.

        Waits for the bounds of the canvases. Raises torch.OutOfMemoryError if the device cannot give the
        workspace, so that the engine makes passes smaller."""
        num_rows, num_wanted, fed = len(plan.token_ids_R), len(plan.logit_rows_X), plan.canvases
        try:
            planned = self.plan_of(num_rows, num_wanted, fed.logit_group, takes_best=fed.takes_best)
            self.arena.resize(planned.peak_bytes)
        except UserError as error:
            raise torch.OutOfMemoryError(error.message) from error
        run = CanvasPass(
            trunk=self._trunk,
            plan=planned,
            arena=self.arena,
            token_ids_R=plan.token_ids_R,
            positions_R=plan.positions_R,
            rows_X=plan.logit_rows_X,
            bounds=tuple(plan.cu_rows_B1.tolist()),
        )
        steps = planned.steps(wanted=num_wanted)
        for step in steps:
            if step.op.loop == HEAD:
                return CanvasRows(run, list(chain([step], steps)), group=fed.logit_group)
            if step.op.name == FUSED_HEAD:
                return BestRows(run, step)
            run.execute(step)
        raise AssertionError(f"no row is wanted: {num_wanted=}")
