"""The memory manager contract: it sees sizes, never algorithms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from idlm.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDemand:
    """What the engine would like: `page_bytes` of one page over all layers, and the pages that full lanes
    could use.
    """

    page_bytes: int
    max_pages: int
    device: torch.device


class MemoryManager(Protocol):
    """Decides the size of the KV pool."""

    def num_pages(self, demand: KVDemand) -> int:
        """Pages to allocate, at most `demand.max_pages`."""
        ...


MEMORY_MANAGERS: Registry[type[MemoryManager]] = Registry("memory_manager", "idlm.infer.memory")
