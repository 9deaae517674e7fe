"""The contract of memory managers, which depend on sizes and no algorithm, and the default manager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from idlm.errors import UserError
from idlm.infer.mosaic.trunk import TrunkShape
from idlm.registry import Registry

CPU_POOL_BYTES = 2 << 30
GPU_SHARE_OF_FREE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Transient:
    """What the output head takes and gives back in a pass, the logits of the wanted rows and what is made of
    them: `num_rows` rows of `row_bytes` bytes."""

    row_bytes: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand:
    """The sizes wanted: at build time the KV pages and the largest transient, for a pass its transient alone.

    `page_bytes`: over all KV buffers. `max_pages`: pages that full lanes could use. `pass_bytes`: what
    accelerators take during a pass. `canvas`: the trunk of a decoder that stores nothing, of which a page
    counts `page_size` rows of a pass."""

    device: torch.device
    transient: Transient
    page_bytes: int = 0
    max_pages: int = 0
    pass_bytes: int = 0
    canvas: TrunkShape | None = None
    page_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """`num_pages` to allocate, at most `max_pages`; `num_chunks`: into how many slices of rows the transient
    is divided. `workspace_bytes`: what the workspace of a planned pass may have."""

    num_pages: int = 0
    workspace_bytes: int = 0
    num_chunks: int = 1


class MemoryManager(Protocol):
    """Decides the size of the KV pool and how passes divide what they allocate.

    A true attribute `plans_canvases` has `CanvasRunner` execute its passes, without pages of KV."""

    def plan(self, demand: MemoryDemand) -> MemoryPlan:
        """The plan for `demand`; UserError IDLM-0405 where nothing fits. `num_chunks` must depend on the
        demand alone: ranks that share a model plan on their own."""
        ...


def plans_canvases(manager: Any) -> bool:
    """Whether passes run in one planned workspace, without pages of keys and values."""
    return getattr(manager, "plans_canvases", False)


MEMORY_MANAGERS: Registry[type[MemoryManager]] = Registry("memory_manager", "idlm.infer.memory")


@MEMORY_MANAGERS.register("caching")
class Caching:
    """The default: torch's caching allocator for transients, without chunks. The KV pool takes 2 GiB on a
    CPU, and on a GPU 80 % of what the weights leave free, less what accelerators take during a pass."""

    def plan(self, demand: MemoryDemand) -> MemoryPlan:
        """As many pages as fit into the share; UserError IDLM-0405 if that is none."""
        if not demand.max_pages:
            return MemoryPlan()
        budget = CPU_POOL_BYTES
        if demand.device.type == "cuda":
            budget = int(torch.cuda.mem_get_info(demand.device)[0] * GPU_SHARE_OF_FREE)
            budget = max(0, budget - demand.pass_bytes)
        num_pages = min(demand.max_pages, budget // demand.page_bytes)
        if num_pages < 1:
            raise UserError(
                "IDLM-0405",
                f"a KV page takes {demand.page_bytes} bytes and {budget} are available",
                fix="free memory on the device, or use a smaller page_size or dtype",
            )
        return MemoryPlan(num_pages=num_pages)
