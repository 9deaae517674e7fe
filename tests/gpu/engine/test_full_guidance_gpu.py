"""Classifier-free guidance of decoder `full` on a CUDA device: the tokens of the slow decoder, which runs two
passes, in fp32, in graphs and without; logits of both canvases in pages and in a planned workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.infer.decoders.full_rows import mixed_logits
from tests.contracts.engines import assert_idle
from tests.contracts.full.canvases import MASK_ID, ORDERS, PROMPTS, engine_of, family, spread
from tests.contracts.full.test_full_guidance import answers_of, cases_of
from tests.numerics import full_reference

__all__ = ["family"]
WAYS: list[dict[str, Any]] = [
    {"graphs": "off"},
    {"graphs": "on", "attention": "triton", "num_inflight_steps": 3},
]


@pytest.mark.parametrize(("family", "options"), spread(ORDERS), indirect=["family"], ids=str)
def test_answers_equal_those_of_the_slow_decoder(family: tuple[str, Path], options: dict[str, Any]) -> None:
    """In batches with requests of another guidance and of none. The second time, all shapes have been
    captured, and pages hold the KV of other canvases."""
    kind, directory = family
    cases = cases_of(kind, options)
    expected = [tokens for _, tokens, _ in cases]
    for way in WAYS:
        engine = engine_of(directory, options, device="cuda", max_num_batched_tokens=100, **way)
        for _ in range(2):
            assert answers_of(engine, cases) == expected, f"{way=}"


@pytest.mark.parametrize("memory", ["caching", "mosaic"])
def test_logits_of_both_canvases_are_those_of_the_reference(family: tuple[str, Path], memory: str) -> None:
    """The first pass, two guided requests of different lengths and one without guidance."""
    kind, directory = family
    tensors = full_reference.random_tensors(kind)
    engine = engine_of(directory, {"order": "random"}, device="cuda", memory=memory, graphs="off")
    runner: Any = engine._parts.runner
    forward, found = runner.forward, []

    def recorded(plan: Any) -> Any:
        wanted = forward(plan)
        if not found:
            found.extend((plan, wanted.head(wanted.hidden_RD[wanted.rows_X])))
        return wanted

    runner.forward = recorded
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    guided = SamplingParams(max_tokens=4, seed=1, ignore_eos=True, decoder_options={"guidance": 2.0})
    settings = [guided, params, guided]
    engine.generate(PROMPTS[1:4], settings)
    plan, logits_XV = found
    guidance_X = torch.tensor([2.0, 0.0, 2.0], dtype=torch.float64, device="cuda").repeat_interleave(4)
    mixed_XV = mixed_logits(logits_XV, guidance_X).cpu()
    assert len(plan.payload.index_X) == len(mixed_XV) == 12
    for number, (prompt, one) in enumerate(zip(PROMPTS[1:4], settings, strict=True)):
        rows = torch.arange(4) + len(prompt) - int(kind == "dream")
        expected = full_reference.logits(kind, tensors, [*prompt, *[MASK_ID] * 4])[rows]
        if one is guided:
            other = full_reference.logits(kind, tensors, [MASK_ID] * (len(prompt) + 4))[rows]
            expected = other + 3.0 * (expected - other)
        difference = (mixed_XV[4 * number : 4 * number + 4] - expected).abs()
        assert difference.max() < 5e-3 * expected.abs().max()
    assert_idle(engine)
