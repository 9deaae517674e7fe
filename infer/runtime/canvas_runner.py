"""Runs full-diffusion passes in one planned workspace: the template of the trunk is the program.

Mosaic (its section 4): a pass plans the lifetimes of all its tensors, chunks what does not fit, and gives
every op the offsets it writes to. A plan belongs to a number of rows and is made again only when that number
changes or more rows are wanted than ever before with it; a decoder's first pass wants the most.
Departure from the paper: keys and values of a layer are tensors of the plan, and nothing is stored in pages;
the pool's pages only count rows.
Shapes: R rows of a pass, X wanted rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

import torch

from idlm.errors import UserError
from idlm.infer.models.dense import DenseTrunk
from idlm.infer.models.loader import LoadedModel
from idlm.infer.planning.arena import Arena
from idlm.infer.planning.canvas import canvas_shape, library_bytes
from idlm.infer.planning.chunking import MIN_CHUNK_ROWS, plan_forward, trunk_forward
from idlm.infer.planning.planner import Plan
from idlm.infer.planning.sizes import Sizes
from idlm.infer.planning.trunk import HEAD
from idlm.infer.runtime.canvas_ops import CanvasPass
from idlm.infer.runtime.canvas_rows import CanvasRows
from idlm.infer.state.batch import StepPlan
from idlm.infer.state.page_pool import PagePool

MAX_PLANS = 256
"""Numbers of rows whose plans are kept."""


class CanvasRunner:
    """`capacity`: bytes that the workspace may have. `arm`: as in `trunk_forward`. `min_rows`: of a chunk."""

    def __init__(
        self,
        model: LoadedModel,
        arena: Arena,
        pool: PagePool,
        *,
        capacity: int,
        arm: str = "ours",
        min_rows: int = MIN_CHUNK_ROWS,
    ) -> None:
        assert isinstance(model.trunk, DenseTrunk) and not model.trunk.is_adapted, type(model.trunk)
        self._trunk, self.arena, self.pool = model.trunk, arena, pool
        self.capacity, self.min_rows = capacity, min_rows
        self.shape = canvas_shape(model.spec, model.dtype)
        self._templates = trunk_forward(self.shape, arm)
        self._plans: OrderedDict[int, Plan] = OrderedDict()

    @property
    def library_bytes(self) -> int:
        """Bytes that libraries allocate beside the workspace, at any length."""
        return library_bytes(self.shape)

    def plan_of(self, num_rows: int, num_wanted: int, group: int = 1) -> Plan:
        """The plan of passes of `num_rows` rows, for at least `num_wanted` wanted ones, in groups of `group`;
        UserError IDLM-0466 if it cannot fit.
        """
        plan = self._plans.get(num_rows)
        if plan is None or plan.sizes.wanted < num_wanted or plan.sizes.group < group:
            known = Sizes(length=num_rows) if plan is None else plan.sizes
            plan = plan_forward(
                self._templates,
                length=num_rows,
                wanted=max(num_wanted, known.wanted),
                capacity=self.capacity,
                min_rows=min(self.min_rows, num_rows),
                group=max(group, known.group),
            )
            self._plans[num_rows] = plan
        self._plans.move_to_end(num_rows)
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def check_canvas(self, num_rows: int, num_wanted: int, num_canvases: int = 1) -> None:
        """Raise UserError IDLM-0466 for canvases of a request that do not fit even alone."""
        num_rows, num_wanted = num_canvases * num_rows, num_canvases * num_wanted
        plan_forward(
            self._templates,
            length=num_rows,
            wanted=min(num_rows, num_wanted),
            capacity=self.capacity,
            min_rows=min(self.min_rows, num_rows),
            group=num_canvases,
        )

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> CanvasRows:
        """Run the trunk over the rows of `plan`, and return its wanted rows, whose head is still to run.

        Waits for the bounds of the canvases. Raises torch.OutOfMemoryError if the device cannot give the
        workspace, so that the engine makes passes smaller.
        """
        num_rows, num_wanted = len(plan.token_ids_R), len(plan.logit_rows_X)
        try:
            planned = self.plan_of(num_rows, num_wanted, plan.logit_group)
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
                return CanvasRows(run, list(chain([step], steps)), group=plan.logit_group)
            run.execute(step)
        raise AssertionError(f"no row is wanted: {num_wanted=}")

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Nothing is stored, so nothing is shared."""
        assert not copies, f"{copies=}"
