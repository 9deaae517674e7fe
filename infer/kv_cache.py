"""Paged KV store: pages of `page_size` slots, handed to lanes and taken back; keys and values of all layers.

Commit is a pointer (`SequenceTable.num_computed_Z`): slots past it are overwritten by the next pass, so
rejected drafts and masks need no clean-up.
Shapes: Z lanes, P pages of the longest sequence, S physical slots, K KV heads, H head dim, R rows of this
pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.infer.transfer import to_device


class PagePool:
    """Which lane owns which page. Equation at all times: free pages + pages of all lanes = all pages."""

    def __init__(
        self, *, num_pages: int, page_size: int, num_lanes: int, max_slots: int, device: torch.device
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: list[list[int]] = [[] for _ in range(num_lanes)]
        max_pages = min(num_pages, self.pages_for(max_slots))
        self._block_table_ZP = torch.zeros(num_lanes, max_pages, dtype=torch.int64, device=device)
        self._unwritten: dict[tuple[int, int], int] = {}

    @property
    def block_table_ZP(self) -> Tensor:
        """Page ids of each lane, in order."""
        self.flush()
        return self._block_table_ZP

    def flush(self) -> None:
        """Write the reservations since the last time in one go."""
        if self._unwritten:
            entries = [(lane, place, page) for (lane, place), page in self._unwritten.items()]
            lanes, places, pages = to_device(entries, self._block_table_ZP.device).unbind(dim=1)
            self._block_table_ZP[lanes, places] = pages
            self._unwritten.clear()

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def num_owned(self, lane: int) -> int:
        """Pages of a lane."""
        return len(self._owned[lane])

    def pages_for(self, num_slots: int) -> int:
        """Pages that hold `num_slots` slots."""
        return -(-num_slots // self.page_size)

    def reserve(self, lane: int, num_slots: int) -> bool:
        """Give the lane pages for `num_slots` slots in all; False, changing nothing, if too few are free."""
        owned = self._owned[lane]
        missing = self.pages_for(num_slots) - len(owned)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            page = self._free.pop()
            self._unwritten[lane, len(owned)] = page
            owned.append(page)
        return True

    def release(self, lane: int) -> None:
        """Take all pages of a lane back."""
        self._free.extend(reversed(self._owned[lane]))
        self._owned[lane] = []

    def check(self) -> None:
        """Assert the pool equation: every page is free or owned, exactly once."""
        pages = [*self._free, *(page for owned in self._owned for page in owned)]
        assert len(pages) == self.num_pages, f"{len(pages)=} {self.num_pages=}"
        assert len(set(pages)) == self.num_pages, "a page is owned twice"


class KVCache:
    """Keys and values [S, K, H] of every layer, in physical slots page * page_size + offset."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, slot_mapping_R: Tensor, k_RKH: Tensor, v_RKH: Tensor) -> None:
        """Store this pass's keys and values at physical slots."""
        self.keys[layer, slot_mapping_R] = k_RKH
        self.values[layer, slot_mapping_R] = v_RKH
