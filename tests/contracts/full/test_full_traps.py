"""The traps of full-diffusion checkpoints by number: mistakes that still give fluent text. Each is planted
in the reference, and must show in its logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.full_config import ORDERS, Quota, choose
from idlm.infer.engine import Engine
from idlm.semantics import Semantics
from tests.contracts.engines import prompts_of
from tests.contracts.full.canvases import MASK_ID, engine_of, watched, write_published
from tests.numerics import full_reference
from tests.toy import load_model

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


def test_trap_02_one_model_type_is_two_architectures(tmp_path: Path) -> None:
    assert full_reference.LLADA["model_type"] == full_reference.LLADA_MOE["model_type"]
    specs = [
        load_model(write_published(kind, tmp_path / kind), device="cpu").spec
        for kind in ("llada", "llada_moe")
    ]
    assert [spec.moe is None for spec in specs] == [True, False]


def test_trap_03_a_wrong_shift_is_refused(kind: str, tmp_path: Path) -> None:
    directory = write_published(kind, tmp_path / kind)
    is_shifted = kind == "dream"
    assert load_model(directory, device="cpu").semantics.logit_shift == is_shifted
    Semantics(causality="full", logit_shift=not is_shifted, mask_token_id=MASK_ID).save(directory)
    with pytest.raises(UserError, match="IDLM-0616.*logit_shift"):
        load_model(directory, device="cpu")


def test_trap_04_the_first_place_of_a_shifted_canvas_is_known(tmp_path: Path) -> None:
    """Its prediction would have to come from a row before the canvas."""
    engine = engine_of(write_published("dream", tmp_path / "dream"), {})
    with pytest.raises(UserError, match="IDLM-0410"):
        engine.generate([[]], SamplingParams(max_tokens=4))
    [found] = engine.generate([[3]], SamplingParams(max_tokens=4, temperature=0, seed=1, ignore_eos=True))
    assert len(found.token_ids) == 4


@pytest.mark.parametrize(
    "swapped",
    [("blocks.0.ff_proj", "blocks.0.up_proj"), ("blocks.1.q_proj", "blocks.1.k_proj")],
    ids="-".join,
)
def test_trap_10_parts_of_equal_shape_are_not_swapped(swapped: tuple[str, str], tmp_path: Path) -> None:
    tensors = full_reference.random_tensors("llada")
    ids = [token for token in IDS if token != MASK_ID]
    expected = full_reference.logits("llada", tensors, [*ids, MASK_ID])
    found = engine_logits(engine_of(write_published("llada", tmp_path / "llada"), {}), IDS)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    first, second = (f"model.transformer.{name}.weight" for name in swapped)
    tensors[first], tensors[second] = tensors[second], tensors[first]
    wrong = full_reference.logits("llada", tensors, [*ids, MASK_ID])
    assert (found - wrong).abs().max() > VISIBLE


def test_trap_10_the_head_and_the_ffn_have_one_name_in_two_places(tmp_path: Path) -> None:
    """A loader that looks at the end of names would take a block's `ff_out` for the head."""
    model = load_model(write_published("llada", tmp_path / "llada"), device="cpu")
    tensors = full_reference.random_tensors("llada")
    assert torch.equal(model.trunk.head, tensors["model.transformer.ff_out.weight"])


def test_trap_12_the_router_does_not_normalise(tmp_path: Path) -> None:
    """Whatever the config states: the published code does not read the field."""
    ids = [token for token in IDS if token != MASK_ID]
    tensors = full_reference.random_tensors("llada_moe")
    right = full_reference.logits("llada_moe", tensors, [*ids, MASK_ID])
    for number, message in enumerate((True, False)):
        directory = write_published("llada_moe", tmp_path / str(number), norm_topk_prob=message)
        torch.testing.assert_close(engine_logits(engine_of(directory, {}), IDS), right, atol=1e-4, rtol=0)
    wrong = full_reference.logits("llada_moe", tensors, [*ids, MASK_ID], normalises=True)
    assert (right - wrong).abs().max() > VISIBLE


@pytest.mark.parametrize("order", ORDERS.names())
def test_trap_18_no_quota_reaches_beyond_the_masks(order: str) -> None:
    """Upstream's top-k then writes over tokens that are fixed."""
    is_maskable = torch.tensor([[True, False, True, False], [False, False, False, False]])
    quota = Quota(
        pass_B=torch.tensor([0, 0]),
        num_passes_B=torch.tensor([1, 1]),
        size_B=torch.tensor([4, 4]),
        num_masks_B=is_maskable.sum(-1),
    )
    scores = torch.tensor([[0.1, 9.0, 0.2, 9.0]] * 2, dtype=torch.float64)
    chosen = choose(scores, is_maskable, ORDERS.get(order)().quota(quota) + 2)
    assert torch.equal(chosen, is_maskable)


def test_trap_20_confidence_ignores_the_noise(tmp_path: Path) -> None:
    """At a high temperature the drawn token's own probability decides, not its probability after noise."""
    engine = engine_of(write_published("llada", tmp_path / "llada"), {"order": "low_confidence"})
    seen = []
    choose_masks = engine.decoder._choose  # type: ignore[attr-defined]

    def recorded(table: Any, plan: Any, scores_BW: Tensor, *rest: Any) -> Tensor:
        seen.append((plan, scores_BW[0].tolist()))
        return torch.as_tensor(choose_masks(table, plan, scores_BW, *rest))

    engine.decoder._choose = recorded  # type: ignore[attr-defined]
    [done] = engine.generate([[3, 9]], SamplingParams(max_tokens=3, temperature=4.0, seed=5, ignore_eos=True))
    plan, scores = seen[-1]
    [index] = [index for index, score in enumerate(scores) if score]
    reference = full_reference.logits(
        "llada", full_reference.random_tensors("llada"), plan.token_ids_R.tolist()
    )
    reference[:, MASK_ID] = -torch.inf
    own = reference.double().softmax(-1)[2 + index, done.token_ids[index]]
    assert abs(float(own) - scores[index]) < 1e-4


def test_trap_24_dream_has_its_own_order_and_length(tmp_path: Path) -> None:
    """The library's default order is `origin`, and its config gives Qwen's length."""
    directory = write_published("dream", tmp_path / "dream")
    engine = Engine.from_pretrained(directory, device="cpu", max_num_seqs=1)
    assert (engine.decoder.modes[0].strategy, engine.settings.max_length) == ("entropy", 2048)
    with pytest.warns(UserWarning, match="more than the 2048 tokens"):
        Engine.from_pretrained(directory, device="cpu", max_num_seqs=1, max_length=2049)


def test_trap_27_other_requests_do_not_change_an_answer(kind: str, tmp_path: Path) -> None:
    """Upstream averages the number of masks over the batch."""
    engine = engine_of(write_published(kind, tmp_path / kind), {"steps": 4, "order": "maskgit_plus"})
    params = [SamplingParams(max_tokens=num, seed=num, ignore_eos=True) for num in (4, 12, 24)]
    prompts = prompts_of([5, 2, 9])
    alone = [engine.generate([prompt], one)[0].token_ids for prompt, one in zip(prompts, params, strict=True)]
    assert [done.token_ids for done in engine.generate(prompts, params)] == alone
