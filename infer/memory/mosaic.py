"""`memory=mosaic`: full-diffusion passes in one workspace, planned for their rows (Mosaic, section 4).

A decoder that stores nothing has no pages of keys and values. The pool's pages count rows of a pass instead:
as many as fit into the workspace together when all of them are wanted, so a pass that the scheduler admits
can be planned."""

from __future__ import annotations

from typing import ClassVar

from idlm.errors import UserError
from idlm.infer.memory.base import MEMORY_MANAGERS, MemoryDemand, MemoryPlan
from idlm.infer.mosaic.canvas import workspace_bytes
from idlm.infer.mosaic.chunking import max_length, search, trunk_forward
from idlm.infer.mosaic.planner import ArenaPlan
from idlm.infer.mosaic.template import Sizes


@MEMORY_MANAGERS.register("mosaic")
class Mosaic:
    """The workspace may have what the weights leave free, but for what libraries need."""

    plans_canvases: ClassVar[bool] = True

    def plan(self, demand: MemoryDemand) -> MemoryPlan:
        """Pages for the most rows that fit; UserError IDLM-0405 if that is less than a page."""
        assert demand.canvas is not None, "this manager plans canvases only"
        forward, size = trunk_forward(demand.canvas), demand.page_size
        capacity = workspace_bytes(demand.canvas, demand.device)
        maximum = demand.max_pages * size
        if isinstance(search(forward, Sizes(length=maximum, wanted=maximum), capacity=capacity), ArenaPlan):
            return MemoryPlan(num_pages=demand.max_pages, workspace_bytes=capacity)
        num_rows = max_length(forward, capacity=capacity, wanted_share=1.0)
        if num_rows < size:
            raise UserError(
                "IDLM-0405",
                f"a workspace for {size} rows does not fit: {max(0, capacity)} bytes are available",
                fix="free memory on the device, or use a smaller page_size or dtype",
            )
        return MemoryPlan(num_pages=num_rows // size, workspace_bytes=capacity)
