"""Continuous batching: who runs in the next pass, within a pool of pages and a prompt budget. Knows no
algorithm.

Every sequence simply has known tokens that are not computed yet (a prompt: many; a decoding sequence: a
pending one, or the block that is clean now), so prompts are chunked into the same passes as decoding. When
pages run out, the youngest sequence gives all of its pages back and recomputes later what the prefix cache
has lost by then; its tokens, drafts and random stream stay, so its answer does not change.

Whoever takes KV from the prefix cache may get what a pass of another shape computed (a prompt chunk, a
pending token, an accepted draft): equal as mathematics, not always bit for bit; as with a recomputation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from idlm.infer.decoders.base import TOKEN_BY_TOKEN, Batch, KVWritePolicy
from idlm.infer.request import Request
from idlm.infer.state.device import to_device
from idlm.infer.state.kv_cache import PagePool

STEPS_TO_RESTORE = 16


@dataclass(slots=True, kw_only=True)
class Schedule:
    """One pass: its requests (oldest first) with the host data that decoders plan by, and who sat down, lost
    its KV or (some of it) got it back. `mode`: by which of the decoder's pictures.

    `num_feed[b]` known tokens are fed, `num_known[b]` are then computed at most, `samples[b]`: that is all
    that are due. `num_lookahead_tokens` of those are computed by a later pass.
    `copies`: pages (from, to) to be copied before the pass.
    """

    requests: list[Request] = field(default_factory=list)
    num_feed: list[int] = field(default_factory=list)
    num_known: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    scheduled_new_requests: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    mode: int = 0
    num_lookahead_tokens: int = 1

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens to report with the log-probability of each token; None where nobody asked."""
        asked = [request.params.logprobs for request in self.requests]
        return max((number for number in asked if number is not None), default=None)

    @property
    def filters(self) -> bool:
        """Whether anybody's law has tokens cut off."""
        return any(request.params.has_filters for request in self.requests)

    def batch(self, device: torch.device) -> Batch:
        """The decoders' view, of just these rows."""
        return Batch(
            lanes_B=to_device([lane_of(request) for request in self.requests], device),
            num_feed_B=to_device(self.num_feed, device),
            samples_B=to_device(self.samples, device, dtype=torch.bool),
            max_feed=max(self.num_feed),
            max_known=max(self.num_known),
            num_rows=None,
            filters=self.filters,
            mode=self.mode,
            num_top=self.num_top,
        )

    def launched(self) -> None:
        """Note in the requests that the pass is on its way."""
        for request, num_feed, samples in zip(self.requests, self.num_feed, self.samples, strict=True):
            request.num_computed += num_feed - samples * self.num_lookahead_tokens
            request.num_inflight += samples


class Scheduler:
    """Lanes, queue and page accounting.

    Every running sequence gets its decoding rows in every pass (`max_width` at most, which emit
    `max_emitted` tokens at most); `max_num_batched_tokens` bounds the further prompt rows of all sequences
    together, less of them for a while after `halve_budget`. Passes may be scheduled before the results of
    earlier ones are known: then a sequence is as long as it can be, and nobody is preempted.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        num_lanes: int,
        max_num_batched_tokens: int,
        max_width: int,
        max_emitted: int,
        kv_policy: KVWritePolicy = TOKEN_BY_TOKEN,
    ) -> None:
        self.pool, self._kv_policy = pool, kv_policy
        self._max_num_batched_tokens = self._prompt_budget = max_num_batched_tokens
        self._num_good_passes = 0
        self._max_width, self._max_emitted = max_width, max_emitted
        self._free_lanes = list(range(num_lanes - 1, -1, -1))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def slots_needed(self, num_tokens: int) -> int:
        """Slots of a decoding sequence of `num_tokens` known ones, with its drafts and masks."""
        return self._kv_policy.num_slots(num_tokens, self._max_width)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def next(self) -> Schedule | None:
        """Decide the next pass. Empty when nothing is left to do, or nothing before results come back; None
        when pages are so short that results must come back first.
        """
        schedule = Schedule(num_lookahead_tokens=self._kv_policy.num_lookahead_tokens)
        budget = self._prompt_budget
        is_stalled = False
        self._commit_computed_pages()
        for request in list(self.running):
            if (
                request.num_known + request.num_inflight * self._kv_policy.num_lookahead_tokens
                >= request.max_length
            ):
                continue  # Every pass in flight brings a token: it is complete.
            had_pages = self.pool.num_owned(lane_of(request)) > 0
            if not had_pages and is_stalled:
                continue
            reserved = self._reserve(request, schedule)
            if reserved is None:
                # Whoever has no pages is younger than whoever has: nobody sat down in this schedule yet.
                assert not schedule.resumed, f"{schedule.resumed=}"
                return None
            if reserved:
                budget = self._feed(request, budget, schedule)
            else:
                is_stalled = True
        num_committed = 0
        while self.waiting and self._free_lanes and not is_stalled and budget > 0:
            num_committed = self._commit_scheduled_pages(schedule, num_committed)
            request = self.waiting[0]
            request.lane = self._free_lanes.pop()
            if not self._allocate(request, self.slots_needed(request.num_known), schedule):
                self._free_lanes.append(request.lane)
                request.lane = None
                break
            self.running.append(self.waiting.popleft())
            schedule.scheduled_new_requests.append(request)
            budget = self._feed(request, budget, schedule)
        return schedule

    def book(self, request: Request, num_before: int, *, waited: bool = False) -> None:
        """Results of a decoding pass are back; the request had `num_before` known tokens before it. `waited`:
        the pass stored no more than was scheduled.
        """
        request.num_inflight -= 1
        if waited:
            return
        request.num_computed = self._kv_policy.num_stored(
            request.num_computed, num_before=num_before, num_known=request.num_known
        )

    def retire(self, request: Request, *, invalidate: bool = False) -> None:
        """Take a finished or aborted request out, wherever it is, and free what it holds. `invalidate`: that
        must not be found again.
        """
        if request.lane is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        if not invalidate:
            self._commit(request, request.num_computed)
        self.pool.release(request.lane, invalidate=invalidate)
        self._free_lanes.append(request.lane)
        request.lane = None

    def requeue_all(self) -> None:
        """Send every running request back to the front of the queue, in order, with what it has emitted.

        For a pass that failed somewhere: what lanes and pages hold is unknown then, what the host holds is
        not.
        """
        for request in reversed(self.running):
            self._free_lanes.append(lane_of(request))
            request.lane, request.num_computed, request.num_inflight = None, 0, 0
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self.pool.reset()

    def halve_budget(self) -> None:
        """Feed half as many prompt rows from now on, one at least."""
        self._prompt_budget = max(1, self._prompt_budget // 2)
        self._num_good_passes = 0

    def restore_budget(self) -> None:
        """After a pass that went well: `STEPS_TO_RESTORE` of them double what is left of a budget that was
        halved.
        """
        if self._prompt_budget == self._max_num_batched_tokens:
            return
        self._num_good_passes += 1
        if self._num_good_passes % STEPS_TO_RESTORE == 0:
            self._prompt_budget = min(2 * self._prompt_budget, self._max_num_batched_tokens)

    def _feed(self, request: Request, budget: int, schedule: Schedule) -> int:
        """Enter the request with as many known tokens as the prompt budget allows, whole grains of them, of
        which one is free; returns what is left of the budget.
        """
        block_size = self._kv_policy.block_size
        remaining = self._kv_policy.num_computable(request.num_known) - request.num_computed
        if remaining > block_size and budget == 0:
            return 0
        num_feed = min(remaining, block_size + -(-budget // block_size) * block_size)
        schedule.requests.append(request)
        schedule.num_feed.append(num_feed)
        schedule.samples.append(num_feed == remaining)
        schedule.num_known.append(
            self._kv_policy.num_computable(self._longest(request)) - remaining + num_feed
        )
        return max(0, budget - max(0, num_feed - block_size))

    def _longest(self, request: Request) -> int:
        """Known tokens that the request may have by the time of its next pass."""
        return min(request.num_known + request.num_inflight * self._max_emitted, request.max_length)

    def _reserve(self, request: Request, schedule: Schedule) -> bool | None:
        """Pages for the request's next pass; preempts younger sequences if that is what it takes.

        A preempted sequence (no pages) never preempts others: it waits until its whole length fits. None:
        someone would be preempted of whom results are still to come.
        """
        lane = lane_of(request)
        num_slots = self.slots_needed(self._longest(request))
        while not self._extend(request, num_slots, schedule):
            if self.pool.num_owned(lane) == 0:
                return False
            if any(other.num_inflight for other in self.running):
                return None
            victim = next(r for r in reversed(self.running) if self.pool.num_owned(lane_of(r)) > 0)
            self.pool.release(lane_of(victim))
            victim.num_computed = 0
            schedule.preempted.append(victim)
            self.num_preemptions += 1
        return True

    def _extend(self, request: Request, num_slots: int, schedule: Schedule) -> bool:
        """Pages for `num_slots` slots in all; False, changing nothing, if too few are free."""
        lane = lane_of(request)
        if self.pool.num_owned(lane):
            return self.pool.reserve(lane, num_slots)
        if not self._allocate(request, num_slots, schedule):
            return False
        schedule.resumed.append(request)
        return True

    def _allocate(self, request: Request, num_slots: int, schedule: Schedule) -> bool:
        """Pages for a sequence that has none, which begin with what the prefix cache knows of its tokens.

        The last known token's grain is fed in any case, for its logits. Of a page that is equal in part, in
        whole grains, a copy is made, so that the lane writes into pages of its own only.
        """
        lane, cache, size = lane_of(request), self.pool.cache, self.pool.page_size
        if cache is None:
            return self.pool.reserve(lane, num_slots)
        most = self._kv_policy.num_reusable(request.num_known)
        keys = self._page_keys(request, most // size)[: most // size]
        shared = cache.chain(keys)
        behind = len(shared) * size
        parent = keys[len(shared) - 1] if shared else cache.root
        source, num_equal = cache.nearest(parent, request.known_ids(behind, min(behind + size, most)))
        num_equal = self._kv_policy.num_computable(num_equal)
        if not self.pool.reserve(lane, num_slots, shared):
            return False
        if num_equal:
            # The source may be taken for this lane or another by now: copies come before all writes.
            cache.touch(source)
            schedule.copies.append((source, self.pool.page(lane, len(shared))))
        request.num_computed = behind + num_equal
        if request.num_forwards == 0:
            request.num_cached_tokens = request.num_computed
        cache.counts.add(num_tokens=most, num_hit_tokens=request.num_computed, is_copied=num_equal > 0)
        return True

    def _commit_computed_pages(self) -> None:
        """Enter what launched passes compute into the prefix cache."""
        if self.pool.cache is not None:
            self.pool.cache.mark_written()
        for request in self.running:
            self._commit(request, request.num_computed)

    def _commit_scheduled_pages(self, schedule: Schedule, num_committed: int) -> int:
        """Enter what this very pass will compute, for those who sit down in it: each layer stores the KV of
        all rows before any row attends. Returns how many requests of the schedule were seen to.
        """
        for b in range(num_committed, len(schedule.requests)):
            request = schedule.requests[b]
            num_lookahead_tokens = schedule.samples[b] * schedule.num_lookahead_tokens
            num_computed = request.num_computed + schedule.num_feed[b] - num_lookahead_tokens
            self._commit(request, num_computed, is_written=False)
        return len(schedule.requests)

    def _commit(self, request: Request, num_computed: int, *, is_written: bool = True) -> None:
        """Enter the request's pages before `num_computed` into the prefix cache, where they are missing.

        A page that another sequence entered first stays the request's own while the request has to write it.
        """
        lane, cache, size = lane_of(request), self.pool.cache, self.pool.page_size
        start, end = self.pool.num_cached(lane), num_computed // size
        if cache is None or start >= end:
            return
        keys = self._page_keys(request, end)
        for place in range(start, end):
            if not is_written and cache.page_of(keys[place]) is not None:
                return
            parent = keys[place - 1] if place else cache.root
            token_ids = request.known_ids(place * size, (place + 1) * size)
            self.pool.commit(lane, keys[place], parent, token_ids, is_written=is_written)

    def _page_keys(self, request: Request, num_pages: int) -> list[bytes]:
        """Keys of the request's first pages, `num_pages` of them at least."""
        cache, keys, size = self.pool.cache, request.page_keys, self.pool.page_size
        assert cache is not None
        while len(keys) < num_pages:
            start = len(keys) * size
            parent = keys[-1] if keys else cache.root
            keys.append(cache.key(parent, request.known_ids(start, start + size)))
        return keys


def lane_of(request: Request) -> int:
    """The lane of a seated request."""
    assert request.lane is not None, f"{request.request_id=} is not seated"
    return request.lane
