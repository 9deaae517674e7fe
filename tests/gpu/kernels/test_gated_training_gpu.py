"""Gated LoRA on a CUDA device: noisy rows that run by themselves against one pass by autograd."""

from __future__ import annotations

import pytest
import torch

from idlm.train.model.attention import register_attention
from idlm.train.model.gated_lora import AdaptedLinear
from idlm.train.model.load import compile_layers
from tests.unit.training.test_gated_lora import InOnePass, adapted, batch_of_two, gradients


def on_gpu(seed: int) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in batch_of_two(seed).items()}


def distance(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    gaps = [(ours[name].double() - truth[name].double()).norm() for name in truth]
    return float(torch.stack(gaps).norm() / torch.stack([v.double().norm() for v in truth.values()]).norm())


@pytest.mark.parametrize(
    ("attention", "compiles"), [("idlm_split", False), ("idlm_split", True), ("idlm_flex", True)]
)
def test_gradients_are_those_of_one_pass(attention: str, compiles: bool) -> None:
    register_attention()
    torch._dynamo.reset()
    dtype = torch.bfloat16 if attention == "idlm_split" else torch.float32
    model = adapted("qwen3", dtype=dtype, attention=attention).cuda().train()
    plain = adapted("qwen3", dtype=torch.float32, attention="idlm_sdpa").cuda().train()
    for name, module in list(plain.named_modules()):
        if isinstance(module, AdaptedLinear):
            plain.set_submodule(name, InOnePass(module))
    del plain.mask_gate
    if compiles:
        compile_layers(model)
    for seed in range(3):
        batch = on_gpu(seed)
        InOnePass.is_mask = batch["is_noisy"].float()
        truth = gradients(plain, batch, "noisy_index")
        gap = distance(gradients(model, batch, "noisy_index", attention), truth)
        assert gap <= (0.05 if dtype == torch.bfloat16 else 1e-5), f"{seed=} {gap=}"
