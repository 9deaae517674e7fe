"""FOCUS on a GPU, where the selected rows of a block have gaps, against the CPU, which tests/contracts
compares with a slow reference.

python -m pytest tests/gpu/block/test_focus_gpu.py -m gpu
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.accelerators.test_focus import CASES, PROMPTS, params, toys
from tests.contracts.engines import assert_idle, build_engine, clear_answers

__all__ = ["toys"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
STACKS: list[dict[str, Any]] = [{}, {"mage": {"k": 6, "exact_layers": 1}}]


@pytest.mark.parametrize("others", STACKS, ids=str)
@pytest.mark.parametrize("attention", ["triton", "torch"])
@pytest.mark.parametrize(("shifted", "options", "focus"), CASES, ids=str)
def test_tokens_equal_those_of_a_cpu(
    toys: dict[bool, Path],
    shifted: bool,
    options: dict[str, Any],
    focus: dict[str, Any],
    attention: str,
    others: dict[str, Any],
) -> None:
    options = {**options, "accelerators": {"focus": focus, **others}}
    expected = clear_answers(build_engine(toys[shifted], "block", **options), PROMPTS, params())
    engine = build_engine(toys[shifted], "block", device="cuda", attention=attention, **options)
    found = engine.generate(PROMPTS, params())
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert_idle(engine)
