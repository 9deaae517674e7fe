"""The default manager: torch's caching allocator for transients, a fixed share of the memory for KV pages."""

from __future__ import annotations

import torch

from idlm.errors import UserError
from idlm.infer.memory.base import MEMORY_MANAGERS, MemoryDemand, MemoryPlan

CPU_POOL_BYTES = 2 << 30
GPU_SHARE_OF_FREE = 0.8


@MEMORY_MANAGERS.register("caching")
class Caching:
    """The KV pool takes 2 GiB on a CPU, and on a GPU 80 % of what the weights leave free. No chunks."""

    def plan(self, demand: MemoryDemand) -> MemoryPlan:
        """As many pages as fit into the share; UserError IDLM-0405 if that is none."""
        if not demand.max_pages:
            return MemoryPlan()
        budget = CPU_POOL_BYTES
        if demand.device.type == "cuda":
            budget = int(torch.cuda.mem_get_info(demand.device)[0] * GPU_SHARE_OF_FREE)
        num_pages = min(demand.max_pages, budget // demand.page_bytes)
        if num_pages < 1:
            raise UserError(
                "IDLM-0405",
                f"a KV page takes {demand.page_bytes} bytes and {budget} are available",
                fix="free memory on the device, or use a smaller page_size or dtype",
            )
        return MemoryPlan(num_pages=num_pages)
