"""Block and full diffusion against their definitions: visibility, loss and gradients, what a row may not see,
and the NELBO.

The references feed each sample by itself with the logits of all rows in memory: full diffusion as a canvas
under no attention mask at all, block diffusion as `[x_t | x_0]` with the whole sample in both halves, under a
dense mask written from the three rules."""

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
from idlm.masks import dense_mask
from idlm.train.data.layout import CERTAIN, IGNORE_LABEL, NO_ROWS, Sample, SampleRows, pack_rows
from idlm.train.model.attention import document_masks, flex_predicate, row_ranges
from idlm.train.objectives.base import Batch, Head, TermRequest, Terms
from idlm.train.objectives.block import BlockDiffusion
from idlm.train.objectives.curriculum import Stage
from idlm.train.objectives.full import FullDiffusion
from idlm.train.objectives.masked import LOWEST_RATE, MaskedDiffusion
from idlm.train.planning.dry_run import sample_text
from idlm.train.planning.flops import TokenCounts
from tests.tiny_training import MASK, HiddenStates, collated, meta_of, random_sample, tiny_model

STOP = 7
TOLERANCE = 1e-5
ONE = torch.ones(1)
KINDS = {"block": BlockDiffusion, "full": FullDiffusion}


def objective_of(kind: str, mask_region: str = "response", *, max_padding: int = 0) -> MaskedDiffusion:
    return KINDS[kind](
        mask_token_id=MASK,
        mask_region=mask_region,
        max_stride=8,
        stop_token_ids=(STOP,),
        max_padding=max_padding,
    )


def stage_of(block: int) -> Stage:
    return Stage(index=0, stride=block, num_steps=1, clean_weight=0.0)


STAGE = stage_of(1)
"""Of full diffusion, which has no strides."""


def ending(sample: Sample) -> Sample:
    return Sample(token_ids=np.append(sample.token_ids[:-1], STOP), supervised=sample.supervised)


def terms_of(
    model: Any, batch: Batch, attention: str = "idlm_sdpa", coefficients: Tensor | None = ONE
) -> Terms:
    """The terms, which both objectives share."""

    def compute(head: Head, hidden_BTD: Tensor) -> Terms:
        request = TermRequest(stage=STAGE, coefficients=coefficients)
        return objective_of("full").terms(head, hidden_BTD, batch, request)

    return HiddenStates(model).terms(model, batch, attention, compute)


def definition(length: int, block_size: int) -> Tensor:
    """Bool [2n, 2n] of `[x_t | x_0]`: a noisy block both ways, clean blocks before it; x_0 block-causal."""
    block = torch.arange(length) // block_size
    mine, theirs = block[:, None], block[None, :]
    noisy = torch.cat([theirs == mine, theirs < mine], dim=1)
    clean = torch.cat([torch.zeros(length, length, dtype=torch.bool), theirs <= mine], dim=1)
    return torch.cat([noisy, clean])


def plain_logits(model: Any, hidden: Tensor, tokens: Tensor, block_size: int | None) -> Tensor:
    """Logits [n, V] of `tokens`, masks where they are `hidden`, by a plain forward pass: in blocks, or
    (None) as one canvas whose rows all see each other."""
    num, order = len(tokens), torch.arange(len(tokens))
    ids, mask = torch.where(hidden, MASK, tokens), torch.ones(num, num, dtype=torch.bool)
    if block_size is not None:
        ids, order, mask = torch.cat([ids, tokens]), order.repeat(2), definition(num, block_size)
    options = {"position_ids": order[None], "attention_mask": mask[None, None], "use_cache": False}
    logits: Tensor = model(input_ids=ids[None], **options).logits[0, :num]
    return logits


@pytest.mark.parametrize("block_size", [2, 3, 4, 8])
@pytest.mark.parametrize("region", ["response", "all"])
def test_the_mask_is_the_definition_for_every_length(block_size: int, region: str) -> None:
    for length in range(2, 33):
        prompt = length // 3
        sample = Sample.from_pair(range(prompt), range(length - prompt))
        batch = collated(
            [objective_of("block", region).rows(sample, stage_of(block_size), (length,))] * 2,
            padding=length % 3,
        )
        mask = dense_mask(meta_of(batch))[0]
        positions, is_noisy, docs = batch["position_ids"][0], batch["is_noisy"][0], batch["doc_ids"][0]
        size = int(positions.max()) + 1
        indices = torch.where(is_noisy, positions, positions + size)
        expected = definition(size, block_size)[indices[:, None], indices] & (docs[:, None] == docs)
        expected[docs < 0] = False
        expected |= torch.eye(len(docs), dtype=torch.bool)
        assert torch.equal(mask, expected), f"{length=}"


@pytest.mark.parametrize("region", ["response", "all"])
def test_every_back_end_sees_whole_documents_and_nothing_else(region: str) -> None:
    """The dense mask, that of each document, the ranges of the kernel and the predicate of FlexAttention."""
    for seed in range(8):
        samples = [random_sample(seed + k, prompt=k, response=seed + 2) for k in range(3)]
        objective = objective_of("full", region, max_padding=5)
        documents = [objective.rows(ending(one), STAGE, (seed, k)) for k, one in enumerate(samples)]
        batch = collated(documents, padding=seed % 3)
        docs_T = batch["doc_ids"][0]
        meta = meta_of(batch)
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
@pytest.mark.parametrize(("kind", "block_size"), [("block", 4), ("block", 3), ("full", None)])
def test_loss_and_gradients_are_the_plain_references(
    kind: str, block_size: int | None, attention: str
) -> None:
    """One packed row of three documents, of which the second ends, inside a block, on a stop token, which
    more of them follow."""
    samples = [random_sample(1, prompt=6, response=11), ending(random_sample(2, prompt=3, response=6))]
    samples.append(random_sample(3, prompt=9, response=4))
    objective, stage = objective_of(kind, max_padding=6), stage_of(block_size or 1)
    documents = [objective.rows(one, stage, (8, k)) for k, one in enumerate(samples)]
    batch = collated(documents, padding=4)
    plain, packed = tiny_model("qwen3", "sdpa"), tiny_model("qwen3", attention)
    total, count, num_more = torch.zeros(()), 0, []
    for sample, rows in zip(samples, documents, strict=True):
        noisy = rows.noisy
        length = int(noisy.positions[-1]) + 1
        num_more.append(length - len(sample))
        tokens = torch.tensor([*sample.token_ids.tolist()[:length], *[STOP] * num_more[-1]])
        is_masked = noisy.input_ids == MASK
        assert np.array_equal(noisy.input_ids[~is_masked], tokens[noisy.positions[~is_masked]])
        assert np.append(sample.supervised, [True] * num_more[-1])[noisy.positions[is_masked]].all()
        hidden = torch.zeros(length, dtype=torch.bool)
        hidden[noisy.positions] = torch.from_numpy(is_masked)
        rates = dict(zip(noisy.positions.tolist(), (noisy.mask_rates / CERTAIN).tolist(), strict=True))
        logits = plain_logits(plain, hidden, tokens, block_size)
        for index in torch.nonzero(hidden).flatten().tolist():
            total = total + functional.cross_entropy(logits[index], tokens[index]) / rates[index]
        count += int(sample.supervised.sum()) + num_more[-1]
    assert num_more[0] == num_more[2] == 0
    assert num_more[1] > 0 or block_size == 3, "whose block it ends"
    (total / count).backward()
    counted = objective.counts(batch, stage=stage, want_overlap=True)
    assert counted.tolist() == [count]
    terms = terms_of(packed, batch, attention, 1 / counted)
    assert terms.loss is not None
    terms.loss.backward()
    torch.testing.assert_close(terms.loss.detach(), (total / count).detach(), atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(terms.sums[0], total.detach(), atol=1e-4, rtol=TOLERANCE)
    for mine, true in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, true.grad, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_a_prediction_never_depends_on_the_token_it_hides() -> None:
    """Another token under one mask: rows of its block and before it stay as they are, later blocks do not."""
    model, sample = tiny_model("qwen3"), random_sample(4, prompt=5, response=15)
    objective, stage, seed = objective_of("block"), stage_of(4), (11,)
    before = objective.rows(sample, stage, seed)
    masked = before.noisy.positions[before.noisy.input_ids == MASK]
    assert len(masked) >= 3
    for index in masked.tolist():
        token_ids = sample.token_ids.copy()
        token_ids[index] = (token_ids[index] + 1) % (MASK - 1)
        other = Sample(token_ids=token_ids, supervised=sample.supervised)
        batches = [collated([rows]) for rows in (before, objective.rows(other, stage, seed))]
        runner = HiddenStates(model)
        first, second = (runner.head(runner.hidden(model, batch, "idlm_sdpa")[0]) for batch in batches)
        is_noisy, starts = batches[0]["is_noisy"][0], batches[0]["block_starts"][0]
        blind = is_noisy & (starts <= index)
        assert torch.equal(first[blind], second[blind])
        later = is_noisy & (starts > index)
        assert not later.any() or not torch.equal(first[later], second[later])


@pytest.mark.parametrize(("kind", "block_size"), [("block", 4), ("full", None)])
@torch.no_grad()
def test_weights_make_the_expected_loss_the_nelbo(kind: str, block_size: int | None) -> None:
    """All patterns of an answer of four, one block, integrated over the mask rate, against the mean over all
    orders in which it may be revealed."""
    model, sample, size = tiny_model("qwen3"), random_sample(6, prompt=4, response=4), 4
    objective, tokens = objective_of(kind), torch.from_numpy(sample.token_ids)
    clean = objective.rows(sample, stage_of(size), (0,)).clean
    grid, quadrature = np.polynomial.legendre.leggauss(8)
    rates = (LOWEST_RATE + (CERTAIN - LOWEST_RATE) * (grid + 1) / 2).round().astype(np.int64)
    expected, log_p = 0.0, {}
    for pattern in itertools.product([False, True], repeat=size):
        hidden = np.array([False] * 4 + list(pattern))
        if any(pattern):
            logits = plain_logits(model, torch.from_numpy(hidden), tokens, block_size)
            log_p[pattern] = logits.log_softmax(dim=-1)[torch.arange(8), tokens][4:].tolist()
        for rate, quad in zip(rates.tolist(), quadrature.tolist(), strict=True):
            noisy = objective.noisy_rows(
                sample.token_ids, sample.supervised, hidden, np.full(8, rate), block_size=block_size or 8
            )
            p, num = rate / CERTAIN, sum(pattern)
            terms = terms_of(model, collated([SampleRows(noisy=noisy, clean=clean)]), coefficients=None)
            expected += quad / 2 * p**num * (1 - p) ** (size - num) * float(terms.sums)
    nelbo = 0.0
    for order in itertools.permutations(range(size)):
        hidden_now = [True] * size
        for index in order:
            nelbo -= log_p[tuple(hidden_now)][index] / math.factorial(size)
            hidden_now[index] = False
    # The rates leave out the first thousandth of [0, 1].
    assert expected == pytest.approx(nelbo, rel=2e-3)


def assert_unbiased(patterns: list[tuple[int, float]]) -> None:
    """Weight times frequency of every pattern of four masks is the chance that a random order passes through
    it, per token still to reveal."""
    mean, square = np.zeros(16), np.zeros(16)
    for pattern, weight in patterns:
        mean[pattern] += weight / len(patterns)
        square[pattern] += weight**2 / len(patterns)
    for pattern in range(1, 16):
        num, error = pattern.bit_count(), math.sqrt(square[pattern] / len(patterns))
        assert mean[pattern] == pytest.approx(1 / (num * math.comb(4, num)), abs=5 * error), f"{pattern=}"


def drawn(rates: np.ndarray) -> tuple[int, float]:
    """The pattern of masks among four rates, and its weight."""
    pattern = int(((rates > 0) * [1, 2, 4, 8]).sum())
    return pattern, CERTAIN / rates.max() if pattern else 0.0


@pytest.mark.sweep
def test_the_draws_of_blocks_have_the_distribution_of_the_estimator() -> None:
    """Patterns of two blocks are independent."""
    sample, num_draws = random_sample(1, prompt=0, response=9), 6_000
    objective, both, found = objective_of("block", "all"), np.zeros(2), []
    for seed in range(num_draws):
        rates = objective.rows(sample, stage_of(4), (3, seed)).noisy.mask_rates
        found.append(drawn(rates[4:8]))
        both += np.array([(rates[[3, 4]] > 0).all(), (rates[[4, 5]] > 0).all()])
    assert_unbiased(found)
    assert both / num_draws == pytest.approx([1 / 4, 1 / 3], abs=5 * 0.5 / math.sqrt(num_draws))


def test_the_draws_of_canvases_have_the_distribution_of_the_estimator() -> None:
    """One rate for the whole sample. Lengths of the padding are uniform."""
    sample, num_draws = ending(random_sample(1, prompt=1, response=4)), 3_000
    objective, padded = objective_of("full"), objective_of("full", max_padding=3)
    lengths, found = np.zeros(4), []
    for seed in range(num_draws):
        rates = objective.rows(sample, STAGE, (3, seed)).noisy.mask_rates[1:]
        assert len(set(rates[rates > 0].tolist())) <= 1
        found.append(drawn(rates))
        lengths[len(padded.rows(sample, STAGE, (4, seed))) - len(sample)] += 1 / num_draws
    assert_unbiased(found)
    assert lengths == pytest.approx([1 / 4] * 4, abs=5 * 0.5 / math.sqrt(num_draws))


@pytest.mark.parametrize("block_size", [2, 3, 4, 8])
@pytest.mark.parametrize("region", ["response", "all"])
def test_properties_of_rows_in_blocks(block_size: int, region: str) -> None:
    objective, draw = objective_of("block", region), np.random.default_rng(block_size)
    for seed in range(60):
        flags = draw.random(int(draw.integers(2, 40))) < 0.4
        flags[-1] = True
        sample = Sample(token_ids=draw.integers(0, MASK, size=len(flags)), supervised=flags)
        sample = ending(sample) if seed % 2 else sample
        rows = objective.rows(sample, stage_of(block_size), (seed,))
        noisy, clean, num = rows.noisy, rows.clean, len(sample)
        is_masked, is_target = noisy.input_ids == MASK, noisy.labels != IGNORE_LABEL
        assert not (is_masked & ~is_target).any(), "a token that is no target was hidden"
        assert noisy.mask_rates is not None
        assert ((noisy.mask_rates > 0) == is_masked).all()
        own = noisy.positions < num
        assert np.array_equal(
            noisy.labels[own & is_target], sample.token_ids[noisy.positions[own & is_target]]
        )
        wanted = set(range(1, num) if region == "all" else (np.flatnonzero(flags[1:]) + 1).tolist())
        assert wanted == set(noisy.positions[own & is_target].tolist())
        assert set((noisy.positions // block_size).tolist()) == {index // block_size for index in wanted}
        assert (noisy.labels[~own] == STOP).all()
        ends_on_stop = sample.token_ids[-1] == STOP
        assert int(noisy.positions[-1]) + 1 == (-(-num // block_size) * block_size if ends_on_stop else num)
        assert np.array_equal(clean.input_ids, sample.token_ids)
        assert (clean.labels == IGNORE_LABEL).all()
        assert len(rows) <= objective.num_rows(len(sample), sample.num_targets)
        bound = objective.num_rows(np.array([num]), np.array([flags[1:].sum()]))
        assert bound.tolist() == [objective.num_rows(len(sample), sample.num_targets)]


@pytest.mark.parametrize("region", ["response", "all"])
def test_properties_of_the_rows_of_a_canvas(region: str) -> None:
    objective, draw = objective_of("full", region, max_padding=9), np.random.default_rng(2)
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
    noisy = objective_of("full").noisy_rows(
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
    rows = objective_of("full", max_padding=2).rows(sample, STAGE, (1,))
    batch = collated([rows], padding=3)
    assert int(batch["num_tokens"]) == len(rows)
    assert TokenCounts(*batch["fed"].tolist()).document_tokens == len(rows)
    assert TokenCounts(*batch["fed"].tolist()).noisy_pairs == len(rows) ** 2
    row = pack_rows([rows], len(rows), pad_token_id=0)
    shown = sample_text(row, Letters(), shift=0).plain
    assert shown == "|AB[[CDH" + "H" * (len(rows) - 5) + "]]"
