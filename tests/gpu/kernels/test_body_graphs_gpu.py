"""CUDA graphs of a model's body: the hidden states and gradients of passes that nothing captures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from idlm.train.model.attention import register_attention
from idlm.train.model.graphs import BodyGraphs, can_capture
from idlm.train.model.load import compile_layers
from tests.gpu.kernels.test_gated_training_gpu import on_gpu
from tests.tiny_training import HiddenStates, tiny_model
from tests.unit.training.test_gated_lora import adapted

WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}


def passes(model: Any, seeds: tuple[int, ...], *, is_running: bool) -> list[list[torch.Tensor]]:
    """Hidden states and gradients of one pass per seed."""
    runner, found = HiddenStates(model), []
    for seed in seeds:
        model.zero_grad()
        batch = on_gpu(seed)
        # Two micro-batches, so that gradients are added up.
        for part in (batch, on_gpu(seed + 1)):
            if is_running:
                with runner.graphs.running():
                    hidden = runner.hidden(model, part, "idlm_split")
            else:
                hidden = runner.hidden(model, part, "idlm_split")
            weight = torch.linspace(-1, 1, hidden[0].numel(), device="cuda").view(hidden[0].shape)
            rows = part["noisy_index"]
            (hidden.flatten(0, 1)[rows].float() * weight.repeat(len(hidden), 1)[rows]).sum().backward()
        hidden = hidden.detach().flatten(0, 1)[rows].clone()
        found.append([hidden, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    return found


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.alone
def test_replayed_passes_are_those_that_nothing_captures(is_gated: bool) -> None:
    register_attention()
    torch._dynamo.reset()
    if is_gated:
        model = adapted("qwen3", dtype=torch.bfloat16, attention="idlm_split")
    else:
        model = tiny_model("qwen3", attention="idlm_split", **WIDE).bfloat16()
    model = model.cuda().train()
    compile_layers(model)
    seeds = (0, 3, 0, 5, 3)
    truth = passes(model, seeds, is_running=False)
    assert can_capture(model)
    model.body_graphs = graphs = BodyGraphs(model)
    found = passes(model, seeds, is_running=True)
    assert graphs.is_on and graphs._graphs
    for ours, theirs in zip(found, truth, strict=True):
        assert len(ours) == len(theirs) > 5
        for one, other in zip(ours, theirs, strict=True):
            # Sums of dq in no fixed order differ in their last bits.
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))
    graphs.release()
    again = passes(model, seeds[:1], is_running=True)
    torch.testing.assert_close(again[0][0], truth[0][0])
