"""Decoder `full` answers as the slow one, for every family, order and option, alone and in mixed batches."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.semantics import Semantics
from tests.contracts.engines import assert_idle, build_engine, prompts_of
from tests.contracts.full.slow_canvas import SlowCanvas
from tests.margins import NearTie
from tests.numerics import full_reference
from tests.prefix_simulation import check_pages

FAMILIES = tuple(full_reference.CONFIGS)
MASK_ID, STOP_IDS = 47, (5,)
PROMPTS = prompts_of([1, 7, 12, 3, 9])
LENGTHS = (12, 8, 16, 4, 24)
ORDERS: list[dict[str, Any]] = [
    {"order": "low_confidence"},
    {"order": "low_confidence", "block_length": 4, "steps": 12},
    {"order": "low_confidence", "block_length": 4, "threshold": 0.3},
    {"order": "random", "block_length": 4},
    {"order": "maskgit_plus", "steps": 4},
    {"order": "topk_margin", "steps": 4},
    {"order": "entropy", "steps": 4},
    {"order": "entropy", "steps": 4, "order_temperature": 0.5},
    {"order": "origin", "steps": 4},
    {"order": "low_confidence", "steps": 4, "defer_eos": True},
    {"order": "maskgit_plus", "threshold": 0.4, "forbid_eos": True},
]


def params_of(number: int, seed: int) -> SamplingParams:
    """Greedy, warm, and truncated requests in turn."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.8},
    ]
    return SamplingParams(
        **settings[number % 3], seed=100 * seed + number, max_tokens=LENGTHS[number], ignore_eos=True
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, write_family(request.param, tmp_path_factory.mktemp(request.param))


def write_family(kind: str, directory: Path) -> Path:
    save_file(full_reference.random_tensors(kind), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(full_reference.CONFIGS[kind] | {"dtype": "float32"}))
    meaning = Semantics(
        causality="full",
        logit_shift=kind == "dream",
        mask_token_id=MASK_ID,
        stop_token_ids=STOP_IDS,
    )
    meaning.save(directory)
    return directory


def slow_canvas(kind: str, options: dict[str, Any]) -> SlowCanvas:
    tensors = full_reference.random_tensors(kind)
    return SlowCanvas(
        logits=partial(full_reference.logits, kind, tensors),
        mask_id=MASK_ID,
        shift=kind == "dream",
        stop_ids=STOP_IDS,
        **options,
    )


def expected_of(slow: SlowCanvas, number: int) -> tuple[SamplingParams, tuple[int, ...], int]:
    """The first seed without a near tie, its answer and passes."""
    for seed in range(40):
        params = params_of(number, seed)
        try:
            return params, *slow.answer(PROMPTS[number], params)
        except NearTie:
            continue
    raise AssertionError("every seed has a near tie")


def engine_of(directory: Path, options: dict[str, Any], **settings: Any) -> Engine:
    return build_engine(
        directory, None, **options, **{"max_length": 64, "max_num_batched_tokens": 40, **settings}
    )


def spread(cases: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(family, case): all for the first family, each other one for one more, which changes only the model."""
    others = itertools.cycle(FAMILIES[:0:-1])
    return [(FAMILIES[0], case) for case in cases] + list(zip(others, cases[::2], strict=False))


@pytest.mark.sweep_but(family="llada", options={"order": "maskgit_plus", "steps": 4})
@pytest.mark.sweep_but(family="dream", options={"order": "entropy", "steps": 4})
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
        found = {}
        while engine.has_work:
            for event in engine.step():
                if event.completion is not None:
                    found[event.request_id] = event.completion
            check_pages(engine.pool)
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
        with pytest.raises(UserError, match="IDLM-0470") as caught:
            engine.generate([prompt], params)
        assert words in str(caught.value), str(caught.value)
    engine.generate([[1]], SamplingParams(max_tokens=16, seed=1, ignore_eos=True))


def test_logits_equal_the_reference(family: tuple[str, Path]) -> None:
    """Canvases of different lengths in one pass, no row of which sees another canvas."""
    kind, directory = family
    tensors = full_reference.random_tensors(kind)
    engine = engine_of(directory, {})
    passes: list[tuple[Any, Any]] = []
    runner: Any = engine._parts.runner
    forward = runner.forward

    def recorded(plan: Any) -> Any:
        wanted = forward(plan)
        passes.append((plan, wanted.head(wanted.hidden_RD)))
        return wanted

    runner.forward = recorded
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
