"""Sampling law of R-ISD: with a random gated adapter, responses have the base model's law, enumerated by
transformers.

By default few draws of one case; more draws of others:

    .venv/bin/python -m pytest tests/law/test_adapter_law.py -m "sweep or not sweep"
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from idlm.infer.models.dense import DenseTrunk
from tests.adapters import write_adapter
from tests.law.harness import (
    MASK_ID,
    NEUTRAL,
    NUM_TOKENS,
    PROMPT,
    assert_fits,
    build_engine,
    fits,
    misfits,
    sample,
)

LEVEL = 1e-6 / 64
"""The family's level divided by at least the number of chi-square tests of this file."""
SETTINGS = ((PROMPT, NEUTRAL), (PROMPT, replace(NEUTRAL, temperature=0.7, top_p=0.9)))


@pytest.fixture(scope="module")
def adapter(law_toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    return write_adapter(directory, law_toy, mask_token_id=MASK_ID, stride=NUM_TOKENS, size=0.7)


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(
    ("stride", "strategy", "num_draws"), [(4, "branch", 3_000), (2, "cold", 5_000), (3, "tree", 5_000)]
)
def test_an_adapter_leaves_the_law_of_the_base(
    law_toy: Path, adapter: Path, stride: int, strategy: str, num_draws: int
) -> None:
    """A mean relative shift of 19 % shows in 5,000 draws (probability 0.99 at `LEVEL`). Clean rows
    are those of the base bit for bit (tests/contracts/adapters/test_gated_engine.py)."""
    engine = build_engine(adapter, "isd", stride=stride, rejection_strategy=strategy)
    sampled = sample(engine, SETTINGS, num_draws)
    assert_fits(law_toy, sampled, LEVEL)
    assert 0.2 < sampled.acceptance < 0.95, sampled.acceptance


@pytest.mark.sweep_but("tree")
@pytest.mark.parametrize("strategy", ["tree", "branch", "alternate"])
def test_requests_of_two_adapters_in_one_batch_have_the_law_of_the_base(
    law_toy: Path, adapter: Path, tmp_path: Path, strategy: str
) -> None:
    """Each draft is tested by the q that its own adapter gave it."""
    shape = {"mask_token_id": MASK_ID, "stride": NUM_TOKENS, "seed": 1, "rank": 5}
    other = write_adapter(tmp_path / "other", law_toy, size=0.9, **shape)
    engine = build_engine(adapter, "isd", stride=3, rejection_strategy=strategy, adapters={"b": str(other)})
    settings = (SETTINGS[0], (PROMPT, replace(SETTINGS[1][1], adapter="b")))
    sampled = sample(engine, settings, 5_000)
    assert_fits(law_toy, sampled, LEVEL)
    assert 0.2 < sampled.acceptance < 0.95, sampled.acceptance


@pytest.mark.sweep
def test_an_adapter_on_clean_rows_is_seen(
    law_toy: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power of the test: without the gate the same check fails."""
    plain = DenseTrunk.forward
    monkeypatch.setattr(
        DenseTrunk,
        "forward",
        lambda self, *inputs: plain(self, *inputs[:3], torch.ones_like(inputs[3])),
    )
    sampled = sample(build_engine(adapter, "isd", stride=4), SETTINGS[:1], 5_000)
    assert len(misfits(fits(law_toy, sampled), LEVEL)) == 2
