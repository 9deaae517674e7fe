"""The gated LoRA in training: clean rows are the base's bit for bit, MASK rows follow the rule, nothing else
trains."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from idlm.errors import UserError
from idlm.lora import MASK_ROW, PROJECTIONS, AdapterSpec, base_identity, tensor_name
from idlm.masks import PADDING_DOC
from idlm.train.data.dataset import collate
from idlm.train.data.layout import ROW_FIELDS, pack_rows
from idlm.train.model import gated_lora as gated
from idlm.train.model.checks import mask_token
from idlm.train.model.gated_lora import (
    AdaptedLinear,
    add_adapter,
    gate_of,
    is_trained,
    peft_tensors,
    trained_row,
)
from idlm.train.model.load import decoder_layers
from idlm.train.objectives.base import TermRequest
from tests.errors import refused
from tests.tiny_training import (
    FAMILIES,
    MASK,
    HiddenStates,
    random_sample,
    stage_of,
    tiny_model,
    tiny_objective,
)

SPEC = AdapterSpec(rank=3, alpha=6.0)
WIDTH = 32


def batch_of_two(seed: int = 0, *, stride: int = 3, label_shift: int = 0) -> dict[str, Tensor]:
    """Two packed rows with different numbers of MASK rows, and padding."""
    objective, stage = tiny_objective(), stage_of(stride)
    packed = [[(5, 7), (3, 4)], [(4, 9)]]
    items = []
    for b, sizes in enumerate(packed):
        samples = [
            random_sample(seed + 10 * b + i, prompt=prompt, response=response)
            for i, (prompt, response) in enumerate(sizes)
        ]
        row = pack_rows([objective.rows(sample, stage) for sample in samples], 36, pad_token_id=0)
        items.append(row | {"item_id": b, "stage": 0})
    batch = collate(items)
    batch["labels"] = torch.where(batch["labels"] < 0, -100, (batch["labels"] + label_shift) % MASK)
    return batch


def adapted(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    mask_row: bool = False,
    attention: str = "idlm_sdpa",
    is_gated: bool = True,
    **fields: Any,
) -> Any:
    """A tiny model whose adapter is far from zero."""
    model = tiny_model(family, attention, **fields).to(dtype)
    generator = torch.Generator().manual_seed(5)
    row_D = torch.randn(WIDTH, generator=generator) if mask_row else None
    add_adapter(model, SPEC, mask_row_D=row_D, seed=1, is_gated=is_gated)
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            nn.init.normal_(module.lora_B, std=0.2, generator=generator)
    return model


def hidden_of(model: Any, batch: dict[str, Tensor], attention: str = "idlm_sdpa") -> Tensor:
    return HiddenStates(model).hidden(model, batch, attention)


def gradients(
    model: Any, batch: dict[str, Tensor], rows: str, attention: str = "idlm_sdpa"
) -> dict[str, Tensor]:
    """Gradients of the summed loss of `rows` (a name of the batch), by name; absent ones as zero."""
    model.zero_grad()
    runner = HiddenStates(model)
    hidden_MD = runner.hidden(model, batch, attention).flatten(0, 1)[batch[rows]]
    labels_M = batch["labels"].flatten()[batch[rows]]
    loss = nn.functional.cross_entropy(runner.head(hidden_MD).float(), labels_M, reduction="sum")
    if loss.requires_grad:
        loss.backward()
    named = model.named_parameters()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


@pytest.mark.parametrize("mask_row", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_clean_rows_are_bitwise_the_base(family: str, dtype: torch.dtype, mask_row: bool) -> None:
    batch = batch_of_two()
    noisy, clean = batch["is_noisy"], batch["clean_rows"]
    # The base on the clean rows alone: products of another number of rows round otherwise.
    alone = {name: batch[name].flatten()[clean][None] for name in ROW_FIELDS}
    alone["doc_ids"] = alone["doc_ids"] + 100 * (clean // noisy.shape[1])
    with torch.no_grad():
        base = hidden_of(tiny_model(family).to(dtype), batch)
        expected = hidden_of(tiny_model(family).to(dtype), alone)[0]
        ours = hidden_of(adapted(family, dtype=dtype, mask_row=mask_row), batch)
        head, same = (m.get_output_embeddings() for m in (adapted(family, dtype=dtype), tiny_model(family)))
    assert torch.equal(ours.flatten(0, 1)[clean], expected)
    assert torch.equal(head.weight, same.weight.to(dtype))
    assert (ours[noisy] - base[noisy]).abs().amax(dim=-1).min() > 0.05, "some MASK row is not adapted"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_changes_nothing_yet(family: str) -> None:
    batch, model = batch_of_two(), tiny_model(family)
    add_adapter(model, SPEC, seed=3)
    with torch.no_grad():
        ours, base = hidden_of(model, batch), hidden_of(tiny_model(family), batch)
    is_real = batch["doc_ids"] != PADDING_DOC
    torch.testing.assert_close(ours[is_real], base[is_real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask_row", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_without_a_gate_is_the_merged_model_and_trains_on_all_rows(
    family: str, mask_row: bool
) -> None:
    # A trained row in a tied embedding would change the head.
    fields = {"tie_word_embeddings": not mask_row}
    model, batch = adapted(family, mask_row=mask_row, is_gated=False, **fields), batch_of_two()
    ours = hidden_of(model, batch)
    weights = gated.merged(model.state_dict(), scaling=SPEC.scaling, mask_token_id=MASK)
    plain = tiny_model(family, **fields)
    assert weights.keys() == plain.state_dict().keys()
    tied = [weights[name].data_ptr() for name in ("model.embed_tokens.weight", "lm_head.weight")]
    assert (tied[0] == tied[1]) is not mask_row
    if mask_row:
        refused("IDLM-0530.*tied", adapted, family, mask_row=True, is_gated=False)
    plain.load_state_dict(weights)
    torch.testing.assert_close(hidden_of(plain, batch), ours, atol=1e-4, rtol=1e-4)
    from_clean = gradients(model, batch, "clean_index")
    assert all(bool(from_clean[name].any()) for name in from_clean if "lora_" in name)


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("divergence", ["kl", "overlap"])
def test_a_draft_learns_the_bases_distribution(divergence: str, share: float) -> None:
    """Gradients of every adapter weight against autograd through whole logits of the same pass."""
    objective = replace(tiny_objective(), distill=divergence, distill_share=share)
    model, batch, stage = adapted("qwen3"), batch_of_two(), stage_of(3, 0.0)
    runner = HiddenStates(model)
    noisy_M, clean_M = batch["noisy_index"], batch["clean_index"]

    def compute(head, hidden_BTD):
        request = TermRequest(stage=stage, coefficients=torch.tensor([0.5, 0.0]), want_overlap=True)
        return objective.terms(head, hidden_BTD, batch, request)

    terms = runner.terms(model, batch, "idlm_sdpa", compute)
    assert terms.loss is not None and terms.overlap is not None
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ours = torch.autograd.grad(terms.loss, list(trained.values()))
    hidden = runner.hidden(model, batch, "idlm_sdpa").flatten(0, 1)
    log_q, log_p = (runner.head(hidden[rows]).log_softmax(-1) for rows in (noisy_M, clean_M))
    nll = nn.functional.nll_loss(log_q, batch["labels"].flatten()[noisy_M], reduction="sum")
    overlap = torch.minimum(log_q.exp(), log_p.detach().exp()).sum()
    kl = (log_p.detach().exp() * (log_p.detach() - log_q)).sum()
    lost = kl if divergence == "kl" else len(noisy_M) - overlap
    loss = 0.5 * ((1 - share) * nll + share * lost)
    torch.testing.assert_close(terms.loss, loss)
    torch.testing.assert_close(terms.sums[0], nll.detach())
    torch.testing.assert_close(terms.overlap[0].sum(), overlap.detach())
    for mine, theirs in zip(ours, torch.autograd.grad(loss, list(trained.values())), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mask_row", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_mask_rows_give_gradients(family: str, mask_row: bool) -> None:
    model = adapted(family, mask_row=mask_row)
    from_noisy = gradients(model, batch_of_two(), "noisy_index")
    from_clean = gradients(model, batch_of_two(), "clean_index")
    for name, gradient in from_noisy.items():
        assert bool(gradient.any()) == is_trained(name), name
        assert not from_clean[name].any(), name
    relabelled = batch_of_two(label_shift=1)
    relabelled["labels"][batch_of_two()["is_noisy"]] = batch_of_two()["labels"][batch_of_two()["is_noisy"]]
    again = gradients(model, relabelled, "noisy_index")
    assert all(torch.equal(gradient, again[name]) for name, gradient in from_noisy.items())


class InOnePass(nn.Linear):
    """The plain definition: all rows through the base, an update for the rows of a mask, all by autograd."""

    is_mask: ClassVar[Tensor]

    def __init__(self, layer: AdaptedLinear) -> None:
        nn.Module.__init__(self)
        self.weight, self.lora_A, self.lora_B = layer.weight, layer.lora_A, layer.lora_B
        self.register_parameter("bias", layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        update = x @ self.lora_A.T @ self.lora_B.T * SPEC.scaling
        return nn.functional.linear(x, self.weight, self.bias) + update * InOnePass.is_mask[..., None]


@pytest.mark.sweep_but("llama-idlm_sdpa")
@pytest.mark.parametrize("attention", ["idlm_sdpa", "idlm_documents", "idlm_split"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_rows_that_run_apart_have_the_values_and_gradients_of_one_pass(family: str, attention: str) -> None:
    """Strides 2, 3, 4 and 8, packed and padded rows of odd lengths, with and without checkpointing."""
    model, plain = adapted(family, attention=attention).train(), adapted(family, attention=attention).train()
    for name, module in list(plain.named_modules()):
        if isinstance(module, AdaptedLinear):
            plain.set_submodule(name, InOnePass(module))
    del plain.mask_gate
    for seed, stride in enumerate((2, 3, 4, 8, 3)):
        batch = batch_of_two(seed, stride=stride)
        InOnePass.is_mask, is_real = batch["is_noisy"].float(), batch["doc_ids"] != PADDING_DOC
        if seed == 4:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ours = gradients(model, batch, "noisy_index", attention)
        expected = gradients(plain, batch, "noisy_index", attention)
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-5)
        assert sum(bool(gradient.any()) for gradient in ours.values()) == 2 * 7 * 2
        hidden, values = hidden_of(model, batch, attention), hidden_of(plain, batch, attention)
        torch.testing.assert_close(hidden[is_real], values[is_real], atol=1e-5, rtol=1e-5)
        assert not hidden[~is_real].any()


def test_checkpointing_and_autocast_keep_the_gate() -> None:
    batch = batch_of_two()
    plain = gradients(adapted("qwen3"), batch, "noisy_index")
    model = adapted("qwen3").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = gradients(model, batch, "noisy_index")
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = gradients(adapted("qwen3"), batch, "noisy_index")
    for name, gradient in plain.items():
        assert (rough[name] - gradient).norm() <= 0.1 * gradient.norm(), name
        assert rough[name].dtype == torch.float32


@pytest.mark.sweep
def test_one_compilation_serves_every_number_of_mask_rows() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, batches = adapted("qwen3").train(), [batch_of_two(seed, stride=3) for seed in range(2)]
    for number, batch in enumerate(batches):
        batch["gate_index"] = batch["gate_index"][: len(batch["gate_index"]) - 2 * number]
        batch["noisy_index"] = batch["gate_index"]
    eager = [gradients(model, batch, "noisy_index") for batch in batches]
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, backend="aot_eager")
    for batch, expected in zip(batches, eager, strict=True):
        for name, gradient in gradients(model, batch, "noisy_index").items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    first = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # Clean and noisy rows, and the first layer, whose input needs no gradient.
    assert first <= 3
    more = [batch_of_two(seed, stride=4) for seed in range(2, 4)]
    for number, batch in enumerate(more):
        for name in ("gate_index", "noisy_index"):
            batch[name] = batch[name][: len(batch[name]) - 3 - number]
        gradients(model, batch, "noisy_index")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == first
    torch._dynamo.reset()


def test_the_seed_decides_the_start() -> None:
    def start(seed: int) -> dict[str, Tensor]:
        model = tiny_model("llama")
        add_adapter(model, SPEC, seed=seed)
        return peft_tensors(model.state_dict())

    first, same, other = start(1), start(1), start(2)
    assert first.keys() == {
        tensor_name(f"model.layers.{layer}.{part}.{name}", matrix)
        for layer in range(2)
        for name in PROJECTIONS
        for part in ["mlp" if name in PROJECTIONS[4:] else "self_attn"]
        for matrix in "AB"
    }
    assert all(torch.equal(value, same[name]) for name, value in first.items())
    assert not any(torch.equal(value, other[name]) for name, value in first.items() if "lora_A" in name)


def test_targets_are_checked() -> None:
    with pytest.raises(UserError, match="IDLM-0530") as caught:
        add_adapter(tiny_model("qwen3"), AdapterSpec(rank=2, alpha=2, targets=("q_proj", "qkv", "lm_head")))
    assert "lm_head, qkv" in caught.value.message
    assert "down_proj, gate_proj" in str(caught.value)
    few = tiny_model("qwen3")
    add_adapter(few, AdapterSpec(rank=2, alpha=2, targets=("v_proj",)))
    assert sum(isinstance(module, AdaptedLinear) for module in few.modules()) == 2
    assert gate_of(tiny_model("qwen3")) is None


class Words:
    """As much of a tokenizer as choosing a mask token takes."""

    mask_token_id = None
    bos_token_id = eos_token_id = pad_token_id = unk_token_id = sep_token_id = cls_token_id = None
    all_special_ids = ()
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self.num_ids)}

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return str(token_id) if token_id < self.num_ids else None


def test_a_usable_mask_row_is_kept_and_any_other_is_trained_outside_the_table() -> None:
    model = tiny_model("qwen3")
    table_VD = model.get_input_embeddings().weight

    def row_after(num_ids: int) -> Tensor | None:
        mask = mask_token(Words(num_ids), len(table_VD), None)
        assert mask.token_id == num_ids
        return trained_row(model, mask)

    assert row_after(60) is None
    row_D = row_after(len(table_VD))
    torch.testing.assert_close(row_D, table_VD.mean(dim=0))
    with torch.no_grad():
        table_VD[61] = 0
    before = copy.deepcopy(model.state_dict())
    row_D = row_after(61)
    torch.testing.assert_close(row_D, table_VD[torch.arange(64) != 61].mean(dim=0))
    add_adapter(model, SPEC, mask_row_D=row_D)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert torch.equal(peft_tensors(model.state_dict())[MASK_ROW], row_D)


def test_a_trained_row_answers_to_any_id_and_leaves_the_table_alone() -> None:
    """Also an id that the table lacks; and with a tied head, clean logits stay those of the base's rows."""
    model, batch = adapted("llama", mask_row=True), batch_of_two()
    with torch.no_grad():
        inside = hidden_of(model, batch)
        batch["input_ids"][batch["is_noisy"]] = 10_000
        outside = hidden_of(model, batch)
    assert torch.equal(inside, outside)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not model.get_input_embeddings().weight.requires_grad


def test_the_identity_of_a_base_is_that_of_its_weights(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "split", max_shard_size="20KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 1
    whole = base_identity(tmp_path / "whole")
    assert base_identity(tmp_path / "split") == whole
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    model.save_pretrained(tmp_path / "tuned")
    assert base_identity(tmp_path / "tuned") != whole
    for broken in (b"", b"\xff" * 64, b"\x05\0\0\0\0\0\0\0{bad}"):
        (tmp_path / "whole" / "model.safetensors").write_bytes(broken)
        refused("IDLM-0607", base_identity, tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").unlink()
    refused("IDLM-0602", base_identity, tmp_path / "whole")
