"""Layers that run faster than a host launches their kernels: products of one input computed together, rows
that fill a gated batch up, and which models have CUDA graphs.

Captures need a GPU: tests/gpu/kernels/test_body_graphs_gpu.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from idlm.train.model.graphs import can_capture, filled_up, is_short, replays, share_inputs
from idlm.train.model.load import decoder_layers
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
    assert share_inputs(decoder_layers(together)) == (2 if kind == "full" else 4)
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


@pytest.mark.parametrize("attention", ["idlm_sdpa", "idlm_documents"])
def test_rows_that_fill_a_batch_up_change_nothing(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = batch_of_two(), adapted("qwen3", attention=attention).train()
    truth = gradients(model, batch, "noisy_index", attention)
    shapes: list[tuple[int, int]] = []

    class Running:
        is_running = True

        def __setattr__(self, name: str, value: Any) -> None:
            shapes.append(value)

    monkeypatch.setattr("idlm.train.model.graphs.PARTS", 3)
    model.body_graphs = Running()
    found = gradients(model, batch, "noisy_index", attention)
    assert shapes == [(24, 48)]
    for name, gradient in truth.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


def test_few_shapes_come_up() -> None:
    sizes = {filled_up(num_rows, 65_536) for num_rows in range(1, 65_537, 100)}
    assert max(sizes) == 65_536 and len(sizes) == 32
    assert all(filled_up(num_rows, 10) == num_rows for num_rows in range(10))


@pytest.mark.parametrize(
    ("fields", "adapter", "expected"),
    [
        ({}, None, True),
        ({"attention_dropout": 0.1}, None, False),
        ({}, {"is_gated": True, "mask_row": True}, True),
        ({}, {"is_gated": False, "mask_row": False}, True),
    ],
)
def test_models_whose_body_computes_the_same_each_time(
    fields: dict[str, Any], adapter: dict[str, Any] | None, expected: bool
) -> None:
    if adapter is None:
        model = tiny_model("llama", attention="idlm_split", **fields)
    else:
        model = adapted("llama", attention="idlm_split", **adapter)
    assert can_capture(model) is expected
    model.config._attn_implementation = "idlm_flex"
    assert not can_capture(model)


@pytest.mark.parametrize(
    ("choice", "device", "world_size", "expected"),
    [("auto", "cuda", 1, True), ("auto", "cuda", 2, False), ("on", "cuda", 2, True), ("on", "cpu", 1, False)],
)
def test_models_are_replayed_on_one_gpu(choice: str, device: str, world_size: int, expected: bool) -> None:
    assert replays(choice, torch.device(device), world_size=world_size) is expected
    assert not replays("off", torch.device(device), world_size=world_size)


@pytest.mark.parametrize(
    ("weights", "num_rows", "is_gated", "expected"),
    [
        (3.5e6, 32_768, False, True),
        (15.7e6, 32_768, False, True),
        (15.7e6, 65_536, True, True),
        (60.8e6, 32_768, False, False),
        (101e6, 8192, False, False),
        (192.9e6, 16_384, True, False),
    ],
)
def test_layers_that_a_host_may_launch_too_slowly(
    weights: float, num_rows: int, is_gated: bool, expected: bool
) -> None:
    assert is_short(weights, num_rows=num_rows, is_gated=is_gated) is expected
