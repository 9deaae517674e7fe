"""The memory manager contract: sizes in, a plan out. A manager knows no algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from idlm.registry import Registry

LOGITS = "logits"
"""Name of the transient of the output head: the logits of the wanted rows and what is made of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transient:
    """Memory that one operator of a pass takes and gives back: `num_rows` rows of `row_bytes` bytes."""

    row_bytes: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand:
    """The sizes wanted: at build time the KV pages and the largest transients, for a pass its transients
    alone.

    `page_bytes`: of one page over all KV buffers. `max_pages`: pages that full lanes could use. `transients`
    by name of operator.
    """

    device: torch.device
    page_bytes: int = 0
    max_pages: int = 0
    transients: Mapping[str, Transient] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """`num_pages` to allocate, at most `max_pages`; `num_chunks` by name of transient: into how many slices
    of rows the operator is divided (a name that is missing: one).
    """

    num_pages: int = 0
    num_chunks: Mapping[str, int] = field(default_factory=dict)


class MemoryManager(Protocol):
    """Decides the size of the KV pool and how passes divide what they allocate."""

    def plan(self, demand: MemoryDemand) -> MemoryPlan:
        """The plan for `demand`; UserError IDLM-0405 where nothing fits.

        `num_chunks` must depend on the demand alone: ranks that share a model plan on their own and must
        agree, and a plan is computed once for all passes of the same size.
        """
        ...


MEMORY_MANAGERS: Registry[type[MemoryManager]] = Registry("memory_manager", "idlm.infer.memory")
