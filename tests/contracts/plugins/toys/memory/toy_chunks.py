"""A toy memory manager in one file: few pages, and logits in slices that fit into a few kilobytes."""

from __future__ import annotations

from idlm.infer.memory.base import MEMORY_MANAGERS, MemoryDemand, MemoryPlan

MAX_PAGES = 24
TRANSIENT_BYTES = 4096


@MEMORY_MANAGERS.register("toy_chunks")
class ToyChunks:
    """Bounds every transient by `TRANSIENT_BYTES` and the pool by `MAX_PAGES`."""

    def plan(self, demand: MemoryDemand) -> MemoryPlan:
        """As many slices as it takes, at most one a row."""
        chunks = {
            name: min(one.num_rows, -(-one.num_rows * one.row_bytes // TRANSIENT_BYTES))
            for name, one in demand.transients.items()
        }
        return MemoryPlan(num_pages=min(demand.max_pages, MAX_PAGES), num_chunks=chunks)
