"""Keys and values in pages: the books of pages of `page_size` slots, handed to lanes and taken back, and the
memory of the slots (`KVCache`).

Commit is a pointer (`SequenceState.num_computed_Z`): the next pass overwrites the slots after it, so rejected
drafts and masks need no clean-up. Pages that lie wholly before it are final, and lanes share them.
Shapes: Z lanes, B sequences, P pages of the longest one, S physical slots, K KV heads, H head dim, R rows of
a pass, N query heads, C listed slots."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.infer.state.batch import to_device
from idlm.kernels.paged_attention import BackendPlan, BeforeBlock, paged_attention


@dataclass(slots=True, kw_only=True)
class PrefixCacheCounts:
    """Counts since the engine was built. `num_tokens`: known tokens looked up for sequences that were
    admitted or resumed; `num_hit_tokens`: those whose KV was found."""

    num_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted: int = 0


class PrefixCache:
    """Index of committed pages by content, which evicts the least recently used first.

    A page's key is sha256 over the key of the page before it and its own token ids: equal keys mean equal
    text from the first token on, whatever prompts an attacker builds. A lane that holds a page holds all
    pages before it and releases the last one first, so eviction never cuts off a branch."""

    root = bytes(32)
    """The key before the first page of every text."""

    def __init__(self) -> None:
        self.counts = PrefixCacheCounts()
        self.clear()

    def clear(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, tuple[bytes, bytes]] = {}
        """Of each page its key, and that of the page before it."""
        self.evictable: OrderedDict[int, None] = OrderedDict()
        """Pages that no lane holds, the one that has been here for longest first."""

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Key of the page with these tokens that follows the page `parent`."""
        return hashlib.sha256(parent + struct.pack(f"{len(token_ids)}q", *token_ids)).digest()

    def page_of(self, key: bytes) -> int | None:
        return self._pages.get(key)

    def chain(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the keys up to the first one that is missing."""
        pages = []
        for key in keys:
            page = self.page_of(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, key: bytes, parent: bytes, page: int) -> int:
        """Enter a page that a lane holds; `parent` is the key of the page before it. Returns the page of the
        key, which is another one if that was entered earlier."""
        assert page not in self._keys, f"{page=} has two keys"
        assert parent == self.root or parent in self._pages, "the page before it is not here"
        entered = self._pages.setdefault(key, page)
        if entered == page:
            self._keys[page] = key, parent
        return entered

    def make_evictable(self, page: int) -> bool:
        """The last lane released the page. False: it is not in the index, so it cannot be found again."""
        if page not in self._keys:
            return False
        self.evictable[page] = None
        return True

    def acquire(self, page: int) -> None:
        """A lane holds the evictable page again."""
        del self.evictable[page]

    def evict(self) -> int:
        """Remove the page that has been evictable for longest, and return it."""
        page, _ = self.evictable.popitem(last=False)
        del self._pages[self._keys.pop(page)[0]]
        self.counts.num_evicted += 1
        return page

    def invalidate(self, page: int) -> list[int]:
        """Remove an evictable page and its descendants, which are evictable too; returns them, it last."""
        children = defaultdict[bytes, list[int]](list)
        for below, (_, parent) in self._keys.items():
            children[parent].append(below)
        found = [page]
        for above in found:
            found += children[self._keys[above][0]]
        for below in found:
            del self.evictable[below], self._pages[self._keys.pop(below)[0]]
        return found[::-1]


class PagePool:
    """Which lanes hold which page. At all times free + evictable + held pages = all pages.

    Only the front pages of a lane can be shared: those that it got from the prefix cache or entered there. A
    pass writes at or after a lane's KV pointer, so never into them, also if it was launched before the host
    had read the pointer or the sequence's end: the device's pointer is never less than the host's. The
    next holder of any other page writes after such passes."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_lanes: int,
        max_slots: int,
        device: torch.device,
        cache: PrefixCache | None = None,
    ) -> None:
        self.num_pages, self.page_size, self.cache = num_pages, page_size, cache
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: list[list[int]] = [[] for _ in range(num_lanes)]
        self._num_cached = [0] * num_lanes
        self._num_refs = [0] * num_pages
        max_pages = min(num_pages, self.pages_for(max_slots))
        self._block_table_ZP = torch.zeros(num_lanes, max_pages, dtype=torch.int64, device=device)
        self._unwritten: dict[tuple[int, int], int] = {}

    @property
    def block_table_ZP(self) -> Tensor:
        """Page ids of each lane, in order."""
        self.flush()
        return self._block_table_ZP

    def block_table(self, lanes_B: Tensor, num_slots: int, first_slots_B: Tensor | None = None) -> Tensor:
        """Page ids [B, P] of `num_slots` slots, from `first_slots_B` on, rounded up to whole pages (None:
        0)."""
        table_ZP, num_pages = self.block_table_ZP, self.pages_for(num_slots)
        if first_slots_B is None:
            return table_ZP[lanes_B, :num_pages]
        first_B1 = -(-first_slots_B[:, None] // self.page_size)
        index_BP = first_B1 + torch.arange(num_pages, device=table_ZP.device)
        return table_ZP[lanes_B[:, None], index_BP.clamp(max=table_ZP.shape[1] - 1)]

    @property
    def unwritten(self) -> list[tuple[int, int, int]]:
        """Reservations (lane, index, page) since the last `flush`."""
        return [(lane, index, page) for (lane, index), page in self._unwritten.items()]

    def follow(self, entries: Iterable[tuple[int, int, int]]) -> None:
        """Take over another rank's reservations (lane, index, page), without its books."""
        self._unwritten.update({(lane, index): page for lane, index, page in entries})

    def flush(self) -> None:
        """Write the reservations since the last time to the device, all at once."""
        if self._unwritten:
            entries = [*zip(*self._unwritten, strict=True), [*self._unwritten.values()]]
            lanes, indices, pages = to_device(entries, self._block_table_ZP.device)
            self._block_table_ZP[lanes, indices] = pages
            self._unwritten.clear()

    @property
    def num_free(self) -> int:
        """Pages that no lane holds; evictable ones count, for they are evicted when they are needed."""
        return len(self._free) + (0 if self.cache is None else len(self.cache.evictable))

    def num_owned(self, lane: int) -> int:
        return len(self._owned[lane])

    def num_cached(self, lane: int) -> int:
        """Number of a lane's front pages that are in the prefix cache."""
        return self._num_cached[lane]

    def pages_for(self, num_slots: int) -> int:
        return -(-num_slots // self.page_size)

    def reserve(self, lane: int, num_slots: int, shared: Sequence[int] = ()) -> bool:
        """Give the lane pages for `num_slots` slots in all, the first of which are `shared` if it has none;
        False, changing nothing, if too few are free."""
        owned, free = self._owned[lane], self._free
        assert not (shared and owned), f"{lane=} has pages"
        missing = -(-num_slots // self.page_size) - len(owned) - len(shared)
        if missing > len(free):
            num_held_again = [self._num_refs[page] for page in shared].count(0) if shared else 0
            if missing > self.num_free - num_held_again:
                return False
        for page in shared:
            self._incref(lane, len(owned), page)
            self._num_cached[lane] += 1
        for _ in range(missing):
            # No pass will read it any more.
            page = free.pop() if free or self.cache is None else self.cache.evict()
            self._num_refs[page] = 1
            self._unwritten[lane, len(owned)] = page
            owned.append(page)
        return True

    def commit(self, lane: int, key: bytes, parent: bytes, *, is_written: bool) -> None:
        """Enter the lane's first page that is not in the prefix cache; its slots hold the KV of the text of
        `key`, or (`is_written` False) will after the next pass.

        If another lane has entered such a page, the lane takes that one in place of its own: a lane that
        holds a page then also holds the cached pages before it. Passes under way still read the old page."""
        assert self.cache is not None
        index = self._num_cached[lane]
        own = self._owned[lane][index]
        cached = self.cache.insert(key, parent, own)
        if cached != own:
            assert is_written, f"{lane=} is about to write {index=}"
            self._incref(lane, index, cached)
            self._decref(own)
        self._num_cached[lane] = index + 1

    def release(self, lane: int, *, invalidate: bool = False) -> None:
        """Take all pages of a lane back, the last first. `invalidate`: remove them from the prefix cache too,
        except those that other lanes hold."""
        owned = self._owned[lane]
        for page in reversed(owned):
            self._decref(page)
        self._owned[lane], self._num_cached[lane] = [], 0
        if invalidate and self.cache is not None:
            first = next((page for page in owned if page in self.cache.evictable), None)
            if first is not None:
                self._free += self.cache.invalidate(first)

    def reset(self) -> None:
        """Take all pages of all lanes back and empty the prefix cache: their contents are unknown."""
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._owned = [[] for _ in self._owned]
        self._num_cached = [0] * len(self._owned)
        self._num_refs = [0] * self.num_pages
        self._unwritten.clear()
        if self.cache is not None:
            self.cache.clear()

    def _incref(self, lane: int, index: int, page: int) -> None:
        """Put a page into the lane's list, at its end or in place of another."""
        if self.cache is not None and self._num_refs[page] == 0 and page in self.cache:
            self.cache.acquire(page)
        self._num_refs[page] += 1
        self._owned[lane][index : index + 1] = [page]
        self._unwritten[lane, index] = page

    def _decref(self, page: int) -> None:
        self._num_refs[page] -= 1
        if self._num_refs[page] == 0 and (self.cache is None or not self.cache.make_evictable(page)):
            self._free.append(page)


class KVCache:
    """Keys and values [S, K, H] of every layer, in physical slots page * page_size + offset.

    `shape`: layers, S, K, H. One layer's memory serves all if passes compute all KV anew: a layer stores
    those of all rows before any row attends, and nothing reads them after the layer. `scales` [2, layers, K]:
    stored keys and values are divided by them; None is 1."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        scales: Tensor | None = None,
    ) -> None:
        self.scales = scales
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, K, H] of a layer."""
        number = min(number, len(self.keys) - 1)
        return self.keys[number], self.values[number]

    def layer_scales(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Scales [K] of a layer's keys and values; None is 1."""
        return (None, None) if self.scales is None else (self.scales[0, number], self.scales[1, number])

    def attend(
        self,
        number: int,
        q_RNH: Tensor,
        plan: BackendPlan,
        *,
        scale: float,
        lists_BKC: Tensor | None = None,
        before: BeforeBlock | None = None,
    ) -> Tensor:
        """Attention output [R, N, H] of the rows of `plan` over the layer; see `paged_attention`."""
        keys, values = self.layer(number)
        k_scale_K, v_scale_K = self.layer_scales(number)
        return paged_attention(
            q_RNH,
            keys,
            values,
            plan,
            scale=scale,
            k_scale_K=k_scale_K,
            v_scale_K=v_scale_K,
            lists_BKC=lists_BKC,
            before=before,
        )
