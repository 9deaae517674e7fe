"""Sampling law of R-ISD: with a random gated adapter, responses have the base model's law, enumerated by
transformers.

By default stride 4 with every strategy and few draws; all strides at 4e4 draws:

    .venv/bin/python -m pytest tests/law/test_adapter_law.py -m "sweep or not sweep"
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.quality.law_harness import (
    MASK_ID,
    NEUTRAL,
    NUM_TOKENS,
    PROMPT,
    build_engine,
    fits,
    misfits,
    sample,
)
from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.models.dense import DenseTrunk
from tests.adapters import write_adapter

FULL, REDUCED = 40_000, 3_000
LEVEL = 1e-6 / 48
SETTINGS = ((PROMPT, NEUTRAL), (PROMPT, replace(NEUTRAL, temperature=0.7, top_p=0.9)))


@pytest.fixture(scope="module")
def adapter(law_toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    return write_adapter(directory, law_toy, mask_token_id=MASK_ID, stride=NUM_TOKENS, size=0.7)


def _check(law_toy: Path, adapter: Path, stride: int, strategy: str, num_draws: int) -> None:
    engine = build_engine(adapter, "isd", stride=stride, rejection_strategy=strategy)
    sampled = sample(engine, SETTINGS, num_draws)
    found = fits(law_toy, sampled)
    assert not misfits(found, LEVEL), found
    assert 0.2 < sampled.acceptance < 0.95, sampled.acceptance


@pytest.mark.sweep_but("branch")
@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_an_adapter_leaves_the_law_of_the_base(law_toy: Path, adapter: Path, strategy: str) -> None:
    _check(law_toy, adapter, 4, strategy, REDUCED)


@pytest.mark.sweep
@pytest.mark.parametrize(("stride", "strategy"), list(itertools.product((2, 3, 4), STRATEGIES.names())))
def test_an_adapter_leaves_the_law_of_the_base_in_full(
    law_toy: Path, adapter: Path, stride: int, strategy: str
) -> None:
    _check(law_toy, adapter, stride, strategy, FULL)


@pytest.mark.sweep
def test_an_adapter_on_clean_rows_is_seen(
    law_toy: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power of the test: without the gate the same check fails."""
    plain = DenseTrunk._gate
    monkeypatch.setattr(DenseTrunk, "_gate", lambda self, is_mask_R: plain(self, torch.ones_like(is_mask_R)))
    sampled = sample(build_engine(adapter, "isd", stride=4), SETTINGS[:1], 5_000)
    assert len(misfits(fits(law_toy, sampled), LEVEL)) == 2
