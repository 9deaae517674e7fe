"""The training forward against plain causal forwards, and the loss against formulas written out here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from idlm.kernels.linear_cross_entropy import op
from idlm.masks import dense_mask
from idlm.train.data.layout import IGNORE_LABEL
from idlm.train.model.checks import check_window, prepare_mask_row
from idlm.train.model.load import random_model
from idlm.train.objectives.ar import Autoregressive
from idlm.train.objectives.base import TermRequest
from tests.errors import refused
from tests.tiny_training import (
    FAMILIES,
    MASK,
    VOCAB,
    HiddenStates,
    batch_of,
    meta_of,
    random_sample,
    stage_of,
    tiny_config,
    tiny_model,
    tiny_objective,
)

TOLERANCE = 1e-5
BOTH = torch.ones(2)


def all_logits(model, batch, attention="idlm_sdpa"):
    runner = HiddenStates(model)
    return runner.head(runner.hidden(model, batch, attention)[0])


def plain_logits(model, token_ids):
    """What transformers itself computes, with its own causal attention."""
    model.set_attn_implementation("eager")
    try:
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation("idlm_sdpa")


@pytest.mark.sweep_but(region="response", family="qwen3")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("region", ["response", "all"])
@torch.no_grad()
def test_every_row_equals_a_plain_causal_forward_on_what_it_sees(family: str, region: str) -> None:
    model, objective = tiny_model(family), tiny_objective(region)
    samples = [random_sample(1, prompt=5, response=11), random_sample(2, prompt=3, response=6)]
    for stride in (2, 3, 4):
        batch = batch_of(samples, objective, stage_of(stride), padding=3)
        logits = all_logits(model, batch)
        docs, positions = batch["doc_ids"][0], batch["position_ids"][0]
        starts, noisy = batch["block_starts"][0], batch["is_noisy"][0]
        for doc, sample in enumerate(samples):
            tokens = sample.token_ids.tolist()
            clean = (docs == doc) & ~noisy
            torch.testing.assert_close(logits[clean], plain_logits(model, tokens), atol=TOLERANCE, rtol=0)
            for start in starts[(docs == doc) & noisy].unique().tolist():
                rows = torch.nonzero((docs == doc) & noisy & (starts == start)).squeeze(-1)
                layout = tokens[:start] + [MASK] * len(rows)
                expected = plain_logits(model, layout)[start:]
                assert positions[rows].tolist() == list(range(start, start + len(rows)))
                torch.testing.assert_close(logits[rows], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.sweep_but("idlm_documents", "idlm_split")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("attention", ["idlm_flex", "idlm_documents", "idlm_split"])
@torch.no_grad()
def test_every_attention_equals_dense_sdpa(attention: str) -> None:
    objective = tiny_objective()
    samples = [random_sample(1, prompt=5, response=11), random_sample(2, prompt=3, response=6)]
    batch = batch_of(samples, objective, stage_of(4), padding=5)
    dense = all_logits(tiny_model("qwen3"), batch)
    other = all_logits(tiny_model("qwen3", attention), batch, attention)
    is_real = batch["doc_ids"][0] >= 0
    torch.testing.assert_close(other[is_real], dense[is_real], atol=TOLERANCE, rtol=0)
    assert other.isfinite().all()


@pytest.mark.parametrize("attention", ["idlm_documents", "idlm_split"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_attention_has_the_gradients_of_dense_sdpa(family: str, attention: str) -> None:
    objective = tiny_objective()
    samples = [random_sample(seed, prompt=3, response=4 + seed) for seed in range(3)]
    batch = batch_of(samples, objective, stage_of(3), padding=5)
    gradients = []
    for name in ("idlm_sdpa", attention):
        model = tiny_model(family, name)
        terms_of(model, batch, objective, stage_of(3), BOTH, attention=name).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for dense, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, dense, atol=1e-4, rtol=1e-4)


def terms_of(model, batch, objective, stage, coefficients=None, *, want_overlap=False, attention="idlm_sdpa"):
    """`objective.terms` inside the model's own forward pass, as the trainer runs it."""
    request = TermRequest(stage=stage, coefficients=coefficients, want_overlap=want_overlap)
    return HiddenStates(model).terms(
        model, batch, attention, lambda head, hidden: objective.terms(head, hidden, batch, request)
    )


def plain_sums(model, batch):
    """[L_mask, L_clean] summed, from the full logits of every row, without anything of train/."""
    meta = meta_of(batch)
    logits = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        use_cache=False,
        attention_mask=dense_mask(meta)[:, None],
    ).logits[0]
    labels, noisy = batch["labels"][0], batch["is_noisy"][0]
    halves = (
        functional.cross_entropy(logits[half], labels[half], ignore_index=IGNORE_LABEL, reduction="sum")
        for half in (noisy, ~noisy)
    )
    return torch.stack(list(halves))


def gradients_of(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("clean_weight", [0.0, 0.2, 1.0, None])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("chunk_rows", [None, 5])
def test_values_and_gradients_are_those_of_the_plain_loss(
    clean_weight: float | None, is_tied: bool, chunk_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, stage = tiny_objective(), stage_of(3, clean_weight)
    model = random_model(
        tiny_config("qwen3") | {"tie_word_embeddings": is_tied},
        attention="idlm_sdpa",
        dtype=torch.float32,
        seed=0,
    ).eval()
    samples = [random_sample(seed, prompt=3 + seed, response=7 + seed) for seed in range(2)]
    batch = batch_of(samples, objective, stage, padding=2)
    counts = objective.counts(batch, stage=stage, want_overlap=True)
    if chunk_rows is not None:
        monkeypatch.setattr(op, "MAX_LOGITS_BYTES", chunk_rows * VOCAB * 4)
    expected = plain_sums(model, batch)
    means = (expected / counts).detach()
    s = means[0] / means[1] if clean_weight is None else torch.tensor(clean_weight)
    weights = objective.weights(stage, means)
    torch.testing.assert_close(weights, torch.stack([torch.tensor(1.0), s]))
    terms = terms_of(model, batch, objective, stage, weights / counts, want_overlap=True)
    loss = (expected / counts * weights).sum()
    torch.testing.assert_close(terms.sums, expected.detach(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(terms.loss, loss, atol=1e-6, rtol=1e-6)
    for mine, theirs in zip(gradients_of(model, terms.loss), gradients_of(model, loss), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    alone = terms_of(model, batch, objective, stage)
    assert alone.loss is None
    torch.testing.assert_close(alone.sums, terms.sums, atol=1e-6, rtol=1e-6)


def test_next_token_loss_is_the_plain_loss_too() -> None:
    objective = Autoregressive(mask_token_id=None, mask_region="all")
    model, stage = tiny_model("llama"), stage_of(1)
    samples = [random_sample(seed, prompt=2, response=6 + seed) for seed in range(2)]
    batch = batch_of(samples, objective, stage, padding=3)
    terms = terms_of(model, batch, objective, stage, torch.tensor([0.5]))
    expected = plain_sums(model, batch)[1]
    torch.testing.assert_close(terms.sums, expected.detach()[None], atol=1e-6, rtol=1e-6)
    for mine, theirs in zip(
        gradients_of(model, terms.loss), gradients_of(model, expected * 0.5), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_row_without_documents_has_zero_losses_and_gradients() -> None:
    objective, model = tiny_objective(), tiny_model("qwen3")
    batch = batch_of([random_sample(0, prompt=4, response=1)], objective, stage_of(2), padding=4)
    batch |= {name: batch[name][:0] for name in ("noisy_index", "clean_index")}
    terms = terms_of(model, batch, objective, stage_of(2), BOTH, want_overlap=True)
    assert terms.sums.tolist() == [0.0, 0.0]
    assert terms.overlap[1].tolist() == [0.0]
    for gradient in gradients_of(model, terms.loss):
        assert gradient is not None, "DistributedDataParallel waits for every gradient"
        assert not gradient.any()


def test_the_head_is_given_back_even_when_the_loss_fails() -> None:
    model, objective = tiny_model("qwen3"), tiny_objective()
    batch = batch_of([random_sample(1, prompt=4, response=3)], objective, stage_of(2))
    batch["labels"] = batch["labels"] + VOCAB
    with pytest.raises(AssertionError, match="vocabulary"):
        terms_of(model, batch, objective, stage_of(2), BOTH)
    assert "forward" not in vars(model.get_output_embeddings())


@torch.no_grad()
@pytest.mark.parametrize("chunk_rows", [None, 3])
def test_acceptance_is_the_overlap_of_both_distributions_by_draft_position(
    chunk_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, objective, stage = tiny_model("qwen3"), tiny_objective(), stage_of(4)
    if chunk_rows is not None:
        monkeypatch.setattr(op, "MAX_LOGITS_BYTES", 2 * chunk_rows * VOCAB * 4)
    batch = batch_of([random_sample(1, prompt=4, response=10)], objective, stage)
    overlap = terms_of(model, batch, objective, stage, want_overlap=True).overlap
    probs = torch.softmax(all_logits(model, batch), dim=-1)
    positions, starts, noisy = batch["position_ids"][0], batch["block_starts"][0], batch["is_noisy"][0]
    sums, counts = torch.zeros(3), torch.zeros(3)
    for row in torch.nonzero(noisy).squeeze(-1).tolist():
        (twin,) = torch.nonzero(~noisy & (positions == positions[row])).squeeze(-1).tolist()
        index = int(positions[row] - starts[row])
        sums[index] += torch.minimum(probs[row], probs[twin]).sum()
        counts[index] += 1
    torch.testing.assert_close(overlap[0], sums)
    assert torch.equal(overlap[1], counts)


def test_clean_weight_is_fixed_or_balances_the_two_losses() -> None:
    objective = tiny_objective()
    assert objective.weights(stage_of(2, 0.2), None).tolist() == pytest.approx([1.0, 0.2])
    means = torch.tensor([3.0, 0.5], requires_grad=True)
    weights = objective.weights(stage_of(4, None), means)
    assert not weights.requires_grad
    terms = weights * means.detach()
    assert float(terms[0]) == pytest.approx(float(terms[1]))
    # At the start of an unconverted base.
    means = torch.tensor([12.6, 0.02])
    bounded = replace(objective, max_clean_weight=10.0)
    assert objective.weights(stage_of(4, None), means).tolist() == pytest.approx([1.0, 630.0])
    assert bounded.weights(stage_of(4, None), means).tolist() == [1.0, 10.0]
    assert bounded.weights(stage_of(4, 0.2), None).tolist() == pytest.approx([1.0, 0.2])


@pytest.mark.parametrize(("fill", "is_replaced"), [(0.0, True), (float("nan"), True), (None, False)])
def test_only_an_unusable_mask_row_is_replaced(fill: float | None, is_replaced: bool) -> None:
    model = tiny_model("qwen3")
    rows = model.get_input_embeddings().weight
    with torch.no_grad():
        if fill is not None:
            rows[MASK].fill_(fill)
    before = rows[MASK].clone()
    assert prepare_mask_row(model, MASK) is is_replaced
    if is_replaced:
        torch.testing.assert_close(rows[MASK], rows[:MASK].mean(dim=0))
    else:
        assert torch.equal(rows[MASK], before)


def test_a_sliding_window_shorter_than_the_rows_is_named() -> None:
    config = tiny_model("qwen3").config
    check_window(config, 10_000)
    config.sliding_window, config.layer_types = 128, ["full_attention", "sliding_attention"]
    check_window(config, 128)
    refused("IDLM-0509.*129(.|\n)*train.max_length=128", check_window, config, 129)
    config.attention_chunk_size, config.layer_types = 64, ["full_attention", "chunked_attention"]
    refused("attention_chunk_size=64", check_window, config, 128)


@pytest.mark.parametrize("clean_weight", [0.0, 0.2, None])
def test_a_clean_loss_that_trains_nothing_is_computed_only_to_be_shown(clean_weight: float | None) -> None:
    objective, stage = tiny_objective(), stage_of(3, clean_weight)
    model = tiny_model("qwen3")
    batch = batch_of([random_sample(1, prompt=3, response=7)], objective, stage)
    for is_shown in (False, True):
        counts = objective.counts(batch, stage=stage, want_overlap=is_shown)
        sums = terms_of(model, batch, objective, stage, BOTH, want_overlap=is_shown).sums
        assert (sums > 0).tolist() == (counts > 0).tolist() == [True, is_shown or clean_weight != 0.0]
