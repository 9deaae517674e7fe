"""The FLOP count of a step against a brute-force count of the mask and torch's own counter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from idlm.lora import AdapterSpec
from idlm.masks import PADDING_DOC, dense_mask
from idlm.train.model.gated_lora import add_adapter
from idlm.train.objectives.base import Head
from idlm.train.planning.flops import TokenCounts, peak_flops, train_flops, work_of
from idlm.train.step import BodyAndHead
from tests.tiny_training import batch_of, meta_of, random_sample, stage_of, tiny_model, tiny_objective

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def mixed_batch(stride: int, mask_region: str = "response") -> dict[str, torch.Tensor]:
    samples = [random_sample(seed, prompt=3 + seed, response=9 - 2 * seed) for seed in range(3)]
    return batch_of(samples, tiny_objective(mask_region), stage_of(stride), padding=5)


@pytest.mark.parametrize("mask_region", ["response", "all"])
@pytest.mark.parametrize("stride", [2, 3, 4, 8])
def test_pairs_are_those_of_the_dense_mask(stride: int, mask_region: str) -> None:
    batch = mixed_batch(stride, mask_region)
    fed = TokenCounts(*batch["fed"].tolist())
    meta = meta_of(batch)
    is_real = batch["doc_ids"] != PADDING_DOC
    seen = dense_mask(meta).sum(dim=-1)
    for half, chosen in (("clean", ~batch["is_noisy"]), ("noisy", batch["is_noisy"])):
        assert getattr(fed, f"{half}_pairs") == int(seen[is_real & chosen].sum())
        assert getattr(fed, f"{half}_rows") == int((is_real & chosen).sum())
        assert getattr(fed, f"{half}_targets") == batch[f"{half}_index"].numel()
    assert fed.clean_rows == int(batch["num_tokens"])


COUNTED = ("aten.mm", "aten.addmm", "idlm.adapted_linear")


def adapted(x: Any, weight: Any, bias: Any, low: Any, parts: Any, *_: Any, **__: Any) -> int:
    """FLOPs of a linear and its LoRA, which torch counts as one operator, by their shapes."""
    return 2 * math.prod(x[:-1]) * (math.prod(weight) + sum(math.prod(part) for part in parts))


def counted(model: torch.nn.Module, batch: dict[str, torch.Tensor], *, trains_clean: bool) -> int:
    """What torch counts for linear layers and head, attention excluded, without padding in the batch."""
    stage = stage_of(3, 0.2 if trains_clean else 0.0)
    runner = BodyAndHead(model)

    def compute(head: Head, hidden_BTD: torch.Tensor):
        index = batch["noisy_index"]
        if trains_clean:
            index = torch.cat([index, batch["clean_index"]])
        rows = hidden_BTD.flatten(0, 1)[index]
        logits = torch.nn.functional.linear(rows, head.weight_VD)
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()[index])
        from idlm.train.objectives.base import Terms

        return Terms(sums=torch.zeros(2), loss=loss)

    assert stage.stride == 3
    with FlopCounterMode(display=False, custom_mapping={torch.ops.idlm.adapted_linear: adapted}) as counter:
        loss = runner.terms(model, batch, "idlm_sdpa", compute).loss
        assert loss is not None
        loss.backward()
    by_op = counter.get_flop_counts()["Global"]
    return sum(flops for op, flops in by_op.items() if str(op) in COUNTED)


def without_pairs(batch: dict[str, torch.Tensor]) -> TokenCounts:
    values = dict(zip(TokenCounts._fields, batch["fed"].tolist(), strict=True))
    return TokenCounts(**(values | {"clean_pairs": 0, "noisy_pairs": 0}))


@pytest.mark.parametrize("trains_clean", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_full_training_is_what_torch_counts(family: str, trains_clean: bool) -> None:
    model = tiny_model(family).train()
    batch = batch_of([random_sample(s, prompt=4, response=6) for s in (0, 1)], tiny_objective(), stage_of(3))
    work = work_of(model)
    assert work is not None and not work.is_frozen
    expected = train_flops(work, without_pairs(batch), trains_clean=trains_clean)
    assert counted(model, batch, trains_clean=trains_clean) == expected


def test_a_frozen_base_is_multiplied_forward_for_all_rows_and_back_for_noisy_ones() -> None:
    model = tiny_model("qwen3").train()
    plain = work_of(model)
    add_adapter(model, AdapterSpec(rank=4, alpha=8.0, targets=TARGETS))
    work = work_of(model)
    batch = batch_of([random_sample(0, prompt=8, response=6)], tiny_objective(), stage_of(3))
    assert work is not None and plain is not None
    assert (work.layers, work.head, work.queries) == (plain.layers, plain.head, plain.queries)
    expected = train_flops(work, without_pairs(batch), trains_clean=False)
    # The first layer's inputs are embeddings of the frozen base: torch makes no gradient for them from A.
    spared = 2 * 6 * 3 * model.model.layers[0].self_attn.q_proj.in_features * 4
    assert counted(model, batch, trains_clean=False) == expected - spared


def test_peaks_are_those_of_known_devices_only() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("Some GPU 9000") is None
