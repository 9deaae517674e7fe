"""The scheduler with its pages and prefix cache on a device of plain Python that checks every read and write.

A slot of the simulated memory holds the very text whose KV a real one would hold. A pass writes its rows,
then reads all slots before them: a sequence that finds other text than its own, or writes into a slot that
it shares, is caught at once. Results come back late, drafts are accepted at random, requests stop, are
aborted and fail."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from idlm.contracts import SamplingParams
from idlm.infer.request import Request
from idlm.infer.scheduler import Scheduler
from idlm.infer.state.batch import Schedule, lane_of
from idlm.infer.state.page_pool import PagePool, PrefixCache

VOCAB = 3
STOP_ID = 2
MAX_ANSWER = 14
MAX_LENGTH = 40
"""Of prompt and answer together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Sizes of one simulation. `invalidate`: look-ups find less than there is: pages are computed twice."""

    page_size: int
    num_pages: int
    num_lanes: int
    stride: int
    max_num_batched_tokens: int
    num_inflight_steps: int
    has_cache: bool = True
    invalidate: bool = False

    @property
    def width(self) -> int:
        """Rows of a decoding sequence."""
        return 2 * self.stride - 1


def next_token(text: Sequence[int], seed: int) -> int:
    """The model: a token from all that is before it."""
    return zlib.crc32(bytes([*text, 100 + seed])) % VOCAB


def rollout(request: Request) -> list[int]:
    """The answer as it must be."""
    answer: list[int] = []
    bound = request.max_length - len(request.prompt_ids)
    if request.params.max_tokens is not None:
        bound = min(bound, request.params.max_tokens)
    while not answer or (answer[-1] not in request.stop_ids and len(answer) < bound):
        answer.append(next_token([*request.prompt_ids, *answer], request.params.seed or 0))
    return answer


@dataclass(slots=True, kw_only=True)
class _Lane:
    """What the device knows of a seat."""

    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    end: int = 0
    seed: int = 0


class _Forgetful(PrefixCache):
    """Finds a part of what is there, now and then."""

    rng: random.Random

    def chain(self, keys: Sequence[bytes]) -> list[int]:
        pages = super().chain(keys)
        return pages[: self.rng.randint(0, len(pages))] if self.rng.random() < 0.5 else pages


class _Pool(PagePool):
    """Knows the pages that the next pass fills and that other lanes may hold by then."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.unwritten_pages: set[int] = set()

    def commit(self, lane: int, key: bytes, parent: bytes, *, is_written: bool) -> None:
        page = self._owned[lane][self.num_cached(lane)]
        super().commit(lane, key, parent, is_written=is_written)
        if not is_written:
            self.unwritten_pages.add(page)


class Simulation:
    """One engine without a model."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        kind = _Forgetful if world.invalidate else PrefixCache
        cache = kind() if world.has_cache else None
        if isinstance(cache, _Forgetful):
            cache.rng = rng
        self.pool = _Pool(
            num_pages=world.num_pages,
            page_size=world.page_size,
            num_lanes=world.num_lanes,
            max_slots=MAX_LENGTH + world.width,
            device=torch.device("cpu"),
            cache=cache,
        )
        self.scheduler = Scheduler(
            self.pool,
            num_lanes=world.num_lanes,
            max_num_batched_tokens=world.max_num_batched_tokens,
            num_rows=lambda _: world.width,
            max_emitted=world.stride,
        )
        self.memory: list[object] = [None] * (world.num_pages * world.page_size)
        self.lanes = [_Lane() for _ in range(world.num_lanes)]
        self.inflight: deque[list[tuple[Request, bool, list[int]]]] = deque()
        self.active: list[Request] = []
        self.finished: list[Request] = []
        self.num_passes = self.num_fed = self.num_shared_writes = 0

    def add(self, prompt_ids: list[int], *, seed: int, num_samples: int = 1) -> None:
        """Queue samples of a prompt."""
        capacity = self.world.num_pages * self.world.page_size - self.world.width
        for index in range(num_samples):
            stop_ids = frozenset({STOP_ID} if self.rng.random() < 0.5 else ())
            max_tokens = self.rng.randint(1, MAX_ANSWER)
            params = SamplingParams(max_tokens=max_tokens, seed=seed, n=num_samples)
            max_length = min(len(prompt_ids) + max_tokens, MAX_LENGTH, capacity)
            request = Request(
                request_id=f"r{len(self.finished)}-{len(self.active)}",
                index=index,
                prompt_ids=prompt_ids,
                params=params,
                stop_ids=stop_ids,
                max_length=max_length,
            )
            self.active.append(request)
            self.scheduler.add(request)

    def step(self) -> None:
        """One pass of the engine."""
        self.pool.unwritten_pages.clear()
        schedule = self.scheduler.next()
        if schedule is None:
            self._book(0)
            schedule = self.scheduler.next()
        assert schedule is not None
        if schedule.requests:
            self._admit(schedule)
            self.inflight.append(self._run(schedule))
            schedule.launched()
        self._book(self.world.num_inflight_steps if schedule.requests else 0)
        check_pages(self.pool)

    def abort(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        request.finish_reason = "abort"
        self.active.remove(request)
        self.scheduler.retire(request)

    def fail(self) -> None:
        """A pass has failed: the contents of the memory are unknown."""
        self.inflight.clear()
        self.memory = [("lost", slot) for slot in range(len(self.memory))]
        self.scheduler.requeue_all()

    def _admit(self, schedule: Schedule) -> None:
        for request in schedule.scheduled_new_requests:
            self.lanes[lane_of(request)] = _Lane(
                tokens=[*request.prompt_ids, *request.token_ids],
                num_computed=request.num_computed,
                end=request.max_length,
                seed=request.params.seed or 0,
            )
        for request in (*schedule.preempted, *schedule.resumed):
            self.lanes[lane_of(request)].num_computed = request.num_computed

    def _run(self, schedule: Schedule) -> list[tuple[Request, bool, list[int]]]:
        self.num_passes += 1
        pages_ZP = self.pool.block_table_ZP.tolist()
        written: set[int] = set()
        reads, results = [], []
        for request, num_feed, samples in zip(
            schedule.requests, schedule.num_feed, schedule.samples, strict=True
        ):
            number = lane_of(request)
            lane, pages = self.lanes[number], pages_ZP[number]
            start, is_open = lane.num_computed, len(lane.tokens) < lane.end
            self.num_fed += num_feed
            decodes = samples and is_open
            assert start + num_feed <= len(lane.tokens), "more is fed than is known"
            assert not decodes or start + num_feed == len(lane.tokens), "decodes behind an unfed token"
            num_accepted = self.rng.randrange(self.world.stride) if decodes else 0
            text = list(lane.tokens)
            for _ in range(num_accepted + 1 if decodes else 0):
                text.append(next_token(text, lane.seed))
            rows = num_feed + (self.world.width - 1 if decodes else 0)
            for slot in range(start, start + rows):
                is_right = slot < start + num_feed + num_accepted
                content = tuple(text[: slot + 1]) if is_right else ("draft", self.num_passes, slot)
                self._write(pages, slot, content, written)
            reads.append((pages, text, start + num_feed + num_accepted))
            emitted = text[len(lane.tokens) :] if decodes else []
            lane.tokens = text if decodes else lane.tokens
            lane.num_computed += (num_feed + num_accepted) * is_open
            results.append((request, samples, emitted))
        size = self.world.page_size
        for pages, text, num_slots in reads:
            for slot in range(num_slots):
                found = self.memory[pages[slot // size] * size + slot % size]
                assert found == tuple(text[: slot + 1]), f"{found=} where {text[: slot + 1]} is wanted"
        return results

    def _write(self, pages: list[int], slot: int, content: object, written: set[int]) -> None:
        size = self.world.page_size
        page = pages[slot // size]
        physical = page * size + slot % size
        assert physical not in written, "two rows of a pass write one slot"
        written.add(physical)
        self._check_writer(page)
        self.memory[physical] = content

    def _check_writer(self, page: int) -> None:
        """A page that is written has one holder, or was entered for those who read it in this very pass."""
        if self.pool.cache is not None and page in self.pool.cache:
            assert page in self.pool.unwritten_pages, f"{page=} is committed and written"
            self.num_shared_writes += self.pool._num_refs[page] > 1
        else:
            assert self.pool._num_refs[page] == 1, f"{page=} is shared and written"

    def _book(self, num_left: int) -> None:
        while len(self.inflight) > num_left:
            for request, samples, emitted in self.inflight.popleft():
                if request.finish_reason is None:
                    self._deliver(request, samples, emitted)

    def _deliver(self, request: Request, samples: bool, emitted: list[int]) -> None:
        request.num_forwards += 1
        if not samples:
            return
        request.num_inflight -= 1
        request.num_steps += 1
        request.extend(emitted)
        request.num_computed = request.num_known - 1
        if request.finish_reason is not None:
            self.active.remove(request)
            self.finished.append(request)
            self.scheduler.retire(request)


def simulate(world: World, seed: int) -> Simulation:
    """Prompts from few beginnings, samples, aborts and failures, until all are done; asserts the answers."""
    rng = random.Random(seed)
    simulation, waiting = Simulation(world, rng), 40
    beginnings = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 18))] for _ in range(3)]
    beginnings += [beginnings[0] + [rng.randrange(VOCAB)] * world.page_size, beginnings[1][1:]]
    while waiting or simulation.active:
        while waiting and len(simulation.active) < 2 * world.num_lanes:
            waiting -= 1
            tail = [rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 1, 2, 5)))]
            prompt_ids = (rng.choice(beginnings) + tail)[:24] or [0]
            simulation.add(prompt_ids, seed=rng.randrange(2), num_samples=rng.choice((1, 1, 1, 3)))
        simulation.step()
        if simulation.active and rng.random() < 0.05:
            simulation.abort(rng.choice(simulation.active))
        if rng.random() < 0.01:
            simulation.fail()
        check_pages(simulation.pool)
    simulation._book(0)
    assert simulation.pool.num_free == world.num_pages, "pages leaked"
    for request in simulation.finished:
        assert request.token_ids == rollout(request), f"{request.request_id=}"
    return simulation


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
    cached = set() if pool.cache is None else set(pool.cache._keys)
    for owned, num_cached in zip(pool._owned, pool._num_cached, strict=True):
        assert set(owned[:num_cached]) <= cached, f"{owned=} {num_cached=}"
        assert not cached & set(owned[num_cached:]), f"{owned=} {num_cached=}"
        assert all(holders[page] == 1 for page in owned[num_cached:]), f"{owned=} {num_cached=}"
    if pool.cache is not None:
        _check_cache(pool.cache)


def _check_cache(cache: PrefixCache) -> None:
    """Assert that the tree is connected and that no page is evictable above one that is held."""
    assert cache._pages == {key: page for page, (key, _) in cache._keys.items()}
    assert cache.evictable.keys() <= cache._keys.keys()
    order = {page: index for index, page in enumerate(cache.evictable)}
    for page, (_, before) in cache._keys.items():
        if before != cache.root:
            parent = cache._pages[before]
            assert parent not in order or order.get(page, len(order)) < order[parent], f"{parent=}"
