"""R-ISD: with a gated adapter ISD answers as the base does by AR decoding, and clean rows are the base's bit
for bit, whatever the adapter is; the adapter does change what MASK rows say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.models.dense import DenseTrunk
from idlm.infer.runtime.model_runner import Runner
from idlm.infer.state.batch import StepPlan, WantedRows
from tests.adapters import write_adapter
from tests.contracts.engines import (
    CYCLE,
    MASK_ID,
    acceptance_of,
    answers,
    assert_idle,
    build_engine,
    clear_answers,
    greedy,
    prompts_of,
    watch_passes,
    write_foreseeing_toy,
)
from tests.toy import ARCHITECTURES, write_toy_checkpoint

OUTSIDE = 10_000
"""A mask id that the base's embedding has no row for."""


@pytest.fixture(scope="module")
def foreseeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base that foresees by itself, and an adapter small enough to spoil only some of its drafts."""
    home = tmp_path_factory.mktemp("foreseeing")
    base = write_foreseeing_toy(home / "base", num_steps=60)
    return base, write_adapter(home / "adapter", base, mask_token_id=MASK_ID, stride=4, size=0.12)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def random_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp(request.param)
    base = write_toy_checkpoint(home / "base", architecture=request.param)
    adapter = write_adapter(home / "adapter", base, mask_token_id=OUTSIDE, stride=4, has_mask_row=True)
    return base, adapter


@pytest.mark.sweep_but("cold-4")
@pytest.mark.decides
@pytest.mark.parametrize(("strategy", "stride"), [("cold", 4), ("tree", 2), ("branch", 3), ("alternate", 4)])
def test_greedy_answers_are_the_bases(foreseeing: tuple[Path, Path], strategy: str, stride: int) -> None:
    base, adapter = foreseeing
    prompts = prompts_of([1, 2 * stride - 1, 30, 5, 17], vocab_size=CYCLE)
    expected = answers(clear_answers(build_engine(base, "ar"), prompts, greedy(max_tokens=16)))
    engine = build_engine(adapter, "isd", stride=stride, rejection_strategy=strategy)
    completions = engine.generate(prompts, greedy(max_tokens=16))
    assert answers(completions) == expected
    assert 0.1 < acceptance_of(completions) < 0.95, acceptance_of(completions)
    assert_idle(engine)


@pytest.mark.decides
@pytest.mark.parametrize(
    ("random_pair", "strategy"), [("Qwen2", "branch"), ("Llama", "cold")], indirect=["random_pair"]
)
def test_greedy_answers_are_the_bases_in_every_family(random_pair: tuple[Path, Path], strategy: str) -> None:
    base, adapter = random_pair
    prompts = prompts_of([1, 7, 30, 5])
    expected = answers(clear_answers(build_engine(base, "ar"), prompts, greedy(max_tokens=8)))
    engine = build_engine(adapter, "isd", rejection_strategy=strategy)
    assert answers(engine.generate(prompts, greedy(max_tokens=8))) == expected


@pytest.mark.parametrize("random_pair", ["Qwen2"], indirect=True)
def test_ar_decoding_with_an_adapter_is_the_base(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every logit, not only the answers; in bf16 too."""
    base, adapter = random_pair
    for dtype in ("float32", "bfloat16"):
        passes = []
        for path in (base, adapter):
            engine = build_engine(path, "ar", dtype=dtype)
            seen = watch_passes(engine, monkeypatch)
            engine.generate(prompts_of([1, 7, 20]), greedy(max_tokens=6))
            passes.append(seen)
        for (_, expected), (plan, logits) in zip(*passes, strict=True):
            assert torch.equal(logits, expected)
            assert plan.is_mask_R is None


@pytest.mark.sweep_but("Qwen3-cold-float32", "Qwen2-alternate-bfloat16")
@pytest.mark.parametrize(
    ("random_pair", "strategy", "dtype"),
    [
        ("Qwen3", "cold", "float32"),
        ("Qwen2", "alternate", "bfloat16"),
        ("Llama", "tree", "float32"),
        ("Qwen3", "branch", "bfloat16"),
    ],
    indirect=["random_pair"],
)
def test_clean_rows_of_a_pass_are_bitwise_the_bases(
    random_pair: tuple[Path, Path], strategy: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same passes once more, with the adapter taken off: chain rows stay, mask rows do not."""
    engine = build_engine(random_pair[1], "isd", stride=4, rejection_strategy=strategy, dtype=dtype)
    trunk = engine._parts.model.trunk
    plain, num_masks = Runner.forward, 0

    def both(self: Runner, plan: StepPlan) -> WantedRows:
        nonlocal num_masks
        trunk.num_adapters = 0
        within = plan.token_ids_R.masked_fill(plan.is_mask_R, 0)
        base_XV = plain(self, StepPlan(**{**fields_of(plan), "token_ids_R": within})).logits()
        trunk.num_adapters = 1
        wanted = plain(self, plan)
        logits_XV = wanted.logits()
        is_mask_X = plan.is_mask_R[plan.logit_rows_X]
        num_masks += int(is_mask_X.sum())
        assert torch.equal(logits_XV[~is_mask_X], base_XV[~is_mask_X])
        assert not (logits_XV[is_mask_X] == base_XV[is_mask_X]).all(dim=-1).any()
        assert bool((plan.token_ids_R[plan.is_mask_R] == OUTSIDE).all())
        return wanted

    monkeypatch.setattr(Runner, "forward", both)
    engine.generate(prompts_of([1, 7, 20]), greedy(max_tokens=6))
    assert num_masks > 20


def fields_of(plan: StepPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in StepPlan.__dataclass_fields__}


def test_the_mask_id_in_a_prompt_is_text(foreseeing: tuple[Path, Path]) -> None:
    """The gate comes from the plan: a prompt full of mask ids is read by the base alone."""
    base, adapter = foreseeing
    prompts = [[MASK_ID] * 9, [3, MASK_ID, MASK_ID, 5], [MASK_ID]]
    expected = answers(clear_answers(build_engine(base, "ar"), prompts, greedy(max_tokens=12)))
    for strategy in STRATEGIES.names():
        engine = build_engine(adapter, "isd", rejection_strategy=strategy)
        assert answers(engine.generate(prompts, greedy(max_tokens=12))) == expected


@pytest.mark.parametrize("random_pair", ["Qwen3"], indirect=True)
def test_padding_has_no_mask_that_the_embedding_has_no_row_for(random_pair: tuple[Path, Path]) -> None:
    """Passes of static shape, most rows of which are padding."""
    base, adapter = random_pair
    prompts = prompts_of([3, 7, 20])
    expected = answers(clear_answers(build_engine(base, "ar"), prompts, greedy(max_tokens=12)))
    engine = build_engine(adapter, "isd", graphs="on", adaptive=True, num_inflight_steps=2)
    assert answers(engine.generate(prompts, greedy(max_tokens=12))) == expected
    assert_idle(engine)


@pytest.mark.parametrize("random_pair", ["Llama"], indirect=True)
def test_an_adapter_on_all_rows_is_noticed(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power: the known fault, LoRA on clean tokens, changes the answers."""
    base, adapter = random_pair
    prompts = prompts_of([3, 7, 20])
    expected = answers(clear_answers(build_engine(base, "ar"), prompts, greedy(max_tokens=12)))
    plain = DenseTrunk.forward
    monkeypatch.setattr(
        DenseTrunk,
        "forward",
        lambda self, *inputs: plain(self, *inputs[:3], torch.ones_like(inputs[3])),
    )
    assert answers(build_engine(adapter, "isd").generate(prompts, greedy(max_tokens=12))) != expected
