"""Layers of one input computed together: the same numbers, names and compilation as one by one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from idlm.train.model.load import decoder_layers
from idlm.train.model.shared_input import share_inputs
from tests.tiny_training import HiddenStates, tiny_model
from tests.unit.training.test_gated_lora import adapted, batch_of_two, gradients


def _model(kind: str, family: str) -> Any:
    if kind == "full":
        return tiny_model(family).train()
    return adapted(family, is_gated=kind == "gated").train()


@pytest.mark.sweep_but("qwen3-gated", "qwen2-full")
@pytest.mark.parametrize("kind", ["full", "gated", "ungated"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_results_and_gradients_are_those_of_layers_one_by_one(family: str, kind: str) -> None:
    model, batch = _model(kind, family), batch_of_two()
    together = copy.deepcopy(model)
    assert share_inputs(decoder_layers(together)) == 2
    assert list(together.state_dict()) == list(model.state_dict())
    expected = gradients(model, batch, "noisy_index")
    found = gradients(together, batch, "noisy_index")
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.sweep
def test_groups_are_compiled_once_for_all_layers() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, batch = _model("full", "llama"), batch_of_two()
    runner = HiddenStates(model)
    expected = runner.hidden(model, batch, "idlm_sdpa")
    share_inputs(decoder_layers(model))
    for layer in decoder_layers(model):
        layer.compile(dynamic=False, backend="aot_eager")
    torch.testing.assert_close(runner.hidden(model, batch, "idlm_sdpa"), expected, rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


def test_a_group_of_unlike_layers_stays_as_it_is() -> None:
    model = tiny_model("llama")
    layer = decoder_layers(model)[0]
    layer.mlp.up_proj = torch.nn.Linear(32, 48, bias=True)
    assert share_inputs(decoder_layers(model)) == 1
    assert type(layer.mlp.gate_proj) is torch.nn.Linear
