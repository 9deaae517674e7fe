"""Continuous batching: which requests run in the next pass, within a pool of pages and a row budget, for any
decoding algorithm.

Every sequence simply has known tokens that are not computed yet (a prompt has many; a decoding sequence has a
pending token, or a block that has become clean), so prompts are chunked into the same passes as decoding.
When pages run out, the youngest sequence gives all of its pages back and later recomputes what the prefix
cache has lost; its tokens, drafts and random stream stay, so its answer does not change. KV of another pass
shape is equal in mathematics, not always bit for bit."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

from idlm.infer.decoders.base import TOKEN_BY_TOKEN, KVWritePolicy
from idlm.infer.request import Request, Waiting
from idlm.infer.runtime.graphs.pass_costs import PassCosts, prompt_rows
from idlm.infer.runtime.graphs.pass_shape import PROMPT_GRAPHS
from idlm.infer.state.batch import Schedule, lane_of
from idlm.infer.state.page_pool import PagePool

STEPS_TO_RESTORE = 16


class Scheduler:
    """Lanes, queue and page accounting.

    A running sequence of at most n tokens gets its decoding rows in every pass: `num_rows(n)` at most for
    each of its canvases, which emit `max_emitted` tokens at most. `max_num_batched_tokens` bounds the further
    rows of all sequences together; `halve_budget` lowers it for a while; within it `costs` decide how many
    rows a pass has (`prompt_rows`; None: as many as wait), and with decoding sequences it takes at most
    `max_slowdown` times as long as those. `decodes_again`: see `Accelerator`. Passes may be scheduled before
    the results of earlier ones are known: then every sequence counts as long as it can be by then, and none
    is preempted. `num_reserved_lanes` are reserved for clients (users, calls) that have no lane while others
    have several."""

    def __init__(
        self,
        pool: PagePool,
        *,
        num_lanes: int,
        max_num_batched_tokens: int,
        num_rows: Callable[[int], int],
        max_emitted: int,
        kv_policy: KVWritePolicy = TOKEN_BY_TOKEN,
        decodes_again: bool = False,
        costs: PassCosts | None = None,
        max_slowdown: float = math.inf,
    ) -> None:
        self.pool, self._kv_policy, self._decodes_again = pool, kv_policy, decodes_again
        self._appends = kv_policy.kind == "append"
        self.costs, self._max_slowdown = costs, max_slowdown
        self._num_left: int | None = None
        self._max_num_batched_tokens = self._row_budget = max_num_batched_tokens
        self._num_good_passes = 0
        self._num_rows, self._max_emitted = functools.cache(num_rows), max_emitted
        self._num_lanes, self._free_lanes = num_lanes, list(range(num_lanes - 1, -1, -1))
        self.waiting = Waiting()
        self.running: list[Request] = []
        self._last: Schedule | None = None
        self.num_preemptions = self.num_reserved_lanes = 0

    def slots_needed(self, num_known: int, max_length: int, num_canvases: int = 1) -> int:
        """KV slots of a decoding sequence, with its drafts and masks. Each of several canvases begins with a
        page."""
        num_slots = self._kv_policy.num_slots(num_known, self._num_rows(max_length))
        return (num_canvases - 1) * self.pool.pages_for(num_slots) * self.pool.page_size + num_slots

    def add(self, request: Request) -> None:
        has_checks = request.grammar is not None or request.params.stop
        request.is_plain = self._appends and not has_checks and request.params.prompt_logprobs is None
        self.waiting.add(request)

    def next(self) -> Schedule | None:
        """Decide the next pass: empty when nothing can run before results come back, None when pages are
        short until then."""
        policy = self._kv_policy
        num_rows = self._num_rows(1) if self._appends else 0
        schedule = Schedule(num_lookahead_tokens=policy.num_lookahead_tokens, num_decoding_rows=num_rows)
        self._num_left, is_stalled = None, False
        max_emitted = self._max_emitted
        requests, num_known = schedule.requests, schedule.num_known
        for request in self.running:
            longest = request.num_known + request.num_inflight * max_emitted
            if longest <= request.num_covered or self._covers(request, longest):
                requests.append(request)
                num_known.append(longest)
                continue
            num_certain = request.num_known + request.num_inflight * schedule.num_lookahead_tokens
            if num_certain >= request.max_length:
                continue  # Every launched pass brings a token: the answer is complete.
            had_pages = self.pool.num_owned(lane_of(request)) > 0
            if not had_pages and is_stalled:
                continue
            reserved = self._reserve(request, schedule)
            if reserved is None:
                # Requests without pages are always younger, so none was resumed in this schedule yet.
                assert not schedule.resumed, f"{schedule.resumed=}"
                return None
            if reserved:
                self._feed(request, schedule)
            else:
                is_stalled = True
        schedule.complete()
        num_committed = 0
        while self._may_admit() and not is_stalled and self._budget() > 0:
            num_committed = self._commit_scheduled_pages(schedule, num_committed)
            request = self.waiting.first()
            # The draft buffer of a new lane is empty.
            request.lane, request.has_other_drafts = self._free_lanes.pop(), False
            num_slots = self.slots_needed(request.num_known, request.max_length, request.num_canvases)
            if not self._allocate(request, num_slots):
                self._free_lanes.append(request.lane)
                request.lane = None
                break
            self.running.append(request)
            self.waiting.pop()
            schedule.scheduled_new_requests.append(request)
            self._feed(request, schedule)
        schedule.follow(self._last)
        self._last = schedule
        return schedule

    def book(self, request: Request, num_before: int, waited: int = 0) -> None:
        """Note the results of a decoding pass; the request had `num_before` known tokens before it. If it
        `waited`, it has stored no more than was scheduled."""
        request.num_inflight -= 1
        if self._appends:
            is_done = request.finish_reason or request.grammar
            assert is_done or request.num_known > num_before, f"a pass decoded nothing: {num_before=}"
            request.num_computed = request.num_known - 1
        elif not waited:
            # Not more is certain: what the pass has made clean may be stored by the next one.
            request.num_computed = max(request.num_computed, self._kv_policy.num_computable(num_before))
            request.num_passes = 0 if request.num_known > num_before else request.num_passes + 1

    def retire(self, request: Request, *, invalidate: bool = False) -> None:
        """Remove a finished or aborted request and free what it holds. `invalidate`: the prefix cache must
        not serve its KV."""
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
        """Return every running request to the front of the queue, in order, with what it has emitted: for a
        pass that failed, after which the contents of lanes and pages are unknown."""
        self.waiting.put_back(self.running)
        self.running.clear()
        self._last = None
        for request in self.waiting:
            if request.lane is not None:
                request.lane, request.num_inflight = None, 0
                self._forget(request)
        self._free_lanes = list(range(self._num_lanes - 1, -1, -1))
        self.pool.reset()

    def halve_budget(self) -> None:
        self._row_budget = max(1, self._row_budget // 2)
        self._num_good_passes = 0

    def restore_budget(self) -> None:
        """After a pass that went well: `STEPS_TO_RESTORE` such passes double a budget that was halved."""
        if self._row_budget == self._max_num_batched_tokens:
            return
        self._num_good_passes += 1
        if self._num_good_passes % STEPS_TO_RESTORE == 0:
            self._row_budget = min(2 * self._row_budget, self._max_num_batched_tokens)

    def _budget(self) -> int:
        """What is left of the row budget in this pass, which is set when a prompt first needs it.

        It follows the pass in which all requests will decode: the first sequences of many that arrive at once
        do not hold up the others."""
        if self._num_left is None:
            self._num_left = self._row_budget
            if self.costs is not None:
                arriving = itertools.islice(self.waiting, len(self._free_lanes))
                requests, size = [*self.running, *arriving], self._kv_policy.block_size
                remaining = [self._remaining(request) for request in requests]
                num_waiting = sum(max(0, num - size) for num in remaining)
                # What the smallest graph holds is stored at once.
                if num_waiting > PROMPT_GRAPHS[0]:
                    decodes = min(remaining[: len(self.running)], default=math.inf) <= size
                    num_rows = prompt_rows(
                        self.costs,
                        num_sequences=len(requests),
                        num_slots=sum(request.num_known for request in requests),
                        num_waiting=num_waiting,
                        maximum=self._row_budget,
                        max_slowdown=self._max_slowdown if decodes else math.inf,
                    )
                    if num_rows < num_waiting:
                        self._num_left = num_rows
        return self._num_left

    def _may_admit(self) -> bool:
        """Whether a lane is free for the first request that waits, which a reserved lane chooses."""
        if not self.waiting or len(self._free_lanes) > self.num_reserved_lanes:
            return bool(self.waiting)
        starved = self.waiting.starved(self.running) if self._free_lanes else None
        if starved is not None:
            self.waiting.prefer(starved)
        return starved is not None

    def _remaining(self, request: Request) -> int:
        """Known tokens that are to be stored."""
        return self._kv_policy.num_computable(request.num_known) - request.num_computed

    def _feed(self, request: Request, schedule: Schedule) -> None:
        """Add the request with as many known tokens as the budget allows, in whole blocks, the first one
        free."""
        policy, block_size = self._kv_policy, self._kv_policy.block_size
        num_rows = request.num_canvases * policy.num_decoding_rows(
            self._num_rows(request.max_length),
            num_known=request.num_known,
            num_passes=None if request.num_inflight else request.num_passes,
        )
        remaining = num_feed = self._remaining(request)
        if policy.num_budgeted(remaining, num_rows) > 0:
            budget = self._budget()
            if budget == 0:
                return
            num_feed = min(remaining, block_size + -(-budget // block_size) * block_size)
            self._num_left = max(0, budget - policy.num_budgeted(num_feed, num_rows))
        samples, longest = num_feed == remaining, self._longest(request)
        num_known = policy.num_computable(longest) - remaining + num_feed
        schedule.add(request, num_feed, num_rows, num_known, samples=samples)
        if samples and self._appends:
            # It decodes from now on; how far its pages reach is seen when it needs the next one.
            request.num_covered = 1

    def _covers(self, request: Request, longest: int) -> bool:
        """Whether a pass of a token-causal sequence that decodes needs no decision while it may have
        `longest` known tokens: its pages are reserved now, and its answer is not complete by then. What
        launched passes compute enters the prefix cache."""
        lane, num_rows, size = lane_of(request), self._num_rows(request.max_length), self.pool.page_size
        if request.num_computed >= (self.pool.num_cached(lane) + 1) * size:
            self._commit(request, request.num_computed)
        if not request.num_covered or longest >= request.max_length:
            return False
        if not self.pool.reserve(lane, longest - 1 + num_rows):
            return False
        num_covered = self.pool.num_owned(lane) * size + 1 - num_rows
        request.num_covered = min(num_covered, request.max_length - 1)
        return True

    def _longest(self, request: Request) -> int:
        """Known tokens that the request may have by the time of its next pass."""
        return min(request.num_known + request.num_inflight * self._max_emitted, request.max_length)

    def _reserve(self, request: Request, schedule: Schedule) -> bool | None:
        """Reserve pages for the request's next pass, preempting younger sequences if necessary. A sequence
        without pages never preempts others: it waits until its whole length fits. None if a sequence would be
        preempted whose results are still to come."""
        lane = lane_of(request)
        num_slots = self.slots_needed(self._longest(request), request.max_length, request.num_canvases)
        while not self._extend(request, num_slots, schedule):
            if self.pool.num_owned(lane) == 0:
                return False
            if any(other.num_inflight for other in self.running):
                return None
            victim = next(r for r in reversed(self.running) if self.pool.num_owned(lane_of(r)) > 0)
            self._commit(victim, victim.num_computed)
            self.pool.release(lane_of(victim))
            self._forget(victim)
            schedule.preempted.append(victim)
            self.num_preemptions += 1
        return True

    def _forget(self, request: Request) -> None:
        request.num_computed = request.num_passes = request.num_covered = 0
        if self._decodes_again:
            request.num_again, request.num_known = len(request.token_ids), len(request.prompt_ids)
            request.is_plain = False

    def _extend(self, request: Request, num_slots: int, schedule: Schedule) -> bool:
        """Reserve pages for `num_slots` slots in all; False, changing nothing, if too few are free."""
        lane = lane_of(request)
        if self.pool.num_owned(lane):
            return self.pool.reserve(lane, num_slots)
        if not self._allocate(request, num_slots):
            return False
        schedule.resumed.append(request)
        return True

    def _allocate(self, request: Request, num_slots: int) -> bool:
        """Reserve pages for a sequence that has none, beginning with those of its tokens in the prefix cache.

        The block of the last known token is fed in any case, for its logits. Only whole pages are shared, so
        that the lane writes into pages of its own only."""
        lane, cache, size = lane_of(request), self.pool.cache, self.pool.page_size
        if cache is None:
            return self.pool.reserve(lane, num_slots)
        maximum = self._kv_policy.num_reusable(request.num_known)
        if request.num_unscored:
            # Only rows that are computed have log-probabilities of their next tokens.
            maximum = min(maximum, len(request.prompt_logprobs))
        shared = cache.chain(self._page_keys(request, maximum // size)[: maximum // size])
        if not self.pool.reserve(lane, num_slots, shared):
            return False
        request.num_computed = len(shared) * size
        if request.num_forwards == 0:
            request.num_cached_tokens = request.num_computed
        cache.counts.num_tokens += maximum
        cache.counts.num_hit_tokens += request.num_computed
        return True

    def _commit_scheduled_pages(self, schedule: Schedule, num_committed: int) -> int:
        """Enter what this very pass will compute, for requests that it admits later. Returns how many of the
        schedule's requests are done."""
        for b in range(num_committed, len(schedule.requests)):
            request = schedule.requests[b]
            num_lookahead_tokens = schedule.samples[b] * schedule.num_lookahead_tokens
            num_computed = request.num_computed + schedule.num_feed[b] - num_lookahead_tokens
            self._commit(request, num_computed, is_written=False)
        return len(schedule.requests)

    def _commit(self, request: Request, num_computed: int, *, is_written: bool = True) -> None:
        """Enter the request's missing pages before `num_computed` into the prefix cache. A page that another
        sequence entered first stays the request's own while the request has to write it."""
        lane, cache, size = lane_of(request), self.pool.cache, self.pool.page_size
        if self._decodes_again:
            num_computed = min(num_computed, self._kv_policy.num_computable(len(request.prompt_ids)))
        start, end = self.pool.num_cached(lane), num_computed // size
        if cache is None or start >= end:
            return
        keys = self._page_keys(request, end)
        for index in range(start, end):
            if not is_written and cache.page_of(keys[index]) is not None:
                return
            parent = keys[index - 1] if index else cache.root
            self.pool.commit(lane, keys[index], parent, is_written=is_written)

    def _page_keys(self, request: Request, num_pages: int) -> list[bytes]:
        """Keys of the request's first pages, at least `num_pages` of them."""
        cache, keys, size = self.pool.cache, request.page_keys, self.pool.page_size
        assert cache is not None
        while len(keys) < num_pages:
            start = len(keys) * size
            parent = keys[-1] if keys else cache.root
            keys.append(cache.key(parent, request.known_ids(start, start + size)))
        return keys
