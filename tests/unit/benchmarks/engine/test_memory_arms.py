"""Arms of the memory benchmark on a CPU: the native modules, the product's passes, and what tasks measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.engine.canvas.executor import PRODUCT_ARMS, ExecutorArm
from benchmarks.engine.canvas.native import (
    NATIVE_ARMS,
    NativeArm,
    NativeModel,
    empty_model,
    masked_logits,
    random_canvas,
)
from benchmarks.engine.canvas.sizes import num_masks
from benchmarks.models import family_of, model_spec
from idlm.infer.models.base import FAMILIES as FAMILIES_OF
from idlm.infer.models.base import ModelSpec, TensorNames
from idlm.infer.models.dense import weight_targets
from tests.numerics import full_reference

CPU = torch.device("cpu")
TOLERANCE = 1e-4
FAMILIES = tuple(full_reference.CONFIGS)


def loaded_model(
    spec: ModelSpec, tensors: Mapping[str, Tensor], names: TensorNames, *, device: torch.device
) -> NativeModel:
    """A model with the tensors of a checkpoint under the family's names, in their dtype."""
    model = empty_model(spec, device, tensors[names.embed].dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_tensor_of(name, tensors, names))
    return model


def _tensor_of(name: str, tensors: Mapping[str, Tensor], names: TensorNames) -> Tensor:
    """The tensor of a parameter; experts are stacked, gate rows before up rows."""
    top = {"embed.weight": names.embed, "norm.weight": names.final_norm, "head.weight": names.head}
    if name in top:
        return tensors[top[name]]
    _, number, part = name.split(".", 2)
    layer = int(number)
    whole = {
        "attention_norm.weight": names.attention_norm,
        "mlp_norm.weight": names.mlp_norm,
        "attention.q_norm.weight": names.q_norm,
        "attention.k_norm.weight": names.k_norm,
        "mlp.router.weight": names.router,
    }
    if part in whole:
        return tensors[whole[part].format(layer)]
    if part in ("mlp.gate_up", "mlp.down"):
        return _stacked(part, layer, tensors, names)
    module, _, kind = part.rpartition(".")
    projections = {
        "attention.q_proj": names.q,
        "attention.k_proj": names.k,
        "attention.v_proj": names.v,
        "attention.o_proj": names.o,
        "mlp.gate_proj": names.gate,
        "mlp.up_proj": names.up,
        "mlp.down_proj": names.down,
    }
    return tensors[f"{projections[module].format(layer)}.{kind}"]


def _stacked(part: str, layer: int, tensors: Mapping[str, Tensor], names: TensorNames) -> Tensor:
    parts = (names.expert_down,) if part == "mlp.down" else (names.expert_gate, names.expert_up)
    experts, expert = [], 0
    while parts[0].format(layer, expert) in tensors:
        experts.append(torch.cat([tensors[name.format(layer, expert)] for name in parts]))
        expert += 1
    return torch.stack(experts)


def native_of(kind: str) -> Any:
    family = FAMILIES_OF.get(full_reference.CONFIGS[kind]["architectures"][0])
    spec = family.spec(full_reference.CONFIGS[kind])
    return loaded_model(spec, full_reference.random_tensors(kind), family.tensor_names, device=CPU)


@pytest.mark.parametrize("kind", FAMILIES)
def test_native_models_equal_the_reference(kind: str) -> None:
    tensors, ids = full_reference.random_tensors(kind), list(range(3, 40, 3))
    with torch.inference_mode():
        native_LV = native_of(kind)(torch.tensor(ids)[None])[0]
    torch.testing.assert_close(native_LV, full_reference.logits(kind, tensors, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("arm", "is_shifted"),
    [*((arm, arm in ("native", "compile_masked")) for arm in NATIVE_ARMS), ("masked", True)],
)
def test_every_native_arm_proposes_the_same(arm: str, is_shifted: bool) -> None:
    model = native_of("dream")
    canvas = random_canvas(12, 0.5, vocab=48, mask_id=47, device=CPU)
    logits_LV = full_reference.logits(
        "dream", full_reference.random_tensors("dream"), canvas.ids_BL[0].tolist()
    )
    if is_shifted:
        logits_LV = torch.cat((logits_LV[:1], logits_LV[:-1]))
    expected, tokens_L = logits_LV.double().softmax(-1).max(-1)
    native = NativeArm(arm, model, is_shifted=is_shifted, backend="eager")
    tokens_M, confidence_M = native.propose(canvas)
    assert tokens_M.tolist() == tokens_L[6:].tolist()
    torch.testing.assert_close(confidence_M.double(), expected[6:], atol=TOLERANCE, rtol=0)
    ids, old = native.step(canvas)[0], canvas.ids_BL[0]
    best = 6 + int(confidence_M.argmax())
    assert ids[best] == tokens_L[best]
    assert (ids != old).sum() == 1


def test_the_prompt_has_no_masks_and_its_share() -> None:
    canvas = random_canvas(1000, 0.9, vocab=8, mask_id=3, device=CPU)
    assert (
        (canvas.ids_BL[0] == 3).nonzero()[:, 0].tolist() == canvas.index_M.tolist() == list(range(900, 1000))
    )
    assert int(canvas.ids_BL.max()) == 7 and int(canvas.ids_BL.min()) == 0
    assert [num_masks(10, share) for share in (0.0, 0.1, 0.5, 1.0)] == [9, 9, 5, 1]


@pytest.mark.parametrize("arm", PRODUCT_ARMS)
def test_our_arms_propose_what_the_native_arms_do(arm: str) -> None:
    spec = model_spec("tiny_llada")
    ours = ExecutorArm(arm, "tiny_llada", num_layers=None, device=CPU, dtype=torch.float32)
    canvas = random_canvas(40, 0.5, vocab=spec.vocab_size, mask_id=127, device=CPU)
    trunk, names = ours._runner._trunk, family_of("tiny_llada").tensor_names
    tensors = {name: target.view for name, target in weight_targets(trunk, names).items()}
    native = loaded_model(spec, tensors, names, device=CPU)
    logits_MV = masked_logits(native, canvas.ids_BL, canvas.index_M, is_shifted=False)
    # The product never predicts the mask.
    logits_MV[:, 127] = -torch.inf
    best_M2 = logits_MV.topk(2).values
    assert float((best_M2[:, 0] - best_M2[:, 1]).min()) > TOLERANCE
    confidence_M, expected_M = logits_MV.double().softmax(-1).max(-1)
    tokens_M, own_M = ours.propose(canvas)
    assert tokens_M.tolist() == expected_M.tolist()
    torch.testing.assert_close(own_M.double(), confidence_M, atol=TOLERANCE, rtol=0)
    points = ours.timeline(canvas)
    assert max(size for _, size in points) == ours.plan(canvas).live_bytes
    assert ours.planned(canvas)["planned_bytes"] > ours.plan(canvas).peak_bytes
    ours.shrink()
    assert ours._arena.num_bytes == 0
