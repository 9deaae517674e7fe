"""`train.base_kl`: the divergence of supervised clean rows from the frozen base, next to a slow one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import TrainingArguments

from idlm.masks import dense_mask
from idlm.train import cli
from idlm.train.base_kl import FrozenBase, NearBase
from idlm.train.check import check_config
from idlm.train.config.schema import AdapterConfig, TrainConfig
from idlm.train.objectives.ar import Autoregressive
from idlm.train.objectives.base import Objective, TermRequest, Terms
from idlm.train.planning.state import state_setup, state_terms
from idlm.train.step import BodyAndHead, TrainingStep
from tests.errors import refused
from tests.integration.training.stopped_runs import assert_same_weights, ctrl_c_after
from tests.integration.training.test_train_tiny import arguments, metrics_of
from tests.tiny_training import (
    batch_of,
    meta_of,
    random_sample,
    stage_of,
    tiny_model,
    tiny_objective,
    write_tiny_base,
)

STAGES = "[{stride: 2, steps: 2}, {stride: 3, steps: 2}]"
KEPT = {"train.stages": STAGES, "train.save_every": 2, "train.base_kl": 2}


def moved(model: Any) -> Any:
    """The model with other weights."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch_for(objective: Objective) -> dict[str, torch.Tensor]:
    samples = [random_sample(seed, prompt=3 + seed, response=6 + seed) for seed in range(2)]
    return batch_of(samples, objective, stage_of(3), padding=3)


def terms_with(
    model: Any, base: FrozenBase, objective: Objective, batch: Any, coefficients: torch.Tensor | None
) -> Terms:
    request = TermRequest(stage=stage_of(3), coefficients=coefficients)
    settings = {"attention": "idlm_sdpa", "autocast": contextlib.nullcontext, "log_every": 1}
    near = NearBase(objective, base, base_kl=1.0)
    given: Any = {"objective": near, "curriculum": None, **settings}
    step = TrainingStep(model, TrainingArguments(), **given)
    return step.forward(model, batch, lambda head, rows_BTD: near.terms(head, rows_BTD, batch, request))


def slow_kl(model: Any, base: Any, batch: Any) -> torch.Tensor:
    """KL(base || model) of each supervised clean row, summed, from all logits of whole passes."""
    meta = meta_of(batch)
    given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    given["attention_mask"] = dense_mask(meta)[:, None]
    log_q, log_p = (each(**given).logits[0, batch["clean_index"]].log_softmax(-1) for each in (model, base))
    return functional.kl_div(log_q, log_p.detach(), log_target=True, reduction="sum")


@pytest.mark.parametrize(
    "objective", [tiny_objective(), Autoregressive(mask_token_id=None, mask_region="all")]
)
def test_value_and_gradients_are_those_of_the_slow_divergence(objective: Objective) -> None:
    base, model = tiny_model("llama"), moved(tiny_model("llama"))
    batch = batch_for(objective)
    weights = torch.tensor([0.3, 0.2, 0.7][-1 - len(objective.term_names) :])
    terms = terms_with(model, FrozenBase(base, torch.float32, "idlm_sdpa"), objective, batch, weights)
    expected = slow_kl(model, base, batch)
    assert terms.loss is not None and float(expected) > 1
    torch.testing.assert_close(terms.sums[-1], expected.detach(), atol=1e-4, rtol=1e-5)
    own = BodyAndHead(model).terms(
        model,
        batch,
        "idlm_sdpa",
        lambda head, rows_BTD: objective.terms(
            head, rows_BTD, batch, TermRequest(stage=stage_of(3), coefficients=weights[:-1])
        ),
    )
    assert own.loss is not None
    torch.testing.assert_close(terms.sums[:-1], own.sums)
    parameters = list(model.parameters())
    found, wanted = (
        torch.autograd.grad(loss, parameters) for loss in (terms.loss, own.loss + weights[-1] * expected)
    )
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        evaluated = terms_with(model, FrozenBase(base, torch.float32, "idlm_sdpa"), objective, batch, None)
    assert evaluated.loss is None
    torch.testing.assert_close(evaluated.sums[-1], expected.detach(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("attention", ["idlm_documents", "idlm_split"])
def test_the_base_has_the_same_rows_by_every_attention(attention: str) -> None:
    batch = batch_for(tiny_objective())
    dense, other = (
        FrozenBase(tiny_model("llama", name), torch.float32, name).rows(batch)[1]
        for name in ("idlm_sdpa", attention)
    )
    assert len(dense) == batch["clean_index"].numel()
    torch.testing.assert_close(other, dense, atol=1e-5, rtol=1e-5)


def test_a_large_weight_pulls_a_model_back_to_the_base() -> None:
    base, model = tiny_model("qwen3"), moved(tiny_model("qwen3"))
    objective, frozen = tiny_objective(), FrozenBase(base, torch.float32, "idlm_sdpa")
    batch, optimizer = batch_for(objective), torch.optim.Adam(model.parameters(), lr=2e-2)
    before = float(slow_kl(model, base, batch))
    for _ in range(25):
        terms = terms_with(model, frozen, objective, batch, torch.tensor([1e-3, 1e-3, 1e3]))
        optimizer.zero_grad()
        assert terms.loss is not None
        terms.loss.backward()
        optimizer.step()
    assert float(slow_kl(model, base, batch)) < before / 10
    assert all(parameter.grad is None for parameter in frozen.model.parameters())


def test_a_run_records_it_and_resumes_bitwise(tmp_path: Path) -> None:
    base = write_tiny_base(tmp_path / "base")
    whole, output = tmp_path / "whole", tmp_path / "out"
    assert cli.main(arguments(base, whole, **KEPT)) == 0
    with ctrl_c_after(2):
        assert cli.main(arguments(base, output, **KEPT)) == 130
    assert cli.main([*arguments(base, output, **KEPT), "resume=auto"]) == 0
    assert metrics_of(output) == metrics_of(whole)
    assert_same_weights(*(path / "model.safetensors" for path in (whole, output)))
    assert "2 x KL from the base" in (whole / "README.md").read_text()
    found = [record["base_kl_loss"] for record in metrics_of(whole)]
    assert found[0] < 1e-6 < min(found[1:]), "the first step begins at the base"
    assert [record["clean_weight"] for record in metrics_of(whole)] == pytest.approx([0.2] * 4)


def test_it_is_refused_where_there_is_nothing_to_stay_at() -> None:
    def problems(**changes: Any) -> str:
        config = TrainConfig(**changes)
        config.train.base_kl = 1.0
        error = refused("IDLM-0504", check_config, config)
        return str(error)

    assert "clean rows are the base's already" in problems(adapter=AdapterConfig())
    assert "objective=block has no rows" in problems(objective="block")
    assert "new weights have no base" in problems()
    sharded = TrainConfig()
    sharded.train.zero_stage = 3
    assert "set train.zero_stage=2" in problems(train=sharded.train)


def test_the_plan_counts_the_copy() -> None:
    config = TrainConfig()
    config.train.base_kl, config.train.zero_stage, config.model.dtype = 1.0, 2, "bfloat16"
    named = {term.name: term.num_bytes for term in state_terms(state_setup(config, world_size=4), 1000, 0)}
    assert named["frozen base (train.base_kl)"] == 2000, "whole on every GPU"
