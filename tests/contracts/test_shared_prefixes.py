"""Answers are the same with the prefix cache and without, whichever sequences share pages.

The pages under it are tested without a model in tests/unit/engine/test_prefix_cache.py."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import Completion, SamplingParams
from idlm.infer.engine import Engine
from idlm.infer.state.page_pool import PagePool, PrefixCache
from tests.contracts.engines import CYCLE, acceptance_of, assert_idle, build_engine, clear_answers, prompts_of

DECODERS = ["ar", "branch", "tree"]
PAGE = 4
ROOMY = {"page_size": PAGE, "max_num_seqs": 8, "max_num_batched_tokens": 7}
AHEAD: dict[str, Any] = {"num_inflight_steps": 3, "graphs": "on"}
TIGHT = {**ROOMY, "num_pages": 26}


def _engine(foreseeing: Path, decoder: str, **options: object) -> Engine:
    if decoder == "ar":
        return build_engine(foreseeing, "ar", **options)
    return build_engine(foreseeing, "isd", stride=4, rejection_strategy=decoder, **options)


def _prompts() -> list[list[int]]:
    """A system prompt of odd length with tails; prompts equal up to exactly 1, 2 and 3 pages, or but for one
    token; prompts of exactly 1, 2 and 3 pages, and one token longer; one page twice in a row."""
    [system, text, other] = prompts_of([13, 24, 24], vocab_size=CYCLE)
    prompts = [system + tail for tail in prompts_of([1, 4, 6, 3], seed=1, vocab_size=CYCLE)]
    for num_pages in (1, 2, 3):
        end = num_pages * PAGE
        prompts += [text[:end] + other[end:], text[:end], text[: end + 1], other[:end] + text[end:]]
    changed = [*text[:9], (text[9] + 1) % CYCLE, *text[10:]]
    return [*prompts, text, changed, text[:4] * 2, text[:4] * 3, text[4:8] * 2]


def _params(count: int) -> list[SamplingParams]:
    """Greedy and drawn, single and in samples."""
    return [
        SamplingParams(max_tokens=14, temperature=i % 3 / 2, seed=i, n=1 + (i % 4 == 3)) for i in range(count)
    ]


def _output(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.finish_reason, c.tested_by_position) for c in completions]


@functools.cache
def _uncached(
    foreseeing: Path, decoder: str
) -> tuple[list[list[int]], list[SamplingParams], list[tuple[Any, ...]]]:
    """Prompts, settings, and what an engine without a prefix cache says."""
    prompts = _prompts()
    params = _params(len(prompts))
    engine = _engine(foreseeing, decoder, **ROOMY, prefix_cache=False)
    completions = clear_answers(engine, prompts, params)
    assert {c.num_cached_tokens for c in completions} == {0}
    assert decoder == "ar" or acceptance_of(completions) > 0.2, acceptance_of(completions)
    return prompts, params, _output(completions)


@pytest.mark.sweep_but("ar-ahead")
@pytest.mark.decides
@pytest.mark.parametrize(
    ("decoder", "way"),
    [
        pytest.param(decoder, way, id=f"{decoder}-{'ahead' if way else 'eager'}")
        for decoder, way in zip(DECODERS, itertools.cycle((AHEAD, {})), strict=False)
    ],
)
def test_answers_are_those_without_a_cache(foreseeing: Path, decoder: str, way: dict[str, Any]) -> None:
    """From a cold cache, from a full one (all whole pages of every prompt are in it), and when pages
    are so few that they are evicted and sequences preempted."""
    prompts, params, expected = _uncached(foreseeing, decoder)
    engine = _engine(foreseeing, decoder, **ROOMY, **way)
    assert _output(engine.generate(prompts, params)) == expected
    again = engine.generate(prompts, params)
    assert _output(again) == expected
    assert [c.num_cached_tokens for c in again] == [(c.num_prompt_tokens - 1) // PAGE * PAGE for c in again]
    assert_idle(engine)

    tight = _engine(foreseeing, decoder, **TIGHT, **way)
    for _ in range(2):
        assert _output(tight.generate(prompts, params)) == expected
    assert tight.scheduler.num_preemptions > 0
    assert tight.pool.cache is not None
    assert tight.pool.cache.counts.num_evicted > 0
    assert tight.pool.cache.counts.num_hit_tokens > 0
    assert_idle(tight)


@pytest.mark.sweep
@pytest.mark.parametrize("decoder", ["branch"])
def test_freed_pages_are_never_read(foreseeing: Path, decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages hold NaN from the moment they are free or evicted."""
    engine = _engine(foreseeing, decoder, **TIGHT, num_inflight_steps=3)
    memory = engine._parts.runner._cache
    release, evict = PagePool._decref, PrefixCache.evict
    num_poisoned = 0

    def poison(pages: Sequence[int]) -> None:
        nonlocal num_poisoned
        num_poisoned += len(pages)
        for page, slots in itertools.product(pages, (memory.keys, memory.values)):
            slots[:, page * PAGE : (page + 1) * PAGE] = torch.nan

    def releasing(self: PagePool, page: int) -> None:
        release(self, page)
        poison([page] if self._free[-1:] == [page] else [])

    def evicting(self: PrefixCache) -> int:
        page = evict(self)
        poison([page])
        return page

    monkeypatch.setattr(PagePool, "_decref", releasing)
    monkeypatch.setattr(PrefixCache, "evict", evicting)
    poison(range(engine.pool.num_pages))
    prompts, params, expected = _uncached(foreseeing, decoder)
    for _ in range(2):
        assert _output(engine.generate(prompts, params)) == expected
    assert num_poisoned > 200


def test_samples_share_their_prompt(foreseeing: Path) -> None:
    """All arrive at once: the first stores the prompt, in the very pass in which the others read it."""
    engine = _engine(foreseeing, "tree", **{**ROOMY, "max_num_batched_tokens": 100})
    [prompt] = prompts_of([30], vocab_size=CYCLE)
    completions = engine.generate([prompt], SamplingParams(max_tokens=6, seed=3, n=8))
    assert [c.num_cached_tokens for c in completions] == [0, *[28] * 7]
    plain = _engine(foreseeing, "tree", **ROOMY, prefix_cache=False)
    expected = clear_answers(plain, [prompt], SamplingParams(max_tokens=6, seed=3, n=8))
    assert _output(completions) == _output(expected)


def test_a_conversation_goes_on_where_it_ended(foreseeing: Path) -> None:
    """The answer's KV is kept as well, but for its last token, which was never fed."""
    engine = _engine(foreseeing, "branch", **ROOMY)
    [prompt, more] = prompts_of([11, 3], vocab_size=CYCLE)
    [answer] = engine.generate([prompt], SamplingParams(max_tokens=14, seed=1))
    longer = [*prompt, *answer.token_ids, *more]
    [next_answer] = engine.generate([longer], SamplingParams(max_tokens=5, seed=1))
    assert next_answer.num_cached_tokens == (11 + 14 - 1) // PAGE * PAGE
    plain = _engine(foreseeing, "branch", **ROOMY, prefix_cache=False)
    [expected] = clear_answers(plain, [longer], SamplingParams(max_tokens=5, seed=1))
    assert next_answer.token_ids == expected.token_ids
