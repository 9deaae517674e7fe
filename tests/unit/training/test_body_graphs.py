"""What surrounds the CUDA graphs of a model's body: rows that fill a batch up, and which models have graphs.

Captures need a GPU: tests/gpu/kernels/test_body_graphs_gpu.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from idlm.train.model.graphs import can_capture, filled_up, is_short
from tests.tiny_training import tiny_model
from tests.unit.training.test_gated_lora import adapted, batch_of_two, gradients


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


def test_an_embedding_that_gets_rows_past_its_arguments_has_no_graph() -> None:
    fields = {"tie_word_embeddings": False}
    model = adapted("llama", attention="idlm_split", is_gated=False, mask_row=True, **fields)
    assert not can_capture(model)


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
