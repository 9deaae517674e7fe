"""Full diffusion against its definition: visibility, loss and gradients, and the NELBO.

The reference feeds each sample by itself, its targets masked, under no attention mask at all, with the logits
of all rows in memory."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from idlm.kernels.split_attention.op import visible
from idlm.masks import RowMeta, dense_mask
from idlm.train.data.layout import CERTAIN, IGNORE_LABEL, NO_ROWS, Sample, SampleRows, pack_rows
from idlm.train.model.attention import document_masks, flex_predicate, row_ranges
from idlm.train.objectives.base import Batch, Head, TermRequest, Terms
from idlm.train.objectives.curriculum import Stage
from idlm.train.objectives.full import FullDiffusion
from idlm.train.objectives.masked import LOWEST_RATE
from idlm.train.planning.dry_run import sample_text
from idlm.train.planning.flops import TokenCounts
from tests.tiny_training import MASK, HiddenStates, collated, random_sample, tiny_model

STOP = 7
TOLERANCE = 1e-5
ONE = torch.ones(1)
STAGE = Stage(index=0, stride=1, num_steps=1, clean_weight=0.0)


def objective_of(mask_region: str = "response", *, max_padding: int = 0) -> FullDiffusion:
    return FullDiffusion(
        mask_token_id=MASK, mask_region=mask_region, stop_token_ids=(STOP,), max_padding=max_padding
    )


def ending(sample: Sample) -> Sample:
    return Sample(token_ids=np.append(sample.token_ids[:-1], STOP), supervised=sample.supervised)


def terms_of(
    model: Any, batch: Batch, attention: str = "idlm_sdpa", coefficients: Tensor | None = ONE
) -> Terms:
    def compute(head: Head, hidden_BTD: Tensor) -> Terms:
        return objective_of().terms(
            head, hidden_BTD, batch, TermRequest(stage=STAGE, coefficients=coefficients)
        )

    return HiddenStates(model).terms(model, batch, attention, compute)


def plain_logits(model: Any, token_ids: list[int]) -> Tensor:
    """Logits [L, V] of one canvas, whose rows all see each other."""
    size = len(token_ids)
    everything = torch.ones(1, 1, size, size, dtype=torch.bool)
    ids, order = torch.tensor([token_ids]), torch.arange(size)[None]
    logits: Tensor = model(ids, position_ids=order, attention_mask=everything, use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("region", ["response", "all"])
def test_every_back_end_sees_whole_documents_and_nothing_else(region: str) -> None:
    """The dense mask, that of each document, the ranges of the kernel and the predicate of FlexAttention."""
    for seed in range(8):
        samples = [random_sample(seed + k, prompt=k, response=seed + 2) for k in range(3)]
        objective = objective_of(region, max_padding=5)
        documents = [objective.rows(ending(one), STAGE, (seed, k)) for k, one in enumerate(samples)]
        batch = collated(documents, padding=seed % 3)
        docs_T = batch["doc_ids"][0]
        meta = RowMeta(
            doc_ids=batch["doc_ids"],
            positions=batch["position_ids"],
            block_starts=batch["block_starts"],
            is_noisy=batch["is_noisy"],
            reach=batch["reach"],
        )
        expected_TT = (docs_T[:, None] == docs_T) & (docs_T >= 0)
        itself_TT = torch.eye(len(docs_T), dtype=torch.bool) & (docs_T < 0)
        assert torch.equal(dense_mask(meta)[0], expected_TT | itself_TT)
        by_document = document_masks(meta)
        assert by_document.rows.tolist() == list(range(sum(map(len, documents))))
        assert [mask.shape[-1] for mask in by_document.masks] == list(map(len, documents))
        assert all(bool(mask.all()) for mask in by_document.masks)
        see, rows_T = row_ranges(meta), torch.arange(len(docs_T))
        assert torch.equal(visible(see)[0], expected_TT)
        first = torch.zeros((), dtype=torch.int64)
        assert torch.equal(flex_predicate(see)(first, first, rows_T[:, None], rows_T[None]), expected_TT)


@pytest.mark.parametrize("attention", ["idlm_sdpa", "idlm_documents", "idlm_split"])
def test_loss_and_gradients_are_the_plain_references(attention: str) -> None:
    """One packed row of three documents; the second ends on a stop token, which more of them follow."""
    samples = [random_sample(1, prompt=6, response=11), ending(random_sample(2, prompt=3, response=6))]
    samples.append(random_sample(3, prompt=9, response=4))
    objective = objective_of(max_padding=6)
    documents = [objective.rows(one, STAGE, (8, k)) for k, one in enumerate(samples)]
    batch = collated(documents, padding=4)
    num_more = [len(rows) - len(one) for rows, one in zip(documents, samples, strict=True)]
    assert num_more[0] == num_more[2] == 0 < num_more[1]
    plain, packed = tiny_model("qwen3", "sdpa"), tiny_model("qwen3", attention)
    total, count = torch.zeros(()), 0
    for sample, rows, more in zip(samples, documents, num_more, strict=True):
        tokens, ids = [*sample.token_ids.tolist(), *[STOP] * more], rows.noisy.input_ids.tolist()
        rate = int(rows.noisy.mask_rates.max()) / CERTAIN
        logits = plain_logits(plain, ids)
        for index in range(len(tokens)):
            if ids[index] == MASK:
                assert index >= len(sample) or sample.supervised[index]
                total = total + functional.cross_entropy(logits[index], torch.tensor(tokens[index])) / rate
            else:
                assert ids[index] == tokens[index]
        count += int(sample.supervised.sum()) + more
    (total / count).backward()
    counted = objective.counts(batch, stage=STAGE, want_overlap=True)
    assert counted.tolist() == [count]
    terms = terms_of(packed, batch, attention, 1 / counted)
    assert terms.loss is not None
    terms.loss.backward()
    torch.testing.assert_close(terms.loss.detach(), (total / count).detach(), atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(terms.sums[0], total.detach(), atol=1e-4, rtol=TOLERANCE)
    for mine, true in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, true.grad, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_weights_make_the_expected_loss_the_nelbo() -> None:
    """All patterns of an answer of four, integrated over the mask rate, against the mean over all orders in
    which it may be revealed."""
    model, sample, size = tiny_model("qwen3"), random_sample(6, prompt=4, response=4), 4
    tokens = sample.token_ids
    grid, quadrature = np.polynomial.legendre.leggauss(8)
    rates = (LOWEST_RATE + (CERTAIN - LOWEST_RATE) * (grid + 1) / 2).round().astype(np.int64)
    expected, log_p = 0.0, {}
    for pattern in itertools.product([False, True], repeat=size):
        hidden = np.array([False] * 4 + list(pattern))
        if any(pattern):
            probs = plain_logits(model, np.where(hidden, MASK, tokens).tolist()).log_softmax(dim=-1)
            log_p[pattern] = probs[torch.arange(8), torch.from_numpy(tokens)][4:].tolist()
        rows = [
            objective_of().noisy_rows(tokens, sample.supervised, hidden, int(rate), block_size=len(tokens))
            for rate in rates
        ]
        for row, rate, quad in zip(rows, rates.tolist(), quadrature.tolist(), strict=True):
            p, num = rate / CERTAIN, sum(pattern)
            terms = terms_of(model, collated([SampleRows(noisy=row, clean=NO_ROWS)]), coefficients=None)
            expected += quad / 2 * p**num * (1 - p) ** (size - num) * float(terms.sums)
    nelbo = 0.0
    for order in itertools.permutations(range(size)):
        hidden_now = [True] * size
        for index in order:
            nelbo -= log_p[tuple(hidden_now)][index] / math.factorial(size)
            hidden_now[index] = False
    # The rates leave out the first thousandth of [0, 1].
    assert expected == pytest.approx(nelbo, rel=2e-3)


def test_the_draws_have_the_distribution_of_the_estimator() -> None:
    """One rate for the whole sample: weight times frequency of a pattern is the chance that a random order
    passes through it, per token still to reveal. Lengths of the padding are uniform."""
    sample, num_draws = ending(random_sample(1, prompt=1, response=4)), 3_000
    objective, padded = objective_of(), objective_of(max_padding=3)
    mean, square, lengths = np.zeros(16), np.zeros(16), np.zeros(4)
    for seed in range(num_draws):
        rates = objective.rows(sample, STAGE, (3, seed)).noisy.mask_rates[1:]
        pattern = int(((rates > 0) * [1, 2, 4, 8]).sum())
        assert len(set(rates[rates > 0].tolist())) <= 1
        weight = CERTAIN / rates.max() if pattern else 0.0
        mean[pattern] += weight / num_draws
        square[pattern] += weight**2 / num_draws
        lengths[len(padded.rows(sample, STAGE, (4, seed))) - len(sample)] += 1 / num_draws
    for pattern in range(1, 16):
        num = pattern.bit_count()
        error = math.sqrt(square[pattern] / num_draws)
        assert mean[pattern] == pytest.approx(1 / (num * math.comb(4, num)), abs=5 * error), f"{pattern=}"
    assert lengths == pytest.approx([1 / 4] * 4, abs=5 * 0.5 / math.sqrt(num_draws))


@pytest.mark.parametrize("region", ["response", "all"])
def test_properties_of_the_rows(region: str) -> None:
    objective, draw = objective_of(region, max_padding=9), np.random.default_rng(2)
    for seed in range(60):
        flags = draw.random(int(draw.integers(2, 40))) < 0.4
        flags[-2 if seed % 3 else -1] = True
        sample = Sample(token_ids=draw.integers(0, MASK, size=len(flags)), supervised=flags)
        sample = ending(sample) if seed % 2 else sample
        if not flags[1:].any():
            continue
        rows = objective.rows(sample, STAGE, (seed,))
        noisy, end = rows.noisy, len(flags) if region == "all" else int(np.flatnonzero(flags)[-1]) + 1
        is_masked, is_target = noisy.input_ids == MASK, noisy.labels != IGNORE_LABEL
        assert len(rows.clean) == 0
        assert not (is_masked & ~is_target).any(), "a token that is no target was hidden"
        assert np.array_equal(noisy.mask_rates > 0, is_masked)
        assert np.array_equal(noisy.positions, np.arange(len(noisy)))
        tokens = np.where(is_target, noisy.labels, noisy.input_ids)
        assert np.array_equal(tokens[:end], sample.token_ids[:end])
        assert (tokens[end:] == STOP).all()
        assert is_target[end:].all()
        assert len(noisy) == end or sample.token_ids[end - 1] == STOP
        wanted = np.arange(end) > 0 if region == "all" else flags[:end] & (np.arange(end) > 0)
        assert np.array_equal(is_target[:end], wanted)
        assert len(rows) <= objective.num_rows(len(sample), sample.num_targets)
        again = objective.rows(sample, STAGE, (seed,)).noisy
        assert np.array_equal(again.input_ids, noisy.input_ids)


def test_a_micro_batch_may_draw_no_mask() -> None:
    sample, model = random_sample(1, prompt=4, response=4), tiny_model("qwen3")
    noisy = objective_of().noisy_rows(
        sample.token_ids, sample.supervised, np.zeros(8, dtype=bool), CERTAIN, block_size=8
    )
    terms = terms_of(model, collated([SampleRows(noisy=noisy, clean=NO_ROWS)]))
    assert terms.loss is not None
    terms.loss.backward()
    assert float(terms.loss.detach()) == float(terms.sums) == 0.0
    assert all(value.grad is None or not value.grad.any() for value in model.parameters())


class Letters:
    """A tokenizer of one letter per id."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return "".join(chr(ord("A") + token_id) for token_id in token_ids)


def test_tokens_are_counted_and_shown_without_clean_rows() -> None:
    sample = Sample.from_pair([0, 1], [2, 3, STOP])
    rows = objective_of(max_padding=2).rows(sample, STAGE, (1,))
    batch = collated([rows], padding=3)
    assert int(batch["num_tokens"]) == len(rows)
    assert TokenCounts(*batch["fed"].tolist()).document_tokens == len(rows)
    assert TokenCounts(*batch["fed"].tolist()).noisy_pairs == len(rows) ** 2
    row = pack_rows([rows], len(rows), pad_token_id=0)
    shown = sample_text(row, Letters(), shift=0).plain
    assert shown == "|AB[[CDH" + "H" * (len(rows) - 5) + "]]"
