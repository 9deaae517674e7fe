"""The stride controller is told of every test whether its drafts were from masks, as the device knows it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.infer.decoders import isd
from idlm.infer.runtime.stride_controller import StepLoad
from tests.contracts.engines import build_engine, prompts_of, write_converted_toy


@pytest.mark.sweep_but("3-False")
@pytest.mark.parametrize(("num_inflight_steps", "fails"), [(0, False), (3, False), (0, True)])
def test_drafts_from_verification_rows_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_inflight_steps: int, fails: bool
) -> None:
    """Modes change at random; draws are rejected often. A pass that fails takes the drafts with it."""
    engine = build_engine(
        write_converted_toy(tmp_path), "isd", stride=4, adaptive=True, num_inflight_steps=num_inflight_steps
    )
    controller, rng, real = engine._stride_controller, random.Random(3), isd.verify
    assert controller is not None
    known: list[bool] = []
    shown: list[bool] = []
    num_failures = 2 if fails else 0

    def verify(probs: Any, store: Any, tables: Any, *, layout_Z: torch.Tensor, **columns: Any) -> Any:
        buffer_B = layout_Z[columns["lanes_B"]].clone()
        verdict = real(probs, store, tables, layout_Z=layout_Z, **columns)
        known.extend((buffer_B[verdict.tested_B > 0] <= engine.decoder.num_masks).tolist())
        return verdict

    def observe(num_accepted: int, num_tested: int, *, from_masks: bool) -> None:
        shown.extend([from_masks] * (num_tested > 0))

    def choose(load: StepLoad) -> int:
        nonlocal num_failures
        if num_failures and engine.scheduler.running[0].has_other_drafts:
            num_failures -= 1
            raise torch.OutOfMemoryError("injected")
        return rng.randrange(len(engine.decoder.modes))

    monkeypatch.setattr(isd, "verify", verify)
    monkeypatch.setattr(controller, "observe_drafts", observe)
    monkeypatch.setattr(controller, "choose", choose)
    params = SamplingParams(temperature=1.0, max_tokens=120, ignore_eos=True, seed=0)
    engine.generate(prompts_of([5], vocab_size=50), params)
    assert shown == known[: len(shown)] and len(known) - len(shown) <= num_inflight_steps
    assert not num_failures
    assert len(shown) > 60 and shown.count(False) > 5
