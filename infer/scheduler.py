"""Continuous batching: who runs in the next pass, within a pool of pages and a prompt budget. Knows no
algorithm.

Every sequence simply has known tokens that are not computed yet (a prompt: many; a decoding sequence:
one), so prompts are chunked into the same passes as decoding. When pages run out, the youngest sequence
gives all of its pages back and recomputes later; its tokens, drafts and random stream stay, so its answer
does not change.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from idlm.infer.decoders.base import Batch
from idlm.infer.kv_cache import PagePool
from idlm.infer.request import Request
from idlm.infer.transfer import to_device
from idlm.sampling import WarpNeeds


@dataclass(slots=True, kw_only=True)
class Schedule:
    """One pass: its requests (oldest first) with the host data that decoders plan by, and who sat down or
    lost its KV. `picture`: by which of the decoder's pictures.

    `num_feed[b]` known tokens are fed, `num_known[b]` are then computed at most, `samples[b]`: that is all.
    """

    requests: list[Request] = field(default_factory=list)
    num_feed: list[int] = field(default_factory=list)
    num_known: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    seated: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    picture: int = 0

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens to report with the log-probability of each token; None where nobody asked."""
        asked = [request.params.logprobs for request in self.requests]
        return max((number for number in asked if number is not None), default=None)

    def batch(self, device: torch.device) -> Batch:
        """The decoders' view, of just these rows."""
        return Batch(
            lanes_B=to_device([lane_of(request) for request in self.requests], device),
            num_feed_B=to_device(self.num_feed, device),
            samples_B=to_device(self.samples, device, dtype=torch.bool),
            max_feed=max(self.num_feed),
            max_known=max(self.num_known),
            num_rows=None,
            needs=WarpNeeds.of([request.params for request in self.requests]),
            picture=self.picture,
            num_top=self.num_top,
        )

    def launched(self) -> None:
        """Note in the requests that the pass is on its way."""
        for request, num_feed, samples in zip(self.requests, self.num_feed, self.samples, strict=True):
            request.num_computed += num_feed - samples
            request.num_in_flight += samples


class Scheduler:
    """Lanes, queue and page accounting.

    Every running sequence gets its decoding rows in every pass (`max_width` at most, which emit
    `max_emitted` tokens at most); `max_prompt_rows` bounds the further prompt rows of all sequences
    together. Passes may be scheduled before the results of earlier ones are known: then a sequence is as
    long as it can be, and nobody is preempted.
    """

    def __init__(
        self, pool: PagePool, *, num_lanes: int, max_prompt_rows: int, max_width: int, max_emitted: int
    ) -> None:
        self.pool = pool
        self._max_prompt_rows = max_prompt_rows
        self._max_width, self._max_emitted = max_width, max_emitted
        self._free_lanes = list(range(num_lanes - 1, -1, -1))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def slots_needed(self, num_tokens: int) -> int:
        """Slots of a sequence of `num_tokens` whose last token is pending, with its drafts and masks."""
        return num_tokens - 1 + self._max_width

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def next(self) -> Schedule | None:
        """Decide the next pass. Empty when nothing is left to do, or nothing before results come back; None
        when pages are so short that results must come back first.
        """
        schedule = Schedule()
        budget = self._max_prompt_rows
        is_stalled = False
        for request in list(self.running):
            if request.num_known + request.num_in_flight >= request.max_length:
                continue  # Every pass in flight brings a token: it is complete.
            had_pages = self.pool.num_owned(lane_of(request)) > 0
            if not had_pages and is_stalled:
                continue
            reserved = self._reserve(request, schedule)
            if reserved is None:
                return None
            if reserved:
                budget = self._feed(request, budget, schedule)
            else:
                is_stalled = True
        while self.waiting and self._free_lanes and not is_stalled and budget > 0:
            request = self.waiting[0]
            lane = self._free_lanes.pop()
            if not self.pool.reserve(lane, self.slots_needed(request.num_known)):
                self._free_lanes.append(lane)
                break
            request.lane = lane
            self.running.append(self.waiting.popleft())
            schedule.seated.append(request)
            budget = self._feed(request, budget, schedule)
        return schedule

    def retire(self, request: Request) -> None:
        """Take a finished or aborted request out, wherever it is, and free what it holds."""
        if request.lane is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.pool.release(request.lane)
        self._free_lanes.append(request.lane)
        request.lane = None

    def requeue_all(self) -> None:
        """Send every running request back to the front of the queue, in order, with what it has emitted.

        For a pass that failed somewhere: what the lanes hold is unknown then, what the host holds is not.
        """
        for request in reversed(self.running):
            lane = lane_of(request)
            self.pool.release(lane)
            self._free_lanes.append(lane)
            request.lane, request.num_computed, request.num_in_flight = None, 0, 0
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()

    def _feed(self, request: Request, budget: int, schedule: Schedule) -> int:
        """Enter the request with as many known tokens as the prompt budget allows; returns what is left of
        it.
        """
        remaining = request.num_known - request.num_computed
        if remaining > 1 and budget == 0:
            return 0
        num_feed = min(remaining, 1 + budget)
        schedule.requests.append(request)
        schedule.num_feed.append(num_feed)
        schedule.samples.append(num_feed == remaining)
        schedule.num_known.append(self._longest(request) - remaining + num_feed)
        return budget - (num_feed - 1)

    def _longest(self, request: Request) -> int:
        """Known tokens that the request may have by the time of its next pass."""
        return min(request.num_known + request.num_in_flight * self._max_emitted, request.max_length)

    def _reserve(self, request: Request, schedule: Schedule) -> bool | None:
        """Pages for the request's next pass; preempts younger sequences if that is what it takes.

        A preempted sequence (no pages) never preempts others: it waits until its whole length fits. None:
        someone would be preempted of whom results are still to come.
        """
        lane = lane_of(request)
        while not self.pool.reserve(lane, self.slots_needed(self._longest(request))):
            if any(other.num_in_flight for other in self.running):
                return None
            if self.pool.num_owned(lane) == 0:
                return False
            victim = next(r for r in reversed(self.running) if self.pool.num_owned(lane_of(r)) > 0)
            self.pool.release(lane_of(victim))
            victim.num_computed = 0
            schedule.preempted.append(victim)
            self.num_preemptions += 1
        return True


def lane_of(request: Request) -> int:
    """The lane of a seated request."""
    assert request.lane is not None, f"{request.request_id=} is not seated"
    return request.lane
