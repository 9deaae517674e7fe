"""The sampling law of whole responses when sequences share and copy pages of two tokens, with three
asynchronous steps.

Prompts and answers with a common prefix share it through the prefix cache. More strategies, more draws:
`.venv/bin/python -m pytest tests/law/test_shared_prefix_law.py -m "sweep or not sweep"`"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.law.harness import NEUTRAL, assert_fits, build_engine, sample
from tests.prefix_simulation import check_pages

LEVEL = 1e-6 / 16
"""The family's level divided by at least the number of chi-square tests of this file."""
PROMPT = (0, 3, 1)
SETTINGS = [(PROMPT, NEUTRAL), (PROMPT, replace(NEUTRAL, temperature=0.6, top_k=4))]


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(("strategy", "num_draws"), [("branch", 2_000), ("tree", 6_000)])
def test_isd_emits_the_ar_law_from_shared_pages(law_toy: Path, strategy: str, num_draws: int) -> None:
    """A mean relative shift of 17 % shows in 6,000 draws (probability 0.99 at `LEVEL`)."""
    engine = build_engine(
        law_toy,
        "isd",
        stride=4,
        rejection_strategy=strategy,
        num_lanes=256,
        page_size=2,
        num_inflight_steps=3,
    )
    sampled = sample(engine, SETTINGS, num_draws, per_request=50)
    found = assert_fits(law_toy, sampled, LEVEL)
    assert len(found) == 2 * len(SETTINGS)
    assert engine.pool.cache is not None
    assert engine.pool.cache.counts.num_hit_tokens > num_draws
    check_pages(engine.pool)
    assert engine.pool.num_free == engine.pool.num_pages
