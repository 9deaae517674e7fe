"""The product's executor as arms of the benchmark: `paper`, `mosaic`, `ours`.

What the benchmark asks of them; `executor.py` answers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.engine.canvas.native_arms import Canvas
from idlm.infer.models.base import ModelSpec
from idlm.infer.mosaic.arena import MAPPED, PLAIN
from idlm.infer.mosaic.canvas import canvas_shape
from idlm.infer.mosaic.chunking import plan_forward, trunk_forward
from idlm.infer.mosaic.planner import Plan, plan_template
from idlm.infer.mosaic.sizes import Sizes

PRODUCT_ARMS = ("paper", "mosaic", "ours")
ARENAS = (PLAIN, MAPPED)
PLANNING_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Options:
    """`arena` "": the product's default. `chunks` 0: the planner chooses."""

    arena: str = ""
    chunks: int = 0


def planning_ms(spec: ModelSpec, *, length: int, wanted: int, capacity: int) -> dict[str, float]:
    """Milliseconds of one plan of fixed sizes (`plan_ms`) and of a search under a capacity (`search_ms`).

    The least of some rounds; the templates are made before, as a process makes them once.
    """
    forward = trunk_forward(canvas_shape(spec, torch.bfloat16))
    found = {"plan_ms": float("inf"), "search_ms": float("inf")}
    for _ in range(PLANNING_ROUNDS):
        start = time.perf_counter()
        plan_template(forward.whole, Sizes(length=length, wanted=wanted))
        middle = time.perf_counter()
        plan_forward(forward, length=length, wanted=wanted, capacity=capacity)
        times = {"plan_ms": middle - start, "search_ms": time.perf_counter() - middle}
        found = {name: min(found[name], 1e3 * seconds) for name, seconds in times.items()}
    return found


class ProductArm(ABC):
    """A step of the product's executor, and what the benchmark asks of its plan."""

    resize_seconds: float = 0.0
    """Time spent in `resize` of the arena so far, the wait for the device included."""

    @abstractmethod
    def step(self, canvas: Canvas) -> Tensor:
        """Return the ids [1, L] after one step; UserError IDLM-0466 if the canvas does not fit."""

    @abstractmethod
    def plan(self, canvas: Canvas) -> Plan:
        """The plan of a canvas."""

    @abstractmethod
    def shrink(self) -> None:
        """Give the workspace back to the card."""

    @abstractmethod
    def force_chunks(self, count: int) -> None:
        """Cut everything that can be cut into `count` chunks from now on; 0: as the planner chooses."""

    @abstractmethod
    def library_bytes(self) -> int:
        """Bytes that libraries may allocate beside the workspace, at any length."""

    @abstractmethod
    def timeline(self, canvas: Canvas) -> list[tuple[float, float]]:
        """Microseconds and bytes alive at the start of each op of one step."""

    def planned(self, canvas: Canvas) -> dict[str, int]:
        """Bytes of the workspace, the most that live in it at once, and all bytes that are planned."""
        plan = self.plan(canvas)
        return {
            "workspace_bytes": plan.peak_bytes,
            "planned_live_bytes": plan.live_bytes,
            "planned_bytes": plan.peak_bytes + self.library_bytes(),
        }


def open_arm(
    arm: str, model: str, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, options: Options
) -> ProductArm:
    """Our arm of a model."""
    from benchmarks.engine.canvas.executor import ExecutorArm

    return ExecutorArm(arm, model, spec, device=device, dtype=dtype, options=options)
