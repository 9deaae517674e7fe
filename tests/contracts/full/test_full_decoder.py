"""Decoder `full` answers as the slow one, for every family, order and option, alone and in mixed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.engine import Engine
from tests.contracts.engines import Shortage, assert_idle, drain
from tests.contracts.full.canvases import (
    MASK_ID,
    ORDERS,
    PROMPTS,
    engine_of,
    expected_of,
    params_of,
    slow_canvas,
    spread,
    watched,
)
from tests.errors import refused
from tests.numerics import full_reference


@pytest.mark.sweep_but(family="dream", options={"order": "maskgit_plus", "steps": 4})
@pytest.mark.sweep_but(family="llada", options={"order": "entropy", "steps": 4})
@pytest.mark.parametrize(("family", "options"), spread(ORDERS), indirect=["family"], ids=str)
def test_it_equals_the_slow_decoder(family: tuple[str, Path], options: dict[str, Any]) -> None:
    """Mixed lengths, temperatures and truncations in one batch, in dynamic and in static shapes."""
    kind, directory = family
    slow = slow_canvas(kind, options)
    cases = [expected_of(slow, number) for number in range(len(PROMPTS))]
    for static in ("off", "on"):
        engine = engine_of(directory, options, graphs=static)
        assert engine.decoder.name == "full"
        for number, (params, _, _) in enumerate(cases):
            engine.add_request(str(number), PROMPTS[number], params)
        found = drain(engine)
        for number, (_, tokens, num_passes) in enumerate(cases):
            assert found[str(number)].token_ids == tokens, f"{number=} {static=}"
            assert found[str(number)].num_forwards == num_passes
        assert_idle(engine)


def test_canvases_that_cannot_be_divided_are_refused(family: tuple[str, Path]) -> None:
    _, directory = family
    engine = engine_of(directory, {"block_length": 4, "steps": 4, "order": "low_confidence"})
    for prompt, params, words in [
        ([1], SamplingParams(max_tokens=6), "max_tokens=4 or 8"),
        ([1], SamplingParams(max_tokens=12), "decoder.steps=3"),
        ([1], SamplingParams(max_tokens=64), "max_tokens=60"),
        ([1, MASK_ID], SamplingParams(max_tokens=4), "the mask"),
    ]:
        error = refused("IDLM-0470", engine.generate, [prompt], params)
        assert words in str(error), str(error)
    engine.generate([[1]], SamplingParams(max_tokens=16, seed=1, ignore_eos=True))


def test_logits_equal_the_reference(family: tuple[str, Path]) -> None:
    """Canvases of different lengths in one pass, no row of which sees another canvas."""
    kind, directory = family
    tensors = full_reference.random_tensors(kind)
    engine = engine_of(directory, {})
    passes = watched(engine)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params_of(number, 1))
    engine.step()
    [(plan, logits_RV)] = passes
    ends = plan.cu_rows_B1.tolist()
    assert len(ends) > 2
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        expected = full_reference.logits(kind, tensors, plan.token_ids_R[start:end].tolist())
        assert (logits_RV[start:end] - expected).abs().max() < 1e-4


def test_a_canvas_beyond_the_trained_length_runs_with_a_warning(family: tuple[str, Path]) -> None:
    kind, directory = family
    trained = 2048 if kind == "dream" else 64
    with pytest.warns(UserWarning, match=f"more than the {trained} tokens"):
        engine = Engine.from_pretrained(
            directory, steps=1, max_length=trained + 40, max_num_seqs=1, device="cpu"
        )
    [found] = engine.generate([[1] * (trained - 8)], SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    assert len(found.token_ids) == 40


@pytest.mark.parametrize("number", [1, 81, 161])
def test_a_pass_that_runs_out_of_memory_and_aborts_change_no_answer(llada: Path, number: int) -> None:
    """All requests lose lanes and pages, and their canvases begin anew."""
    options = {"order": "low_confidence", "block_length": 4}
    cases = [expected_of(slow_canvas("llada", options), which) for which in range(len(PROMPTS))]
    engine = engine_of(llada, options, max_num_seqs=4, num_pages=24, max_num_batched_tokens=200)
    for name, (params, _, _) in enumerate(cases):
        engine.add_request(str(name), PROMPTS[name], params)
    events = engine.step()
    with Shortage("cpu", {number}) as shortage:
        events += engine.step()
        assert shortage.is_over
    assert [done.finish_reason for done in engine.abort("1")] == ["abort"]
    found = {event.request_id: event.completion.token_ids for event in events if event.completion}
    found |= {name: done.token_ids for name, done in drain(engine).items()}
    assert found == {str(name): tokens for name, (_, tokens, _) in enumerate(cases) if name != 1}
    assert_idle(engine)


def test_a_stop_token_ends_the_answer(llada: Path) -> None:
    options = {"order": "low_confidence", "block_length": 4}
    params = SamplingParams(temperature=0, seed=2, max_tokens=16, ignore_eos=True)
    [whole] = engine_of(llada, options).generate([PROMPTS[2]], params)
    stop = whole.token_ids[6]
    params = SamplingParams(temperature=0, seed=2, max_tokens=16, stop_token_ids=(stop,))
    [found] = engine_of(llada, options).generate([PROMPTS[2]], params)
    assert found.finish_reason == "stop"
    assert found.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


def test_what_it_cannot_do_is_refused(llada: Path) -> None:
    engine = engine_of(llada, {})
    for wrong, code in (({"logprobs": 1}, "IDLM-0449"), ({"tau": 0.1}, "IDLM-0455")):
        with pytest.raises(UserError, match=code):
            engine.generate([[1]], SamplingParams(max_tokens=4, **wrong))  # type: ignore[arg-type]
