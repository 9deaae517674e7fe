"""Passes of static shape and late results change no answer: what a GPU does, done on a CPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Completion, SamplingParams
from idlm.infer.decoders.base import KVWritePolicy
from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.runtime.graphs import pass_shape
from idlm.infer.runtime.graphs import pass_shape as buckets
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.model_runner import Runner, StepResult
from idlm.infer.sparse.row_reservation import head_bucket, head_buckets
from idlm.infer.state.batch import Schedule, StepPlan, WantedRows
from tests.contracts.engines import (
    CYCLE,
    MAX_STRIDE,
    assert_idle,
    build_engine,
    clear_answers,
    greedy,
    prompts_of,
)
from tests.errors import refused

DECODERS: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    *(("isd", {"stride": 4, "rejection_strategy": name}) for name in STRATEGIES.names()),
    ("isd", {"stride": 4, "rejection_strategy": "branch_2"}),
    ("isd", {"stride": 8, "adaptive": True}),
]
WAYS: list[dict[str, Any]] = [
    {"graphs": "on"},
    {"num_inflight_steps": 1},
    {"graphs": "on", "num_inflight_steps": 5, "max_num_seqs": 5},
]
PROMPTS = prompts_of([1, 7, 20, 3, 12, 5, 9, 33], vocab_size=CYCLE)


@functools.cache
def _expected(foreseeing: Path, decoder: str, options: tuple[tuple[str, Any], ...]) -> list[Completion]:
    """Answers of exact shapes; those of greedy AR for strides that follow the clock."""
    if dict(options).get("adaptive"):
        return _expected(foreseeing, "ar", ())
    return clear_answers(build_engine(foreseeing, decoder, **dict(options)), PROMPTS, greedy(max_tokens=20))


@pytest.mark.sweep_but(1)
@pytest.mark.decides
@pytest.mark.parametrize(
    ("decoder", "options", "way"),
    [(*one, WAYS[number % len(WAYS)]) for number, one in enumerate([*DECODERS, *DECODERS[:1], DECODERS[-1]])],
    ids=str,
)
def test_answers_are_those_of_exact_shapes_read_at_once(
    foreseeing: Path, decoder: str, options: dict[str, Any], way: dict[str, Any]
) -> None:
    expected = _expected(foreseeing, decoder, tuple(options.items()))
    engine = build_engine(foreseeing, decoder, **options, **way)
    found = engine.generate(PROMPTS, greedy(max_tokens=20))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert_idle(engine)
    if not options.get("adaptive") and "max_num_seqs" not in way:
        for mine, other in zip(found, expected, strict=True):
            assert mine.num_forwards == other.num_forwards, "a pass after the end does not count"
            assert mine.tested_by_position == other.tested_by_position


@pytest.mark.decides
def test_draws_and_logprobs_are_the_same_too(foreseeing: Path) -> None:
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, seed=k, max_tokens=16, logprobs=k) for k in range(4)
    ]
    plain = clear_answers(build_engine(foreseeing, "isd", stride=3), PROMPTS[:4], params)
    padded = build_engine(foreseeing, "isd", stride=3, graphs="on", num_inflight_steps=3).generate(
        PROMPTS[:4], params
    )
    for mine, other in zip(padded, plain, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.logprobs is not None
        assert other.logprobs is not None
        for found, expected in zip(mine.logprobs, other.logprobs, strict=True):
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)
            assert found.top == pytest.approx(expected.top, abs=1e-5)


def test_an_answer_stops_where_it_should_however_late_that_is_seen(foreseeing: Path) -> None:
    stop = build_engine(foreseeing, "ar").generate([PROMPTS[2]], greedy(max_tokens=8))[0].token_ids[5]
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(stop,))
    [expected] = clear_answers(build_engine(foreseeing, "isd", stride=4), [PROMPTS[2]], params)
    engine = build_engine(foreseeing, "isd", stride=4, num_inflight_steps=6, graphs="on")
    [found] = engine.generate([PROMPTS[2]], params)
    assert found.finish_reason == "stop"
    assert (found.token_ids, found.num_forwards) == (expected.token_ids, expected.num_forwards)
    assert_idle(engine)


def test_results_are_read_while_a_long_queue_of_kernels_runs(
    foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pass without a graph one step is under way, else as many as the setting says."""
    call = StaticStep.__call__

    def queued(step: StaticStep, schedule: Schedule) -> StepResult:
        has_prompts = sum(schedule.num_feed) > len(schedule.requests)
        return dataclasses.replace(call(step, schedule), is_queued=has_prompts)

    monkeypatch.setattr(StaticStep, "__call__", queued)
    maximum = 3
    options: dict[str, Any] = {"max_num_batched_tokens": 4, "num_inflight_steps": maximum, "graphs": "on"}
    engine = build_engine(foreseeing, "ar", **options)
    for name, prompt in enumerate(PROMPTS):
        engine.add_request(str(name), prompt, greedy(max_tokens=20))
    seen: dict[bool, list[int]] = {True: [], False: []}
    found: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        found |= {each.request_id: each.completion.token_ids for each in engine.step() if each.completion}
        if engine._inflight:
            seen[engine._inflight[-1].is_queued].append(len(engine._inflight))
    assert max(seen[True]) == 1 and max(seen[False]) == maximum
    expected = _expected(foreseeing, "ar", ())
    assert [found[str(name)] for name in range(len(PROMPTS))] == [answer.token_ids for answer in expected]
    assert_idle(engine)


def test_a_narrow_pass_behind_a_wide_one_stays_within_the_pages_it_names(
    foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wide pass may emit beyond the end, which the host learns later; the next passes are of stride 1."""
    forward, num_beyond = Runner.forward, 0

    def checked(runner: Runner, plan: StepPlan) -> WantedRows:
        nonlocal num_beyond
        highest = int(plan.slots_R[: int(plan.cu_rows_B1[-1])].max())
        assert highest < plan.max_slots, f"{highest=} {plan.max_slots=}"
        num_beyond += not bool(plan.advances_B.all())
        return forward(runner, plan)

    monkeypatch.setattr(Runner, "forward", checked)
    settings = {"stride": MAX_STRIDE, "adaptive": True, "num_inflight_steps": 2, "prefix_cache": False}
    engine = build_engine(foreseeing, "isd", **settings)
    widest = len(engine.decoder.modes) - 1
    for max_tokens in range(11, 17):
        modes = itertools.chain([widest] * 4, itertools.repeat(0))
        monkeypatch.setattr(engine._stride_controller, "choose", lambda _, modes=modes: next(modes))
        engine.generate([[1]], greedy(max_tokens=max_tokens))
    assert num_beyond


def test_padding_of_blocks_and_of_long_contexts_is_small() -> None:
    """Up to 32 sequences at most a twenty-fifth of the rows; contexts beyond 32K at most a quarter."""
    policy = KVWritePolicy(kind="block", block_size=32)
    for size in range(1, 33):
        padded = buckets.bucket(size, buckets.BATCH_BUCKETS)
        assert padded <= 1.041 * size
        schedule = Schedule(num_feed=[0] * size)
        num_blocks = pass_shape._num_blocks(schedule, padded, policy)
        num_clean = buckets.bucket(num_blocks, buckets.FED_BLOCK_BUCKETS)
        assert num_clean == -(-padded // 8), "room for the clean blocks of an eighth of the sequences"
    assert buckets.slots_bucket(5) == buckets.MIN_SLOTS
    assert buckets.slots_bucket(20_000) == 1 << 15
    for length in (32_769, 65_568, 131_072, 131_104, 1_000_000):
        assert length <= buckets.slots_bucket(length) <= 1.25 * length
    assert buckets.slots_bucket(131_072) == 131_072, "a context of a power of two has its own bound"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"graphs": "yes"}, "graphs: got 'yes'"),
        ({"num_inflight_steps": -1}, "num_inflight_steps=-1"),
        ({"attention": "tritn"}, "did you mean 'triton'"),
    ],
)
def test_bad_settings_are_named(foreseeing: Path, options: dict[str, Any], words: str) -> None:
    error = refused("IDLM-0415", build_engine, foreseeing, "ar", **options)
    assert words in error.message


def test_buckets_of_reserved_rows_are_those_that_passes_take() -> None:
    for num_sequences, block_size in ((3, 32), (40, 8), (64, 32)):
        named = set(head_buckets(num_sequences, block_size))
        taken = {head_bucket(num, num_sequences, block_size) for num in range(num_sequences * block_size + 1)}
        assert named == taken | {None}
