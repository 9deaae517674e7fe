"""The plain manager: torch's caching allocator for transients, a fixed share of the memory for KV pages."""

from __future__ import annotations

import torch

from idlm.errors import UserError
from idlm.infer.memory.base import MEMORY_MANAGERS, KVDemand

CPU_POOL_BYTES = 2 << 30
GPU_SHARE_OF_FREE = 0.8


@MEMORY_MANAGERS.register("caching")
class Caching:
    """KV pool: 2 GiB on a CPU, 80 % of what is free on a GPU once the weights are loaded."""

    def num_pages(self, demand: KVDemand) -> int:
        """As many pages as fit into the share, at most what full lanes could use."""
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
        return num_pages
