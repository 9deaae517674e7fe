"""Tiny full-diffusion checkpoints, engines of them, mixed requests and the slow decoder's answers."""

from __future__ import annotations

import dataclasses
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from idlm.semantics import Semantics
from tests.contracts.engines import build_engine, prompts_of
from tests.contracts.full.slow_canvas import SlowCanvas
from tests.margins import NearTie
from tests.numerics import full_reference

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


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("llada", tmp_path_factory.mktemp("llada"))


def write_published(kind: str, directory: Path, **changes: Any) -> Path:
    """A checkpoint as published, with `changes` of its config."""
    directory.mkdir(exist_ok=True)
    save_file(full_reference.random_tensors(kind), directory / "model.safetensors")
    config = full_reference.CONFIGS[kind] | {"dtype": "float32"} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_family(kind: str, directory: Path) -> Path:
    meaning = Semantics(
        causality="full", logit_shift=kind == "dream", mask_token_id=MASK_ID, stop_token_ids=STOP_IDS
    )
    meaning.save(write_published(kind, directory))
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


def watched(engine: Engine) -> list[tuple[Any, Tensor]]:
    """The plan and the logits of all rows [R, V] of every pass from now on."""
    runner: Any = engine._parts.runner
    forward, passes = runner.forward, []

    def watching(plan: Any) -> Any:
        wanted = forward(dataclasses.replace(plan, every_row=True))
        passes.append((plan, wanted.head(wanted.hidden_RD)))
        return wanted

    runner.forward = watching
    return passes


def spread(cases: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(family, case): each case for one family, which changes only the model."""
    return list(zip(itertools.cycle(FAMILIES), cases, strict=False))
