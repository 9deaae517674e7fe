"""436 requests through a KV pool too small for its lanes, 30 % aborted: no leak, and the others unchanged.

An answer is a function of prompt, settings and seed alone: survivors must equal an abort-free run in a pool
that never preempts, whatever other requests arrive, finish or are aborted meanwhile."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Completion, SamplingParams
from idlm.infer.engine import Engine
from idlm.infer.state.page_pool import PrefixCache
from tests.contracts.engines import (
    CYCLE,
    acceptance_of,
    answers_and_margins,
    assert_idle,
    build_engine,
    prompts_of,
)
from tests.errors import refused
from tests.prefix_simulation import check_pages

NUM_REQUESTS = 112
MARKED_SHARE = 0.4
"""Marked for an abort; a quarter of them finishes first, so that 30 % are aborted."""
TINY = {"max_num_seqs": 12, "num_pages": 28, "page_size": 4, "max_num_batched_tokens": 10, "max_length": 64}
ROOMY = {"max_num_seqs": 128, "page_size": 16, "max_num_batched_tokens": 4096, "max_length": 64}
DECODERS = ["ar", "branch", "tree"]
AS_ON_A_GPU: dict[str, Any] = {"num_inflight_steps": 3, "graphs": "on"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of the soak. `abort_after` passes on a lane it is aborted; -1 in the queue, None never."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    abort_after: int | None


def _arrivals(count: int, seed: int) -> list[Arrival]:
    """Prompts of 1 to 30 tokens, most of which begin like others."""
    rng = random.Random(seed)
    beginnings = prompts_of([5, 8, 13, 20], seed=seed + 1, vocab_size=CYCLE)
    beginnings += [[], beginnings[3][:11] + beginnings[2][:6]]
    starts = [rng.choice(beginnings) for _ in range(count)]
    lengths = [rng.randint(0 if start else 1, 30 - len(start)) for start in starts]
    tails = prompts_of(lengths, seed=seed, vocab_size=CYCLE)
    prompts = [start + tail for start, tail in zip(starts, tails, strict=True)]
    return [
        Arrival(
            request_id=f"q{i}",
            prompt=prompt,
            params=SamplingParams(
                max_tokens=rng.randint(1, 24),
                temperature=rng.choice((0.0, 0.7, 1.0, 1.3)),
                top_k=rng.choice((0, 0, 5)),
                top_p=rng.choice((1.0, 0.9)),
                seed=rng.randrange(2**63),
                stop_token_ids=rng.choice(((), (), (2,))),
            ),
            abort_after=rng.choice((-1, 1, 2, 3, 6)) if rng.random() < MARKED_SHARE else None,
        )
        for i, prompt in enumerate(prompts)
    ]


def _engine(foreseeing: Path, decoder: str, options: dict[str, Any]) -> Engine:
    if decoder == "ar":
        return build_engine(foreseeing, "ar", **options)
    return build_engine(foreseeing, "isd", stride=4, rejection_strategy=decoder, **options)


@dataclass(slots=True, kw_only=True)
class _Soak:
    """Drives an engine step by step, checks the books after each, and counts where aborts struck."""

    engine: Engine
    finished: dict[str, Completion]
    struck: dict[str, int]

    def run(self, arrivals: list[Arrival]) -> None:
        """Keep up to 24 requests in the engine until all have come and gone."""
        waiting = list(reversed(arrivals))
        doomed: dict[str, int] = {}
        while waiting or self.engine._active:
            while waiting and len(self.engine._active) < 24:
                arrival = waiting.pop()
                self.engine.add_request(arrival.request_id, arrival.prompt, arrival.params)
                if arrival.abort_after is not None:
                    doomed[arrival.request_id] = arrival.abort_after
            for event in self.engine.step():
                if event.completion is not None:
                    self.finished[event.request_id] = event.completion
                    doomed.pop(event.request_id, None)
            for request_id in list(doomed):
                [request] = self.engine._active[request_id]
                doomed[request_id] -= request.lane is not None
                if doomed[request_id] < 0 or (doomed[request_id] == 0 and request.lane is not None):
                    del doomed[request_id]
                    self._abort(request_id)
            self._check_books()

    def _abort(self, request_id: str) -> None:
        [request] = self.engine._active[request_id]
        if request.lane is None:
            where = "queued"
        elif self.engine.pool.num_owned(request.lane) == 0:
            where = "preempted"
        else:
            where = "decoding" if request.token_ids else "prefilling"
        self.struck[where] = self.struck.get(where, 0) + 1
        [completion] = self.engine.abort(request_id)
        assert completion.finish_reason == "abort"
        assert self.engine.abort(request_id) == []

    def _check_books(self) -> None:
        scheduler, pool = self.engine.scheduler, self.engine.pool
        check_pages(pool)
        lanes = [request.lane for request in scheduler.running]
        assert len(set(lanes)) == len(lanes)
        assert sorted([*lanes, *scheduler._free_lanes]) == list(range(self.engine.settings.max_num_seqs))
        assert all(pool.num_owned(lane) == 0 for lane in scheduler._free_lanes)
        table = self.engine.table
        for request in scheduler.running:
            if request.num_inflight == 0:
                assert int(table.num_known_Z[request.lane]) == request.num_known
                assert int(table.num_computed_Z[request.lane]) == request.num_computed < request.num_known
            assert int(table.num_known_Z[request.lane]) >= request.num_known


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("decoder", "options"), [*zip(DECODERS, itertools.cycle((AS_ON_A_GPU, {})), strict=False)], ids=str
)
def test_soak(foreseeing: Path, decoder: str, options: dict[str, Any]) -> None:
    """Also with results that are read three passes late, and with passes of static shape."""
    cache = _check_soak(foreseeing, decoder, NUM_REQUESTS, options)
    assert cache is not None
    counts = cache.counts
    assert min(counts.num_hit_tokens, counts.num_evicted) > NUM_REQUESTS // 4, counts


@pytest.mark.sweep
@pytest.mark.decides
def test_soak_without_a_prefix_cache(foreseeing: Path) -> None:
    assert _check_soak(foreseeing, "branch", 100, {"num_inflight_steps": 3, "prefix_cache": False}) is None


def _check_soak(foreseeing: Path, decoder: str, count: int, options: dict[str, Any]) -> PrefixCache | None:
    arrivals = _arrivals(count, seed=DECODERS.index(decoder))
    soak = _Soak(engine=_engine(foreseeing, decoder, TINY | options), finished={}, struck={})
    soak.run(arrivals)
    assert_idle(soak.engine)
    assert soak.engine.scheduler.num_preemptions > count // 50
    assert {"queued", "prefilling", "decoding"} <= soak.struck.keys(), soak.struck
    assert 0.25 * count < sum(soak.struck.values()) < 0.45 * count
    assert len(soak.finished) + sum(soak.struck.values()) == count

    roomy = _engine(foreseeing, decoder, ROOMY | {"prefix_cache": False})
    undisturbed, is_clear = answers_and_margins(
        roomy, [a.prompt for a in arrivals], [a.params for a in arrivals]
    )
    assert sum(is_clear) > 0.95 * count, "too few answers are free of near ties"
    assert roomy.scheduler.num_preemptions == 0
    for arrival, expected, clear in zip(arrivals, undisturbed, is_clear, strict=True):
        survivor = soak.finished.get(arrival.request_id)
        if survivor is not None and clear:
            assert survivor.token_ids == expected.token_ids, arrival
            assert survivor.finish_reason == expected.finish_reason
            assert survivor.tested_by_position == expected.tested_by_position
    if decoder != "ar":
        assert acceptance_of(undisturbed) > 0.2
    return soak.engine.pool.cache


def test_closing_a_stream_frees_the_request(foreseeing: Path) -> None:
    engine, params = _engine(foreseeing, "tree", TINY), SamplingParams(max_tokens=20, seed=0)
    refused("IDLM-0410", engine.stream, [])
    engine.stream([1, 2, 3], params).close()
    assert_idle(engine)
    events = engine.stream([1, 2, 3], params)
    assert next(events).token_ids
    events.close()
    assert_idle(engine)


def test_drafts_behind_the_end_of_an_answer_are_not_counted(foreseeing: Path) -> None:
    """A longer answer by one token has one more accepted draft or none: that token was a draft or was not."""
    engine = build_engine(foreseeing, "isd", stride=4, rejection_strategy="cold")
    [prompt] = prompts_of([1], vocab_size=CYCLE)
    params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for m in range(1, 25)]
    answers = engine.generate([prompt] * len(params), params)
    accepted = [sum(answer.accepted_by_position) for answer in answers]
    assert {after - before for before, after in itertools.pairwise([0, *accepted])} == {0, 1}


def test_generate_keeps_the_events_of_other_requests(foreseeing: Path) -> None:
    engine = _engine(foreseeing, "ar", {})
    params = SamplingParams(temperature=0, max_tokens=6)
    engine.add_request("others", [3, 1, 4], params)
    [alone] = engine.generate([[2, 7]], params)
    events = engine.step()
    tokens = [token for event in events for token in event.token_ids]
    assert alone.request_id != "others"
    assert [event.completion is not None for event in events].count(True) == 1
    assert tuple(tokens) == next(e.completion for e in events if e.completion is not None).token_ids
