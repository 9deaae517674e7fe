"""Which pages hold the KV of which text: found by content, evicted least recently used first.

A page's key is sha256 over the key of the page before it and its own token ids: equal keys mean equal text
from the first token on, whatever prompts an attacker builds. The pages form a tree. A sequence that holds a
page holds all pages before it and releases the last one first, so the page that has been evictable for
longest has no children left: eviction never cuts off a branch.
This file knows neither lanes nor tensors. The cache lives as long as its engine: keys do not say which model
computed the KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class PrefixCacheCounts:
    """Counts since the engine was built. `num_tokens`: known tokens looked up for sequences that were
    admitted or resumed; `num_hit_tokens`: those whose KV was found.
    """

    num_lookups: int = 0
    num_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    """A page in the tree."""

    page: int
    key: bytes
    parent: bytes


class PrefixCache:
    """Index of committed pages. A page is evictable when no lane holds it."""

    root = bytes(32)
    """The key before the first page of every text."""

    def __init__(self) -> None:
        self.counts = PrefixCacheCounts()
        self.clear()

    def clear(self) -> None:
        """Remove all pages."""
        self._by_key: dict[bytes, _Entry] = {}
        self._by_page: dict[int, _Entry] = {}
        self._children: dict[bytes, set[int]] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    @property
    def num_evictable(self) -> int:
        """Pages that can be evicted."""
        return len(self._evictable)

    @property
    def pages(self) -> set[int]:
        """All pages of the index."""
        return set(self._by_page)

    @property
    def evictable(self) -> set[int]:
        """Pages of the index that no lane holds."""
        return set(self._evictable)

    def key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Key of the page with these tokens that follows the page `parent`."""
        return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()

    def page_of(self, key: bytes) -> int | None:
        """The page with this key, or None."""
        entry = self._by_key.get(key)
        return None if entry is None else entry.page

    def chain(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the keys up to the first one that is missing."""
        pages = []
        for key in keys:
            page = self.page_of(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, key: bytes, parent: bytes, page: int) -> None:
        """Enter a page that a lane holds; `parent` is the key of the page before it."""
        assert key not in self._by_key, "a key has two pages"
        assert page not in self._by_page, f"{page=} has two keys"
        assert parent == self.root or parent in self._by_key, "the page before it is not here"
        self._by_key[key] = self._by_page[page] = _Entry(page, key, parent)
        self._children.setdefault(parent, set()).add(page)

    def make_evictable(self, page: int) -> bool:
        """The last lane released the page. False: it is not in the index, so it cannot be found again."""
        if page not in self:
            return False
        self._evictable[page] = None
        return True

    def acquire(self, page: int) -> None:
        """A lane holds the evictable page again."""
        del self._evictable[page]

    def evict(self) -> int:
        """Remove the page that has been evictable for longest, and return it."""
        page = next(iter(self._evictable))
        self._remove(page)
        self.counts.num_evicted += 1
        return page

    def invalidate(self, page: int) -> list[int]:
        """Remove an evictable page and its descendants, which are evictable too; returns them, it last."""
        found = [page]
        for above in found:
            found += self._children.get(self._by_page[above].key, ())
        for below in reversed(found):
            self._remove(below)
        return found[::-1]

    def _remove(self, page: int) -> None:
        """Remove an evictable page without children."""
        del self._evictable[page]
        entry = self._by_page.pop(page)
        assert entry.key not in self._children, f"{page=} goes before its children"
        del self._by_key[entry.key]
        siblings = self._children[entry.parent]
        siblings.remove(page)
        if not siblings:
            del self._children[entry.parent]

    def check(self) -> None:
        """Assert that the tree is connected and that no page is evictable above one that is held."""
        assert self._by_page == {entry.page: entry for entry in self._by_key.values()}
        assert sum(map(len, self._children.values())) == len(self._by_page)
        assert self._evictable.keys() <= self._by_page.keys()
        order = {page: place for place, page in enumerate(self._evictable)}
        for entry in self._by_key.values():
            assert entry.page in self._children[entry.parent]
            if entry.parent != self.root:
                parent = self._by_key[entry.parent].page
                assert parent not in order or order.get(entry.page, len(order)) < order[parent], f"{parent=}"
