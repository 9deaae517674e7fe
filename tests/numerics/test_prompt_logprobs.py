"""Log-probabilities of prompts are the log-softmax of the reference model, however the prompt is computed.

V vocabulary, L tokens of the prompt."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.contracts import SamplingParams, TokenLogprob
from idlm.errors import UserError
from idlm.infer.decoders.base import KVWritePolicy
from idlm.infer.engine import Engine
from idlm.infer.request import Request
from idlm.infer.runtime import logprobs
from idlm.infer.scheduler import Scheduler
from idlm.infer.state.batch import WantedRows
from tests.contracts.engines import CYCLE, MASK_ID, assert_idle, build_engine, clear_answers, prompts_of
from tests.numerics.test_model_parity import save_reference

TOLERANCE = 1e-4
DECODERS: list[tuple[str, dict[str, Any]]] = [("ar", {}), ("isd", {"stride": 3, "mask_token_id": MASK_ID})]
FAMILIES = ("qwen3", "qwen2", "llama-llama3", "mistral", "qwen3-moe")
WAYS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 64},
    {"max_num_batched_tokens": 1},
    {"max_num_batched_tokens": 7, "graphs": "on", "num_inflight_steps": 3},
    {"prefix_cache": False},
]
SCORED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
PROMPTS = prompts_of([41, 1, 2, 18, 33], vocab_size=CYCLE)


@pytest.fixture(scope="module")
def tables(foreseeing: Path) -> list[Tensor]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(foreseeing).float().eval()
    return [_table(model, prompt) for prompt in PROMPTS]


def _table(model: Any, prompt: list[int]) -> Tensor:
    """Log-probabilities [L, V] of what follows each token of a prompt."""
    with torch.inference_mode():
        logits_LV: Tensor = model(torch.tensor([prompt])).logits[0].double()
    return logits_LV.log_softmax(-1)


def _check(
    found: tuple[TokenLogprob | None, ...] | None, prompt: list[int], table_LV: Tensor, *, num_top: int = 2
) -> None:
    assert found is not None
    first, *others = found
    assert first is None and [each.token_id for each in others if each] == prompt[1:]
    for row_V, entry in zip(table_LV, others, strict=False):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(row_V[entry.token_id]), abs=TOLERANCE)
        values = row_V.topk(num_top).values.tolist()
        assert list(entry.top.values()) == pytest.approx(values, abs=TOLERANCE)
        assert row_V[list(entry.top)].tolist() == pytest.approx(values, abs=TOLERANCE)


@pytest.mark.sweep_but(family="qwen3")
@pytest.mark.sweep_but(family="qwen2")
@pytest.mark.parametrize(
    ("family", "decoder", "options"),
    [(family, *one) for family, one in zip(FAMILIES, itertools.cycle(DECODERS), strict=False)],
    ids=str,
)
def test_they_are_those_of_the_reference_model(
    tmp_path: Path, family: str, decoder: str, options: dict[str, Any]
) -> None:
    reference = save_reference(family, tmp_path)
    engine = build_engine(tmp_path, decoder, max_num_batched_tokens=9, **options)
    params = [dataclasses.replace(SCORED, prompt_logprobs=number) for number in (0, 1, 5, None, 97)]
    for prompt, one, done in zip(PROMPTS, params, engine.generate(PROMPTS, params), strict=True):
        if one.prompt_logprobs is None:
            assert done.prompt_logprobs is None
        else:
            table_LV = _table(reference, prompt)
            _check(done.prompt_logprobs, prompt, table_LV, num_top=one.prompt_logprobs)


@pytest.mark.sweep_but(1)
@pytest.mark.decides
@pytest.mark.parametrize(
    ("decoder", "options", "way"), [(*DECODERS[n % 2], way) for n, way in enumerate(WAYS)], ids=str
)
def test_chunks_static_shapes_and_cached_pages_change_nothing(
    foreseeing: Path,
    tables: list[Tensor],
    decoder: str,
    options: dict[str, Any],
    way: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprobs, "ROWS_AT_ONCE", 5)
    plain = dataclasses.replace(SCORED, prompt_logprobs=None)
    expected = clear_answers(build_engine(foreseeing, decoder, **options), PROMPTS, plain)
    engine = build_engine(foreseeing, decoder, **options, **way)
    engine.generate(PROMPTS, plain)
    for again in range(2):
        found = engine.generate(PROMPTS, SCORED)
        assert [done.token_ids for done in found] == [done.token_ids for done in expected]
        for prompt, table_LV, done in zip(PROMPTS, tables, found, strict=True):
            _check(done.prompt_logprobs, prompt, table_LV)
            assert done.num_cached_tokens == 0, again
    assert_idle(engine)
    if engine.pool.cache is not None:
        assert engine.generate(PROMPTS[:1], plain)[0].num_cached_tokens > 30, "others still share its pages"


def test_a_preempted_prompt_is_scored_whole(
    foreseeing: Path, tables: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[tuple[int, int]] = []
    forget = Scheduler._forget

    def noted(self: Scheduler, request: Request) -> None:
        preempted.append((len(request.prompt_logprobs), request.num_unscored))
        forget(self, request)

    monkeypatch.setattr(Scheduler, "_forget", noted)
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for num_inflight in (0, 3):
        options: dict[str, Any] = {"max_num_batched_tokens": 2, "num_inflight_steps": num_inflight}
        engine = build_engine(foreseeing, "ar", num_pages=13, **options)
        found = engine.generate([PROMPTS[1], *PROMPTS], [long, *[SCORED] * len(PROMPTS)])
        for prompt, table_LV, done in zip(PROMPTS, tables, found[1:], strict=True):
            _check(done.prompt_logprobs, prompt, table_LV)
        assert_idle(engine)
    assert sum(known > 0 and unknown > 0 for known, unknown in preempted) > 1, preempted


def test_a_pass_that_fails_is_scored_again(
    foreseeing: Path, tables: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(foreseeing, "ar", max_num_batched_tokens=4, num_inflight_steps=2)
    launch, num_launched = engine._worker.launch, 0

    def launches(schedule: Any) -> Any:
        nonlocal num_launched
        num_launched += 1
        if num_launched in (3, 6, 11):
            raise torch.OutOfMemoryError
        return launch(schedule)

    monkeypatch.setattr(engine._worker, "launch", launches)
    for prompt, table_LV, done in zip(PROMPTS, tables, engine.generate(PROMPTS, SCORED), strict=True):
        _check(done.prompt_logprobs, prompt, table_LV)
    assert num_launched > 11
    assert_idle(engine)


@pytest.mark.parametrize(("decoder", "options"), DECODERS, ids=str)
def test_only_rows_that_are_asked_for_go_through_the_head(
    foreseeing: Path, decoder: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, logits_of = build_engine(foreseeing, decoder, prefix_cache=False, **options), WantedRows.logits_of
    num_rows: list[int] = []

    def counted(self: WantedRows, rows_Y: Tensor) -> Tensor:
        num_rows.append(len(rows_Y))
        return logits_of(self, rows_Y)

    monkeypatch.setattr(WantedRows, "logits_of", counted)
    totals = []
    for number in (None, 0):
        num_rows.clear()
        found = engine.generate(PROMPTS[:1] * 2, dataclasses.replace(SCORED, prompt_logprobs=number, n=3))
        totals.append(sum(num_rows))
    assert totals[1] - totals[0] == 2 * (len(PROMPTS[0]) - 1)
    assert [done.prompt_logprobs is not None for done in found] == [True, False, False] * 2


def test_an_answer_of_no_tokens(foreseeing: Path, tables: list[Tensor]) -> None:
    for options in ({}, {"graphs": "on", "num_inflight_steps": 4}):
        engine = build_engine(foreseeing, "isd", stride=4, **options)
        none = dataclasses.replace(SCORED, max_tokens=0)
        longest = [*PROMPTS[0], *PROMPTS[4]] * 2
        prompt = longest[: engine.table.max_length - 1]
        [done, _] = engine.generate([PROMPTS[0], prompt], none)
        assert (done.token_ids, done.text, done.finish_reason) == ((), "", "length")
        _check(done.prompt_logprobs, PROMPTS[0], tables[0])
        [event] = engine.stream(PROMPTS[0], none)
        assert event.completion is not None and event.prompt_logprobs == event.completion.prompt_logprobs
        first, *others = engine.stream(PROMPTS[0], SCORED)
        _check(first.prompt_logprobs, PROMPTS[0], tables[0])
        assert all(event.prompt_logprobs is None for event in others)
        assert_idle(engine)


def test_what_cannot_be_scored_is_refused(foreseeing: Path) -> None:
    for kind in ("block", "none"):
        with pytest.raises(UserError, match=r"IDLM-0449.*prompt_logprobs"):
            KVWritePolicy(kind=kind).check(SCORED)  # type: ignore[arg-type]
    for wrong in ({"max_tokens": 0}, {"prompt_logprobs": -1}, {"prompt_logprobs": True}):
        with pytest.raises(UserError, match="IDLM-0401"):
            SamplingParams(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"IDLM-0411.*prompt_logprobs=49"):
        build_engine(foreseeing, "ar").generate([[1]], SamplingParams(prompt_logprobs=49))


def test_an_aborted_request_has_what_was_computed(foreseeing: Path, tables: list[Tensor]) -> None:
    engine: Engine = build_engine(foreseeing, "ar", max_num_batched_tokens=4, num_inflight_steps=0)
    engine.add_request("a", PROMPTS[0], SCORED)
    for _ in range(3):
        engine.step()
    [done] = engine.abort("a")
    assert done.prompt_logprobs is not None and 10 < len(done.prompt_logprobs) < 20
    _check(done.prompt_logprobs, PROMPTS[0][: len(done.prompt_logprobs)], tables[0])
