"""The prefix cache and its pages: keys, eviction, sharing, and the scheduler on a simulated device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from idlm.infer.request import Request
from idlm.infer.scheduler import Scheduler
from idlm.infer.state.page_pool import PagePool, PrefixCache
from tests.prefix_simulation import Simulation, World, check_pages, simulate

NUM_WORLDS = 60
PAGE = 4


def _cache() -> PrefixCache:
    return PrefixCache()


def _pool(cache: PrefixCache | None, *, num_pages: int = 8, num_lanes: int = 4) -> PagePool:
    return PagePool(
        num_pages=num_pages,
        page_size=PAGE,
        num_lanes=num_lanes,
        max_slots=64,
        device=torch.device("cpu"),
        cache=cache,
    )


def _keys(cache: PrefixCache, token_ids: Sequence[int]) -> list[bytes]:
    keys: list[bytes] = []
    for start in range(0, len(token_ids) - PAGE + 1, PAGE):
        keys.append(cache.key(keys[-1] if keys else cache.root, token_ids[start : start + PAGE]))
    return keys


def _store(pool: PagePool, lane: int, token_ids: Sequence[int]) -> list[int]:
    """Put a text into the lane's pages and commit all of it; its pages."""
    cache = pool.cache
    assert cache is not None
    keys = _keys(cache, token_ids)
    shared = cache.chain(keys)
    assert pool.reserve(lane, len(token_ids), shared)
    for index in range(len(shared), len(keys)):
        parent = keys[index - 1] if index else cache.root
        pool.commit(lane, keys[index], parent, is_written=True)
    return list(pool._owned[lane])


def _world(seed: int) -> World:
    rng = random.Random(seed)
    page_size, stride = rng.choice((1, 2, 3, 4, 5)), rng.choice((1, 2, 4))
    longest = -(-(24 + 14 + 2 * stride) // page_size) + 1
    return World(
        page_size=page_size,
        num_pages=longest + rng.choice((0, 1, 4, 20)),
        num_lanes=rng.choice((1, 2, 4, 6)),
        stride=stride,
        max_num_batched_tokens=rng.choice((1, 3, 7, 30)),
        num_inflight_steps=rng.choice((0, 1, 3)),
        invalidate=rng.random() < 0.5,
    )


def test_a_key_depends_on_every_token_from_the_first_on() -> None:
    cache = _cache()
    keys = [
        cache.key(parent, token_ids)
        for parent in (cache.root, cache.key(cache.root, [1, 2, 3, 4]))
        for token_ids in ([1, 2, 3, 4], [1, 2, 4, 3], [1, 2, 3, 4 + (1 << 32)], [0, 2, 3, 4], [0, 1, 2, 3])
    ]
    assert len({*keys}) == 2 * 5
    assert {len(key) for key in keys} == {32}
    assert _cache().key(cache.root, [1, 2, 3, 4]) == keys[0]


def test_the_longest_unused_goes_first_and_leaves_before_their_parents() -> None:
    cache = _cache()
    pool = _pool(cache, num_pages=6)
    old = _store(pool, 0, [1] * 8)
    new = _store(pool, 1, [1] * 4 + [2] * 8)
    assert new[0] == old[0]
    pool.release(0)
    pool.release(1)
    assert pool.num_free == 6
    assert len(cache.evictable) == 4
    assert pool.reserve(2, 3 * PAGE)
    check_pages(pool)
    assert cache.chain(_keys(cache, [1] * 8)) == old[:1], "the page that rested longest, and no other"
    assert cache.chain(_keys(cache, [1] * 4 + [2] * 8)) == new
    assert pool.reserve(2, 6 * PAGE)
    assert not pool.reserve(3, 1)
    check_pages(pool)
    assert not cache._pages
    pool.release(2)
    check_pages(pool)


def test_two_lanes_that_computed_the_same_page_end_up_with_one() -> None:
    cache = _cache()
    pool = _pool(cache, num_lanes=2)
    text = [3] * 8
    keys = _keys(cache, text)
    assert pool.reserve(0, 12)
    assert pool.reserve(1, 12)
    for lane in (0, 1, 0, 1):
        index = pool.num_cached(lane)
        pool.commit(lane, keys[index], keys[index - 1] if index else cache.root, is_written=True)
        check_pages(pool)
    assert pool._owned[0][:2] == pool._owned[1][:2]
    assert pool._owned[0][2] != pool._owned[1][2]
    assert pool.num_free == 8 - 4
    assert pool.block_table_ZP[:2, :3].tolist() == pool._owned


@pytest.mark.sweep
def test_every_read_finds_its_own_text() -> None:
    """Small pages and pools, late results, aborts, failures, samples; the simulation says what is checked."""
    totals: dict[str, int] = {"preemptions": 0, "in_pass": 0}
    for seed in range(NUM_WORLDS):
        simulation = simulate(_world(seed), seed)
        assert simulation.pool.cache is not None
        for name in ("num_hit_tokens", "num_evicted"):
            totals[name] = totals.get(name, 0) + getattr(simulation.pool.cache.counts, name)
        totals["preemptions"] += simulation.scheduler.num_preemptions
        totals["in_pass"] += simulation.num_shared_writes
    assert min(totals.values()) > 50, totals


def test_a_preempted_sequence_comes_back_to_its_own_pages() -> None:
    """What it had is found again unless it was needed: fewer tokens are fed again than without a cache."""
    fed = {}
    for has_cache in (True, False):
        world = World(
            page_size=2,
            num_pages=26,
            num_lanes=4,
            stride=2,
            max_num_batched_tokens=30,
            num_inflight_steps=0,
            has_cache=has_cache,
        )
        simulation = Simulation(world, random.Random(5))
        for i in range(8):
            simulation.add([10 + i] * 16, seed=i)
        while simulation.active:
            simulation.step()
        assert simulation.scheduler.num_preemptions > 0
        fed[has_cache] = simulation.num_fed - 8 * 16
    assert fed[True] < 0.8 * fed[False], fed


Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: list[Plant] = []


def fault(plant: Plant) -> Plant:
    """Enter a fault that a prefix cache can have."""
    FAULTS.append(plant)
    return plant


@fault
def key_without_its_parent(patch: pytest.MonkeyPatch) -> None:
    original = PrefixCache.key
    patch.setattr(PrefixCache, "key", lambda self, parent, token_ids: original(self, b"", token_ids))


@fault
def the_pending_token_is_taken_from_the_cache(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._allocate

    def allocate(self: Scheduler, request: Request, num_slots: int) -> bool:
        has_pages = original(self, request, num_slots)
        request.num_computed += request.num_computed == request.num_known - 1
        return has_pages

    patch.setattr(Scheduler, "_allocate", allocate)


@fault
def a_page_is_committed_with_its_last_slot_pending(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._commit

    def commit(self: Scheduler, request: Request, num_computed: int, **options: Any) -> None:
        original(self, request, min(num_computed + 1, request.num_known), **options)

    patch.setattr(Scheduler, "_commit", commit)


@fault
def evicted_pages_are_still_found(patch: pytest.MonkeyPatch) -> None:
    original = PrefixCache.evict

    def evict(self: PrefixCache) -> int:
        key, _ = self._keys[next(iter(self.evictable))]
        self._pages[key] = page = original(self)
        return page

    patch.setattr(PrefixCache, "evict", evict)


@fault
def pages_rest_from_the_first_to_the_last(patch: pytest.MonkeyPatch) -> None:
    original = PagePool.release

    def release(self: PagePool, lane: int, *, invalidate: bool = False) -> None:
        self._owned[lane].reverse()
        original(self, lane, invalidate=invalidate)

    patch.setattr(PagePool, "release", release)


@fault
def shared_pages_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    original = PagePool._incref

    def hold(self: PagePool, lane: int, index: int, page: int) -> None:
        is_shared = self._num_refs[page] > 0
        original(self, lane, index, page)
        self._num_refs[page] -= is_shared

    patch.setattr(PagePool, "_incref", hold)


@fault
def a_page_to_be_written_is_given_up_for_anothers(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._commit

    def commit(self: Scheduler, request: Request, num_computed: int, *, is_written: bool = True) -> None:
        assert self.pool.cache is not None
        assert request.lane is not None
        keys = self._page_keys(request, num_computed // self.pool.page_size)
        is_here = any(self.pool.cache.page_of(key) for key in keys[self.pool.num_cached(request.lane) :])
        original(self, request, num_computed, is_written=is_written or is_here)

    patch.setattr(Scheduler, "_commit", commit)


@fault
def the_cache_outlives_a_failed_pass(patch: pytest.MonkeyPatch) -> None:
    def reset(self: PagePool) -> None:
        for lane in range(len(self._owned)):
            self.release(lane)

    patch.setattr(PagePool, "reset", reset)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_fault_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(NUM_WORLDS):
            simulate(_world(seed), seed)
