"""Classifier-free guidance of decoder `full` answers as the slow decoder does, which runs two passes: every
order, alone and beside requests without guidance, in pages and in a planned workspace."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.full_rows import mixed_logits
from idlm.infer.distributed.messages import schedule_from_message, step_message
from idlm.infer.engine import Engine
from idlm.infer.state.batch import Schedule
from tests.contracts.engines import assert_idle
from tests.contracts.full.canvases import (
    FAMILIES,
    LENGTHS,
    MASK_ID,
    ORDERS,
    PROMPTS,
    engine_of,
    params_of,
    slow_canvas,
    spread,
    watched,
)
from tests.contracts.full.test_mosaic import with_chunks
from tests.errors import refused
from tests.margins import NearTie
from tests.prefix_simulation import check_pages

pytestmark = pytest.mark.sweep  # tests/law/test_full_law.py has the law of guidance
GUIDANCE = (1.5, 0.0, 0.5, 0.0, 0.25)  # of the requests of a batch
BLOCKS: dict[str, Any] = {"order": "low_confidence", "block_length": 4}
WAYS: list[dict[str, Any]] = [
    {"graphs": "off"},
    {"graphs": "on"},
    {"graphs": "on", "num_inflight_steps": 3},
    {"memory": "mosaic"},
]
Case = tuple[SamplingParams, tuple[int, ...], int]


def cases_of(
    kind: str, options: dict[str, Any], *, guidance: tuple[float, ...] = GUIDANCE, num: int = len(PROMPTS)
) -> list[Case]:
    """Requests, each with a guidance of its own, the answers of the slow decoder and its passes."""
    return [case_of(kind, options, guidance[number], number) for number in range(num)]


def case_of(kind: str, options: dict[str, Any], guidance: float, number: int) -> Case:
    """With the first seed or, if none has, the largest part of the guidance without a near tie: a large one
    makes many confidences 1."""
    for scale in (guidance / (1 + step / 4) for step in range(20)):
        slow = slow_canvas(kind, {**options, "guidance": scale})
        for seed in range(1 if params_of(number, 0).temperature == 0 else 12):
            params = params_of(number, seed)
            try:
                tokens, num_passes = slow.answer(PROMPTS[number], params)
            except NearTie:
                continue
            decoder_options = {"guidance": scale} if scale else {}
            return dataclasses.replace(params, decoder_options=decoder_options), tokens, num_passes
    raise AssertionError("every seed and guidance has a near tie")


def answers_of(engine: Engine, cases: list[Case], **more: Any) -> list[tuple[int, ...]]:
    found = engine.generate(PROMPTS[: len(cases)], [params for params, _, _ in cases], **more)
    assert_idle(engine)
    return [done.token_ids for done in found]


@pytest.mark.parametrize(("family", "options"), spread(ORDERS[::2]), indirect=["family"], ids=str)
def test_it_equals_the_slow_decoder(family: tuple[str, Path], options: dict[str, Any]) -> None:
    """In mixed batches, of which the budget feeds a part at a time: in dynamic shapes and with passes ahead
    of the host, every second case in static shapes and in a planned workspace; and alone."""
    kind, directory = family
    cases = cases_of(kind, options)
    expected = [tokens for _, tokens, _ in cases]
    for way in WAYS[ORDERS.index(options) // 2 % 2 :: 2]:
        engine = engine_of(directory, options, max_num_batched_tokens=100, **way)
        assert answers_of(engine, cases) == expected, f"{way=}"
    [alone] = engine.generate([PROMPTS[2]], cases[2][0])
    assert (alone.token_ids, alone.num_forwards) == cases[2][1:]
    assert alone.exactness == "exact"


def test_a_pass_of_mosaic_may_want_more_rows_than_it_has(family: tuple[str, Path]) -> None:
    """A long answer without guidance beside a guided one; a pass launched after the answer is complete."""
    _, directory = family
    prompts = [[1, 2, 3, 4, 5, 6], [3, 1, 4, 1, 5, 9]]
    one = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
    guided = dataclasses.replace(one, decoder_options={"guidance": 1.0})
    found = []
    for way in ({"memory": "caching"}, {"memory": "mosaic"}, {"memory": "mosaic", "num_inflight_steps": 2}):
        engine = engine_of(directory, {"order": "random", "steps": 4}, max_length=64, **way)
        found.append([done.token_ids for done in engine.generate(prompts, [guided, one])])
    assert found[0] == found[1] == found[2] and len(found[0][1]) == 24


@pytest.mark.parametrize("memory", ["caching", "mosaic"])
def test_greedy_batches_equal_the_slow_decoder(family: tuple[str, Path], memory: str) -> None:
    """Greedy passes may take a shorter way than logits; those with guidance need logits."""
    kind, directory = family
    engine = engine_of(directory, BLOCKS, memory=memory, max_num_batched_tokens=100)
    greedy = (0, 3)
    for scales in ((1.5, 0.5), (1.5, 0.0), (0.0, 0.0)):
        cases = [case_of(kind, BLOCKS, scale, number) for scale, number in zip(scales, greedy, strict=True)]
        prompts, params = [PROMPTS[number] for number in greedy], [case[0] for case in cases]
        assert {one.temperature for one in params} == {0.0}
        found = engine.generate(prompts, params)
        assert [done.token_ids for done in found] == [tokens for _, tokens, _ in cases], f"{scales=}"


@pytest.mark.parametrize(
    ("family", "memory"), zip(FAMILIES, ("caching", "mosaic", "mosaic"), strict=True), indirect=["family"]
)
def test_the_option_of_the_engine_holds_for_requests_without_one(
    family: tuple[str, Path], memory: str
) -> None:
    """And a request may switch it off. The pool has room for both canvases of the longest request."""
    kind, directory = family
    cases = cases_of(kind, BLOCKS, guidance=(2.0, 0.0, 2.0, 2.0, 2.0))
    for number, (params, *rest) in enumerate(cases):
        off = {"guidance": 0.0} if number == 1 else {}
        cases[number] = (dataclasses.replace(params, decoder_options=off), *rest)
    options = {**BLOCKS, "guidance": 2.0}
    engine = engine_of(directory, options, memory=memory, max_num_seqs=2, max_num_batched_tokens=1)
    assert answers_of(engine, cases) == [tokens for _, tokens, _ in cases]
    longest = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    [done] = engine.generate([[1] * 56], longest)
    assert len(done.token_ids) == 8


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_canvases_do_not_share_a_page(llada: Path, page_size: int) -> None:
    """Whatever part of its last page a canvas leaves unused; few pages, so that requests wait."""
    cases = cases_of("llada", BLOCKS)
    num_pages = 2 * -(-29 // page_size) + 4
    sizes = {"page_size": page_size, "num_pages": max(num_pages, 2 * -(-33 // page_size))}
    engine = engine_of(llada, BLOCKS, **sizes, graphs="on")
    assert answers_of(engine, cases) == [tokens for _, tokens, _ in cases]


def test_only_guided_requests_have_a_second_canvas(family: tuple[str, Path]) -> None:
    """Nothing is fed, wanted or mixed for others; the second prompt is masked, its answer is that of the
    first."""
    kind, directory = family
    plain, guided = cases_of(kind, BLOCKS, num=2)[1][0], cases_of(kind, BLOCKS, num=1)[0][0]
    engine = engine_of(directory, BLOCKS)
    passes = watched(engine)
    engine.generate([PROMPTS[1]], plain)
    assert {len(plan.token_ids_R) for plan, _ in passes} == {len(PROMPTS[1]) + LENGTHS[1]}
    passes.clear()
    engine.generate([PROMPTS[0]], guided)
    num_prompt, canvas = len(PROMPTS[0]), len(PROMPTS[0]) + LENGTHS[0]
    for plan, _ in passes:
        first, second = plan.token_ids_R.view(2, canvas)
        assert first[:num_prompt].tolist() == PROMPTS[0]
        assert second.tolist() == [MASK_ID] * num_prompt + first[num_prompt:].tolist()
        assert torch.equal(plan.is_mask_R, plan.token_ids_R == MASK_ID)
        assert torch.equal(plan.positions_R.view(2, canvas)[1], torch.arange(canvas))
        ours, others = plan.logit_rows_X.view(-1, 2).unbind(1)
        assert torch.equal(ours + canvas, others)
    assert len(passes[0][0].logit_rows_X) == 2 * BLOCKS["block_length"]


@pytest.mark.parametrize("memory", ["caching", "mosaic"])
def test_aborts_and_failed_passes_change_no_answer(
    llada: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that fails puts its requests back into the queue; new ones get the pages of aborted ones."""
    cases = cases_of("llada", BLOCKS)
    for fails_at in (1, 5):
        engine = engine_of(llada, BLOCKS, memory=memory, max_num_batched_tokens=200)
        for number in (0, 1, 2):
            engine.add_request(str(number), PROMPTS[number], cases[number][0])
        events = [event for _ in range(3) for event in engine.step()]
        engine.abort("1")
        for number in (3, 4):
            engine.add_request(str(number), PROMPTS[number], cases[number][0])
        num_steps = 0
        while engine.has_work:
            num_steps += 1
            with monkeypatch.context() as patch:
                if num_steps == fails_at:
                    patch.setattr(engine.decoder, "advance", _out_of_memory)
                events += engine.step()
            check_pages(engine.pool)
        found = {event.request_id: event.completion for event in events if event.completion is not None}
        assert sorted(found) == ["0", "2", "3", "4"]
        for number in (0, 2, 3, 4):
            completion = found[str(number)]
            assert completion is not None and completion.token_ids == cases[number][1], f"{fails_at=}"
        assert_idle(engine)


def _out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("planted")


@pytest.mark.parametrize("chunks", [{"logits": 3}, {"logits": 100, "query": 100}], ids=str)
def test_no_chunk_divides_a_pair(llada: Path, chunks: dict[str, int]) -> None:
    """Of the planned head, and of the decoder's part of it."""
    options = {"order": "entropy", "steps": 4}
    cases = cases_of("llada", options)
    engine = engine_of(llada, options, memory="mosaic", max_num_batched_tokens=200)
    with_chunks(engine, chunks)
    assert answers_of(engine, cases) == [tokens for _, tokens, _ in cases]


def test_two_canvases_that_cannot_fit_are_refused(llada: Path) -> None:
    """The message names one canvas; the nearest length fits, and the same request without guidance too."""
    engine = engine_of(llada, {"order": "low_confidence"}, memory="mosaic")
    runner: Any = engine._parts.runner
    runner.min_rows, runner.capacity = 4, 32_768
    plain = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)
    guided = dataclasses.replace(plain, decoder_options={"guidance": 1.0})
    engine.check_request("plain", [1] * 48, plain)
    error = refused("IDLM-0466", engine.add_request, "guided", [1] * 48, guided)
    assert "a canvas of 64 rows, 16 of them wanted, does not fit 2 times" in error.message
    nearest = int(str(error.fix).split()[3])
    assert 20 < nearest < 64
    runner.check_canvas(nearest, round(nearest * 16 / 64), 2)
    refused("IDLM-0466", runner.check_canvas, nearest + 1, math.ceil((nearest + 1) * 16 / 64), 2)
    [done] = engine.generate([[1] * 4], guided)
    assert len(done.token_ids) == 16
    assert_idle(engine)


def test_a_pool_that_is_too_small_for_both_is_refused(llada: Path) -> None:
    engine = engine_of(llada, {"order": "low_confidence"}, page_size=8, num_pages=8)
    plain = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    guided = dataclasses.replace(plain, decoder_options={"guidance": 1.0})
    engine.generate([[1] * 60], plain)
    engine.generate([[1] * 28], guided)
    error = refused("IDLM-0413", engine.generate, [[1] * 29], guided)
    assert "num_pages to 10" in str(error)


@pytest.mark.parametrize("guidance", [-0.5, math.nan, 1e39])
def test_a_guidance_out_of_range_is_refused(llada: Path, guidance: float) -> None:
    refused(r"IDLM-0451.*decoder\.guidance=.*from 0 to 10000", engine_of, llada, {"guidance": guidance})
    engine = engine_of(llada, {})
    params = SamplingParams(max_tokens=4, decoder_options={"guidance": guidance})
    refused(r"IDLM-0453.*decoder_options\.guidance=.*from 0 to 10000", engine.generate, [[1]], params)


def test_guidance_with_a_cache_is_refused(llada: Path) -> None:
    """Keys and values of the second canvas would need a cache of their own."""
    cache = "dual"
    refused(f"IDLM-0451.*guidance=1.0 .*cache={cache}", engine_of, llada, {"cache": cache, "guidance": 1.0})
    engine = engine_of(llada, {"cache": cache})
    with pytest.raises(UserError, match=f"IDLM-0453.*guidance=1.0 .*cache={cache}"):
        engine.generate([[1]], SamplingParams(max_tokens=4, decoder_options={"guidance": 1.0}))
    params = SamplingParams(max_tokens=4, seed=1, decoder_options={"guidance": 0.0}, ignore_eos=True)
    engine.generate([[1]], params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_mixed_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(10, 33, generator=generator).to(dtype)
    pairs[3] = torch.nan
    guidance = torch.tensor([2.5, 0.0, 0.1, 30.0, 0.0], dtype=torch.float64)
    found = mixed_logits(pairs, guidance)
    first, second = pairs.double()[0::2], pairs.double()[1::2]
    expected = second + (guidance[:, None] + 1) * (first - second)
    is_guided = guidance > 0
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[is_guided].double(), expected[is_guided], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[~is_guided], pairs[0::2][~is_guided].float())


def test_other_ranks_know_the_number_of_canvases(llada: Path) -> None:
    engine = engine_of(llada, {})
    params = SamplingParams(max_tokens=4, seed=1, decoder_options={"guidance": 1.0})
    engine.add_request("a", [1, 2], params)
    schedule = engine.scheduler.next()
    assert schedule is not None
    copied: Schedule = schedule_from_message(step_message(schedule, []), {})
    assert schedule.canvases.num_canvases == copied.canvases.num_canvases == 2
    assert copied.num_rows == [12]
