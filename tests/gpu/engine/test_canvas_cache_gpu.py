"""The caches of decoder `full` on a CUDA device: the answers of the slow decoder, in graphs and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.engines import assert_idle
from tests.contracts.full.canvases import PROMPTS, engine_of, expected_of, family, slow_canvas, spread
from tests.contracts.full.test_canvas_cache import CASES, found_by

__all__ = ["family"]
WAYS: list[dict[str, Any]] = [
    {"graphs": "off"},
    {"graphs": "on", "attention": "triton"},
    {"graphs": "on", "attention": "triton", "num_inflight_steps": 3},
]


@pytest.mark.parametrize(("family", "options"), spread(CASES), indirect=["family"], ids=str)
def test_answers_equal_those_of_the_slow_decoder(family: tuple[str, Path], options: dict[str, Any]) -> None:
    """In mixed batches. Passes of a cache are not launched ahead by default."""
    kind, directory = family
    slow = slow_canvas(kind, options)
    cases = [expected_of(slow, number) for number in range(len(PROMPTS))]
    for way in WAYS:
        engine = engine_of(directory, options, device="cuda", **way)
        assert engine.settings.num_inflight_steps == way.get("num_inflight_steps", 0)
        for _ in range(2):
            # The second time, all shapes have been captured, and pages hold the KV of other sequences.
            answers = [found.token_ids for found in found_by(engine, cases)]
            assert answers == [tokens for _, tokens, _ in cases], f"{way=}"
        assert_idle(engine)
