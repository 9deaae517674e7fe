"""Random ids in place of masks on a GPU: replayed graphs feed new ones, and the law is that of AR."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.step_rows import Noise
from tests.adapters import write_adapter
from tests.contracts.engines import CYCLE, MASK_ID, build_engine, prompts_of
from tests.law import harness
from tests.toy import write_toy_checkpoint

LEVEL = 1e-6 / 32
DRAWS = 20_000
PROMPTS = prompts_of([13, 8, 1, 5, 9, 12, 4, 17], vocab_size=CYCLE)
PARAMS = [SamplingParams(max_tokens=24, seed=number) for number in range(8)]


def _drawn(adapter: Path, **options: Any) -> list[tuple[Any, ...]]:
    engine = build_engine(adapter, "isd", stride=4, rejection_strategy="branch", **options)
    found = engine.generate(PROMPTS, PARAMS)
    return [(one.token_ids, one.tested_by_position, one.accepted_by_position) for one in found]


def test_replayed_graphs_feed_new_ids(
    tmp_path: Path, on_the_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are those without graphs, and would be others with the same ids in every step."""
    base = write_toy_checkpoint(tmp_path / "base")
    adapter = write_adapter(
        tmp_path / "adapter", base, mask_token_id=None, noise_range=(3, MASK_ID), stride=4, size=0.2
    )
    expected = _drawn(adapter, graphs="off", prefix_cache=False)
    assert _drawn(adapter) == expected
    assert _drawn(adapter, max_num_seqs=3) == expected

    def frozen(self: SequenceState, low: int, high: int) -> Noise:
        return Noise(self.seeds_Z, self.samples_Z, torch.zeros_like(self.steps_Z), low, high)

    monkeypatch.setattr(SequenceState, "noise", frozen)
    assert _drawn(adapter) != expected


@pytest.mark.parametrize(
    ("strategy", "stride"), [("cold", 4), ("tree", 3), ("branch", 4), ("alternate", 4), ("branch_2", 8)]
)
def test_joint_draws_have_the_ar_law(tmp_path: Path, strategy: str, stride: int) -> None:
    """R-ISD, drawn with two settings in one batch."""
    base = harness.write_law_toy(tmp_path / "toy")
    settings = ((harness.PROMPT, harness.NEUTRAL), (harness.PROMPT, replace(harness.NEUTRAL, top_p=0.9)))
    given = {"noise_range": (0, harness.VOCAB), "stride": harness.NUM_TOKENS, "size": 0.7}
    adapter = write_adapter(tmp_path / "adapter", base, mask_token_id=None, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"stride": stride, "rejection_strategy": strategy, "device": "cuda"}
        engine = harness.build_engine(adapter, "isd", num_lanes=512, **options)
    sampled = harness.sample(engine, settings, DRAWS, per_request=1000)
    assert 0.2 < sampled.acceptance < 0.95, sampled.acceptance
    assert not harness.misfits(harness.fits(base, sampled), LEVEL)
