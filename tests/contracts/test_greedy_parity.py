"""Greedy ISD gives greedy AR's answers token for token in fp32: strategies, strides, families, stops.

Runs on random checkpoints, whose drafts are nearly always rejected, and on one that was taught to foresee."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path

import pytest

from idlm.contracts import Completion
from idlm.infer.decoders.rejection import STRATEGIES
from tests.contracts.engines import (
    CYCLE,
    MASK_ID,
    acceptance_of,
    answers,
    assert_idle,
    build_engine,
    clear_answers,
    greedy,
    prompts_of,
    tokens_per_forward,
    with_length,
    write_converted_toy,
)
from tests.toy import ARCHITECTURES

PAIRS = [(2, "tree"), (3, "branch"), (4, "alternate"), (8, "cold")]
MAX_BATCHED_TOKENS = 12


def _lengths(stride: int) -> list[int]:
    """One token; exactly 2N-1 and its neighbours; chunked prompts, with a last chunk of exactly 2N-1 rows."""
    width = 2 * stride - 1
    edges = [1, width, 2 * stride, width - 1, 30, 1 + MAX_BATCHED_TOKENS + width]
    return [*edges, 2, 5, 17, 3, 9, 4, 25, 7, 1, 11]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_converted_toy(tmp_path_factory.mktemp(request.param), request.param)


@functools.cache
def _ar(checkpoint: Path, lengths: tuple[int, ...], vocab_size: int, max_tokens: int) -> list[Completion]:
    """Greedy AR's answers to random prompts, which tests of all strategies share."""
    prompts = prompts_of(lengths, vocab_size=vocab_size)
    return clear_answers(build_engine(checkpoint, "ar"), prompts, greedy(max_tokens=max_tokens))


@pytest.mark.sweep_but(converted="Qwen3", stride=2)
@pytest.mark.sweep_but(converted="Qwen2", stride=3)
@pytest.mark.decides
@pytest.mark.parametrize(("stride", "strategy"), PAIRS)
def test_random_checkpoints_agree(converted: Path, stride: int, strategy: str) -> None:
    prompts = prompts_of(_lengths(stride))
    expected = answers(_ar(converted, tuple(_lengths(stride)), MASK_ID, 14))
    engine = build_engine(converted, "isd", stride=stride, rejection_strategy=strategy)
    assert answers(engine.generate(prompts, greedy(max_tokens=14))) == expected
    assert_idle(engine)


@pytest.mark.sweep_but("3-branch")
@pytest.mark.parametrize(("stride", "strategy"), [*PAIRS, (4, "tree"), (4, "cold")])
def test_accepted_runs_agree_at_every_batch_size(foreseeing: Path, stride: int, strategy: str) -> None:
    """One lane, more prompts than lanes, 16 at once; drafts are accepted and rejected in the same pass."""
    prompts = prompts_of(_lengths(stride), vocab_size=CYCLE)
    expected = answers(_ar(foreseeing, tuple(_lengths(stride)), CYCLE, 24))
    for num_lanes, num_prompts in ((1, 2), (5, 7), (16, 16)):
        engine = build_engine(
            foreseeing, "isd", stride=stride, rejection_strategy=strategy, max_num_seqs=num_lanes
        )
        completions = engine.generate(prompts[:num_prompts], greedy(max_tokens=24))
        assert answers(completions) == expected[:num_prompts]
        assert_idle(engine)
    assert 0.2 < acceptance_of(completions) < 0.95, acceptance_of(completions)
    assert tokens_per_forward(completions) > 1.0


@pytest.mark.sweep_but(strategy="tree")
@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        ("alternate", {"adaptive": True, "graphs": "on"}),
        ("branch", {"graphs": "on", "num_inflight_steps": 3}),
        ("cold", {}),
        ("tree", {"adaptive": True, "graphs": "on"}),
    ],
    ids=str,
)
def test_a_request_may_take_one_token_per_pass(
    foreseeing: Path, strategy: str, way: dict[str, object]
) -> None:
    """Alone, and in the same passes as others; half of the sequences have fewer rows if it is adaptive."""
    prompts = prompts_of(_lengths(4)[:8], vocab_size=CYCLE)
    expected = answers(_ar(foreseeing, tuple(_lengths(4)[:8]), CYCLE, 24))
    engine = build_engine(foreseeing, "isd", stride=4, rejection_strategy=strategy, max_num_seqs=8, **way)
    halved = [number for number, mode in enumerate(engine.decoder.modes) if mode.narrow is not None]
    if halved:
        calls = itertools.count()
        engine._stride_controller.choose = lambda load: (
            halved[next(calls) % len(halved)] if load.has_halves and load.takes_drafts else 0
        )
    many = greedy(max_tokens=24)
    single = dataclasses.replace(many, decoder_options={"stride": 1})
    for params in ([single] * 8, [single, many] * 4):
        completions = engine.generate(prompts, params)
        assert answers(completions) == expected
        for done, one in zip(completions, params, strict=True):
            # Passes that only store a part of the prompt come on top.
            assert (done.num_forwards >= len(done.token_ids)) or one is many
            assert bool(done.tested_by_position) == (one is many)
    assert_idle(engine)


@pytest.mark.sweep_but("branch")
@pytest.mark.decides
@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_a_prompt_chunk_as_wide_as_a_decoding_step_is_a_prompt(foreseeing: Path, strategy: str) -> None:
    """max_num_batched_tokens = 2N-2 feeds chunks of exactly 2N-1 rows, alone and beside sequences that
    decode."""
    prompts = prompts_of([21, 7, 14, 1, 28], vocab_size=CYCLE)
    expected = answers(_ar(foreseeing, (21, 7, 14, 1, 28), CYCLE, 16))
    for num_lanes in (1, 5):
        engine = build_engine(
            foreseeing,
            "isd",
            stride=4,
            rejection_strategy=strategy,
            max_num_batched_tokens=6,
            max_num_seqs=num_lanes,
        )
        assert answers(engine.generate(prompts, greedy(max_tokens=16))) == expected


@pytest.mark.sweep_but("cold")
@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_every_length_limit_cuts_at_the_same_token(foreseeing: Path, strategy: str) -> None:
    prompts = prompts_of([1, 7, 30], vocab_size=CYCLE)
    full = _ar(foreseeing, (1, 7, 30), CYCLE, 12)
    engine = build_engine(foreseeing, "isd", stride=4, rejection_strategy=strategy)
    for max_tokens in range(1, 13):
        cut = engine.generate(prompts, with_length(greedy(), max_tokens))
        assert [c.token_ids for c in cut] == [c.token_ids[:max_tokens] for c in full]
        assert {c.finish_reason for c in cut} == {"length"}


@pytest.mark.sweep_but("branch")
@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_a_stop_id_inside_an_accepted_run_ends_the_answer(foreseeing: Path, strategy: str) -> None:
    """Each token of the answer in turn is the stop id, so that it falls on every place of an accepted run."""
    prompts = prompts_of([5, 12], vocab_size=CYCLE)
    full = _ar(foreseeing, (5, 12), CYCLE, 20)
    engine = build_engine(foreseeing, "isd", stride=4, rejection_strategy=strategy)
    num_inside = 0
    for stop_id in sorted(set(full[0].token_ids) | set(full[1].token_ids)):
        params = greedy(max_tokens=20, stop_token_ids=(stop_id,))
        stopped = engine.generate(prompts, params)
        for whole, part in zip(full, stopped, strict=True):
            has_stop = stop_id in whole.token_ids
            end = whole.token_ids.index(stop_id) + 1 if has_stop else 20
            assert part.token_ids == whole.token_ids[:end]
            assert part.finish_reason == ("stop" if has_stop else "length")
            num_inside += sum(part.accepted_by_position) > len(part.token_ids) - part.num_forwards
    assert num_inside > 0, "no stop fell before the end of an accepted run"
    assert_idle(engine)


@pytest.mark.sweep_but("cold")
@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_the_context_limit_ends_the_answer_at_the_same_token(foreseeing: Path, strategy: str) -> None:
    prompts = prompts_of([58, 63, 40], vocab_size=CYCLE)
    options = {"max_length": 64, "max_num_batched_tokens": 100}
    expected = clear_answers(build_engine(foreseeing, "ar", **options), prompts, greedy(max_tokens=100))
    engine = build_engine(foreseeing, "isd", stride=8, rejection_strategy=strategy, **options)
    assert answers(engine.generate(prompts, greedy(max_tokens=100))) == answers(expected)
    assert [len(c.token_ids) for c in expected] == [6, 1, 24]


@pytest.mark.sweep
@pytest.mark.parametrize("stride", [2, 8])
def test_tree_never_needs_more_passes_than_cold(foreseeing: Path, stride: int) -> None:
    prompts = prompts_of(_lengths(4), vocab_size=CYCLE)
    passes = {}
    for strategy in ("cold", "tree"):
        engine = build_engine(
            foreseeing, "isd", stride=stride, rejection_strategy=strategy, max_num_batched_tokens=500
        )
        passes[strategy] = tokens_per_forward(engine.generate(prompts, greedy(max_tokens=32)))
    assert passes["tree"] >= passes["cold"], passes


@pytest.mark.parametrize("converted", ["Qwen2"], indirect=True)
@pytest.mark.decides
def test_stride_one_is_ar(converted: Path) -> None:
    prompts = prompts_of([1, 6, 20])
    expected = answers(clear_answers(build_engine(converted, "ar"), prompts, greedy(max_tokens=10)))
    for strategy in STRATEGIES.names():
        engine = build_engine(converted, "isd", stride=1, rejection_strategy=strategy)
        completions = engine.generate(prompts, greedy(max_tokens=10))
        assert answers(completions) == expected
        assert acceptance_of(completions) == 0.0
