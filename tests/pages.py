"""What must hold of an engine's pages at any time; for soaks and tests, which call it after each pass."""

from __future__ import annotations

from idlm.infer.state.page_pool import PagePool, PrefixCache


def check_pages(pool: PagePool) -> None:
    """Assert the pool equation: every page is free, evictable or held by the lanes in the books."""
    held = [page for owned in pool._owned for page in owned]
    evictable = set() if pool.cache is None else pool.cache.evictable
    pages = [*pool._free, *evictable, *set(held)]
    assert len(pages) == pool.num_pages, f"{len(pages)=} {pool.num_pages=}"
    assert len(set(pages)) == pool.num_pages, "a page is counted twice"
    holders = [0] * pool.num_pages
    for page in held:
        holders[page] += 1
    assert holders == pool._num_refs, f"{holders=} {pool._num_refs=}"
    cached = set() if pool.cache is None else set(pool.cache._by_page)
    for owned, num_cached in zip(pool._owned, pool._num_cached, strict=True):
        assert set(owned[:num_cached]) <= cached, f"{owned=} {num_cached=}"
        assert not cached & set(owned[num_cached:]), f"{owned=} {num_cached=}"
        assert all(holders[page] == 1 for page in owned[num_cached:]), f"{owned=} {num_cached=}"
    if pool.cache is not None:
        _check_cache(pool.cache)


def _check_cache(cache: PrefixCache) -> None:
    """Assert that the tree is connected and that no page is evictable above one that is held."""
    assert cache._by_page == {entry.page: entry for entry in cache._by_key.values()}
    assert sum(map(len, cache._children.values())) == len(cache._by_page)
    assert cache._evictable.keys() <= cache._by_page.keys()
    order = {page: index for index, page in enumerate(cache._evictable)}
    for entry in cache._by_key.values():
        assert entry.page in cache._children[entry.parent]
        if entry.parent != cache.root:
            parent = cache._by_key[entry.parent].page
            assert parent not in order or order.get(entry.page, len(order)) < order[parent], f"{parent=}"
