"""Compiled decoder layers: the same numbers, one compilation for all layers and all packings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from idlm.train.config.schema import LoopConfig, ModelConfig, TrainConfig
from idlm.train.model.attention import register_attention
from idlm.train.model.load import compile_layers, compiles, decoder_layers
from tests.errors import refused
from tests.tiny_training import HiddenStates
from tests.unit.training.test_gated_lora import adapted, batch_of_two, gradients

ROWS = 24
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def _model(model_type: str) -> Any:
    register_attention()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="idlm_sdpa")


def _batch(document_rows: int) -> dict[str, torch.Tensor]:
    order = torch.arange(ROWS)
    return {
        "input_ids": torch.randint(0, 64, (1, ROWS)),
        "position_ids": (order % document_rows)[None],
        "doc_ids": (order // document_rows)[None],
        "block_starts": torch.zeros(1, ROWS, dtype=torch.long),
        "is_noisy": torch.zeros(1, ROWS, dtype=torch.bool),
    }


@pytest.mark.sweep
def test_one_compilation_serves_every_layer_and_packing() -> None:
    model = _model("qwen3")
    runner = HiddenStates(model)
    batches = [_batch(rows) for rows in (8, 12, 7)]
    eager = [runner.hidden(model, batch, "idlm_sdpa") for batch in batches]
    for layer in decoder_layers(model):
        layer.compile(dynamic=False, backend="aot_eager")
    for batch, expected in zip(batches, eager, strict=True):
        hidden = runner.hidden(model, batch, "idlm_sdpa")
        hidden.sum().backward()
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_names_of_weights_stay() -> None:
    model = _model("qwen3")
    names = list(model.state_dict())
    assert compile_layers(model) == 3
    assert list(model.state_dict()) == names


def configured(choice: str, zero_stage: int | None) -> TrainConfig:
    return TrainConfig(model=ModelConfig(compile=choice), train=LoopConfig(zero_stage=zero_stage))


@pytest.mark.parametrize(
    ("choice", "device", "zero_stage", "expected"),
    [
        ("auto", GPU, None, True),
        ("auto", GPU, 2, True),
        ("auto", GPU, 3, False),
        ("auto", CPU, None, False),
        ("on", CPU, None, True),
        ("off", GPU, None, False),
    ],
)
def test_choice(choice: str, device: torch.device, zero_stage: int | None, expected: bool) -> None:
    assert compiles(configured(choice, zero_stage), device) is expected


def test_compiled_layers_cannot_have_their_weights_moved() -> None:
    refused("IDLM-0540", compiles, configured("on", 3), GPU)


@pytest.mark.sweep
def test_gated_layers_take_no_floats_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[torch.Tensor] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        scalars.extend(x for x in inputs if isinstance(x, torch.Tensor) and x.ndim == 0)
        return graph.forward

    own = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: own(self, backend=backend, **options)
    )
    model = adapted("qwen3", attention="idlm_split").train()
    compile_layers(model)
    assert any(
        gradient.any() for gradient in gradients(model, batch_of_two(), "noisy_index", "idlm_split").values()
    )
    assert not scalars
