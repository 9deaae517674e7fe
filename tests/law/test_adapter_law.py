"""Sampling law of R-ISD: with a random gated adapter, responses have the base model's law, enumerated by
transformers.

By default few draws of one case; those of every case, alone and together:

    .venv/bin/python -m pytest tests/law/test_adapter_law.py -m "sweep or not sweep"
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.models.dense import DenseTrunk
from tests.adapters import write_adapter
from tests.law.harness import (
    MASK_ID,
    NEUTRAL,
    NUM_TOKENS,
    PER_REQUEST,
    PROMPT,
    Sampled,
    build_engine,
    fits,
    misfits,
    sample,
)

FULL, REDUCED = 5_000, 3_000
LEVEL = 1e-6 / 64
"""The family's level divided by at least the number of chi-square tests of this file."""
CASES = [*itertools.product((2, 3, 4), STRATEGIES.names())]
SETTINGS = ((PROMPT, NEUTRAL), (PROMPT, replace(NEUTRAL, temperature=0.7, top_p=0.9)))


@pytest.fixture(scope="module")
def adapter(law_toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    return write_adapter(directory, law_toy, mask_token_id=MASK_ID, stride=NUM_TOKENS, size=0.7)


@functools.cache
def _sampled(law_toy: Path, adapter: Path, stride: int, strategy: str, num_draws: int) -> Sampled:
    """Draws that fit the law on their own; cases share no seed."""
    engine = build_engine(adapter, "isd", stride=stride, rejection_strategy=strategy)
    first_round = CASES.index((stride, strategy)) * (FULL // PER_REQUEST)
    sampled = sample(engine, SETTINGS, num_draws, first_round=first_round)
    found = fits(law_toy, sampled)
    assert not misfits(found, LEVEL), found
    assert 0.2 < sampled.acceptance < 0.95, sampled.acceptance
    return sampled


def test_an_adapter_leaves_the_law_of_the_base(law_toy: Path, adapter: Path) -> None:
    _sampled(law_toy, adapter, 4, "branch", REDUCED)


@pytest.mark.sweep
@pytest.mark.parametrize(("stride", "strategy"), CASES)
def test_an_adapter_leaves_the_law_of_the_base_in_full(
    law_toy: Path, adapter: Path, stride: int, strategy: str
) -> None:
    """A mean relative shift of 19 % shows (probability 0.99 at `LEVEL`)."""
    _sampled(law_toy, adapter, stride, strategy, FULL)


@pytest.mark.sweep
def test_cases_together_have_the_law_of_the_base(law_toy: Path, adapter: Path) -> None:
    """A mean relative shift that cases share shows from 7 % on."""
    all_draws = [_sampled(law_toy, adapter, *case, FULL).draws for case in CASES]
    together = {setting: torch.cat([draws[setting] for draws in all_draws]) for setting in SETTINGS}
    found = fits(law_toy, Sampled(draws=together, acceptance=0.0))
    assert not misfits(found, LEVEL), found


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
