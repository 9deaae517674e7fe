"""The traps of full-diffusion checkpoints by number: mistakes that still give fluent text. Each is planted
in the reference, and must show in its logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from tests.contracts.full.canvases import MASK_ID, engine_of, watched, write_published
from tests.errors import refused
from tests.numerics import full_reference

IDS = [3, 9, 1, MASK_ID, MASK_ID, 20]
VISIBLE = 1e-2
"""A planted mistake changes some logit by this much, or the comparison would prove nothing."""


def engine_logits(engine: Engine, ids: list[int]) -> Tensor:
    """Logits [L, V] of a canvas of these known tokens and one more position to decide."""
    passes = watched(engine)
    engine.add_request(
        "a", [token for token in ids if token != MASK_ID], SamplingParams(max_tokens=1, seed=1)
    )
    engine.step()
    engine.abort("a")
    [(_, logits_RV)] = passes
    return logits_RV


@pytest.fixture(scope="module", params=["llada", "dream", "llada_moe"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_first_place_of_a_shifted_canvas_is_known(tmp_path: Path) -> None:
    """Its prediction would have to come from a row before the canvas."""
    engine = engine_of(write_published("dream", tmp_path / "dream"), {})
    refused("IDLM-0410", engine.generate, [[]], SamplingParams(max_tokens=4))
    [found] = engine.generate([[3]], SamplingParams(max_tokens=4, temperature=0, seed=1, ignore_eos=True))
    assert len(found.token_ids) == 4


def test_the_router_does_not_normalise(tmp_path: Path) -> None:
    """Whatever the config states: the published code does not read the field."""
    ids = [token for token in IDS if token != MASK_ID]
    tensors = full_reference.random_tensors("llada_moe")
    right = full_reference.logits("llada_moe", tensors, [*ids, MASK_ID])
    for number, message in enumerate((True, False)):
        directory = write_published("llada_moe", tmp_path / str(number), norm_topk_prob=message)
        torch.testing.assert_close(engine_logits(engine_of(directory, {}), IDS), right, atol=1e-4, rtol=0)
    wrong = full_reference.logits("llada_moe", tensors, [*ids, MASK_ID], normalises=True)
    assert (right - wrong).abs().max() > VISIBLE


def test_dream_has_its_own_order_and_length(tmp_path: Path) -> None:
    """The library's default order is `origin`, and its config gives Qwen's length."""
    directory = write_published("dream", tmp_path / "dream")
    engine = Engine.from_pretrained(directory, device="cpu", max_num_seqs=1)
    assert (engine.decoder.modes[0].strategy, engine.settings.max_length) == ("entropy", 2048)
    with pytest.warns(UserWarning, match="more than the 2048 tokens"):
        Engine.from_pretrained(directory, device="cpu", max_num_seqs=1, max_length=2049)
