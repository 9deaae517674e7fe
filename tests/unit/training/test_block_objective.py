"""Block diffusion against its definition: visibility, loss and gradients, what it may not see, and the NELBO.

The reference lays every sample out by itself as `[x_t | x_0]` with the whole sample in both halves, under a
dense mask written from the three rules, with the logits of all rows in memory."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from idlm.masks import RowMeta, dense_mask
from idlm.train.data.dataset import PackedDataset
from idlm.train.data.layout import CERTAIN, IGNORE_LABEL, Sample, SampleRows
from idlm.train.objectives.base import Batch, Head, TermRequest, Terms
from idlm.train.objectives.block import BlockDiffusion
from idlm.train.objectives.curriculum import Curriculum, Stage
from idlm.train.objectives.masked import LOWEST_RATE
from tests.tiny_training import MASK, HiddenStates, collated, random_sample, tiny_model

STOP = 7
TOLERANCE = 1e-5
ONE = torch.ones(1)


def objective_of(mask_region: str = "response", *, max_stride: int = 8) -> BlockDiffusion:
    return BlockDiffusion(
        mask_token_id=MASK, mask_region=mask_region, max_stride=max_stride, stop_token_ids=(STOP,)
    )


def stage_of(block: int) -> Stage:
    return Stage(index=0, stride=block, num_steps=1, clean_weight=0.0)


def ending(sample: Sample) -> Sample:
    return Sample(token_ids=np.append(sample.token_ids[:-1], STOP), supervised=sample.supervised)


def terms_of(
    model: Any, batch: Batch, *, attention: str = "idlm_sdpa", coefficients: Tensor | None = ONE
) -> Terms:
    objective, stage = objective_of(), stage_of(4)

    def compute(head: Head, hidden_BTD: Tensor) -> Terms:
        return objective.terms(head, hidden_BTD, batch, TermRequest(stage=stage, coefficients=coefficients))

    return HiddenStates(model).terms(model, batch, attention, compute)


def logits_of(model: Any, batch: Batch) -> Tensor:
    runner = HiddenStates(model)
    return runner.head(runner.hidden(model, batch, "idlm_sdpa")[0])


def definition(length: int, block_size: int) -> Tensor:
    """Bool [2n, 2n] of `[x_t | x_0]`: a noisy block both ways, clean blocks before it; x_0 block-causal."""
    block = torch.arange(length) // block_size
    mine, theirs = block[:, None], block[None, :]
    noisy = torch.cat([theirs == mine, theirs < mine], dim=1)
    clean = torch.cat([torch.zeros(length, length, dtype=torch.bool), theirs <= mine], dim=1)
    return torch.cat([noisy, clean])


def dense_logits(model: Any, hidden: Tensor, tokens: Tensor, block_size: int) -> Tensor:
    """Logits [n, V] of the noisy half, of `hidden` tokens in x_t, by a plain forward pass."""
    order = torch.arange(len(tokens))
    return model(
        input_ids=torch.cat([torch.where(hidden, MASK, tokens), tokens])[None],
        position_ids=torch.cat([order, order])[None],
        attention_mask=definition(len(tokens), block_size)[None, None],
        use_cache=False,
    ).logits[0, : len(tokens)]


@pytest.mark.parametrize("block_size", [2, 3, 4, 8])
@pytest.mark.parametrize("region", ["response", "all"])
def test_the_mask_is_the_definition_for_every_length(block_size: int, region: str) -> None:
    for length in range(2, 33):
        prompt = length // 3
        sample = Sample.from_pair(range(prompt), range(length - prompt))
        batch = collated(
            [objective_of(region).rows(sample, stage_of(block_size), (length,))] * 2, padding=length % 3
        )
        mask = dense_mask(
            RowMeta(
                doc_ids=batch["doc_ids"][0],
                positions=batch["position_ids"][0],
                block_starts=batch["block_starts"][0],
                is_noisy=batch["is_noisy"][0],
                reach=batch["reach"][0],
            )
        )
        positions, is_noisy, docs = batch["position_ids"][0], batch["is_noisy"][0], batch["doc_ids"][0]
        size = int(positions.max()) + 1
        indices = torch.where(is_noisy, positions, positions + size)
        expected = definition(size, block_size)[indices[:, None], indices] & (docs[:, None] == docs)
        expected[docs < 0] = False
        expected |= torch.eye(len(docs), dtype=torch.bool)
        assert torch.equal(mask, expected), f"{length=}"


@pytest.mark.parametrize("attention", ["idlm_sdpa", "idlm_documents", "idlm_split"])
@pytest.mark.parametrize("block_size", [4, 3])
def test_loss_and_gradients_are_the_dense_references(attention: str, block_size: int) -> None:
    """One packed row of three documents, of which the second ends inside a block, on a stop token."""
    samples = [random_sample(1, prompt=6, response=11), ending(random_sample(2, prompt=3, response=6))]
    samples.append(random_sample(3, prompt=9, response=4))
    documents = [objective_of().rows(one, stage_of(block_size), (5, k)) for k, one in enumerate(samples)]
    batch = collated(documents, padding=4)
    plain, packed = tiny_model("qwen3", "sdpa"), tiny_model("qwen3", attention)
    total, count = torch.zeros(()), 0
    for sample, rows in zip(samples, documents, strict=True):
        noisy = rows.noisy
        length = int(noisy.positions[-1]) + 1
        fill = [STOP] * (length - len(sample))
        tokens = torch.tensor([*sample.token_ids.tolist()[:length], *fill])
        hidden = torch.zeros(length, dtype=torch.bool)
        hidden[noisy.positions] = torch.from_numpy(noisy.input_ids == MASK)
        rates = dict(zip(noisy.positions.tolist(), (noisy.mask_rates / CERTAIN).tolist(), strict=True))
        logits = dense_logits(plain, hidden, tokens, block_size)
        for index in torch.nonzero(hidden).flatten().tolist():
            total = total + functional.cross_entropy(logits[index], tokens[index]) / rates[index]
        count += int(sample.supervised.sum()) + len(fill)
    (total / count).backward()
    counted = objective_of().counts(batch, stage=stage_of(block_size), want_overlap=True)
    assert counted.tolist() == [count]
    terms = terms_of(packed, batch, attention=attention, coefficients=1 / counted)
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
    objective, stage, seed = objective_of(), stage_of(4), (11,)
    before = objective.rows(sample, stage, seed)
    masked = before.noisy.positions[before.noisy.input_ids == MASK]
    assert len(masked) >= 3
    for index in masked.tolist():
        token_ids = sample.token_ids.copy()
        token_ids[index] = (token_ids[index] + 1) % (MASK - 1)
        other = Sample(token_ids=token_ids, supervised=sample.supervised)
        batches = [collated([rows]) for rows in (before, objective.rows(other, stage, seed))]
        first, second = (logits_of(model, batch) for batch in batches)
        is_noisy, starts = batches[0]["is_noisy"][0], batches[0]["block_starts"][0]
        blind = is_noisy & (starts <= index)
        assert torch.equal(first[blind], second[blind])
        later = is_noisy & (starts > index)
        assert not later.any() or not torch.equal(first[later], second[later])


def test_weights_make_the_expected_loss_the_nelbo() -> None:
    """All patterns of a block of four, integrated over the mask rate, against the mean over all orders in
    which the block may be revealed."""
    model, sample, size = tiny_model("qwen3"), random_sample(6, prompt=4, response=4), 4
    objective = objective_of()
    tokens, is_target = torch.from_numpy(sample.token_ids), sample.supervised
    grid, quadrature = np.polynomial.legendre.leggauss(8)
    rates = (LOWEST_RATE + (CERTAIN - LOWEST_RATE) * (grid + 1) / 2).round().astype(np.int64)
    expected, log_p = 0.0, {}
    for pattern in itertools.product([False, True], repeat=size):
        hidden = np.array([False] * 4 + list(pattern))
        if any(pattern):
            with torch.no_grad():
                probs = dense_logits(model, torch.from_numpy(hidden), tokens, size).log_softmax(dim=-1)
            log_p[pattern] = probs[torch.arange(8), tokens][4:].tolist()
        clean = objective.rows(sample, stage_of(size), (0,)).clean
        for rate, quad in zip(rates.tolist(), quadrature.tolist(), strict=True):
            all_rates = np.full(8, rate)
            noisy = objective.noisy_rows(sample.token_ids, is_target, hidden, all_rates, block_size=size)
            p, num = rate / CERTAIN, sum(pattern)
            chance = p**num * (1 - p) ** (size - num)
            terms = terms_of(model, collated([SampleRows(noisy=noisy, clean=clean)]), coefficients=None)
            expected += quad / 2 * chance * float(terms.sums)
    nelbo = 0.0
    for order in itertools.permutations(range(size)):
        hidden_now = [True] * size
        for index in order:
            nelbo -= log_p[tuple(hidden_now)][index] / math.factorial(size)
            hidden_now[index] = False
    # The rates leave out the first thousandth of [0, 1].
    assert expected == pytest.approx(nelbo, rel=2e-3)


@pytest.mark.sweep
def test_the_draws_have_the_distribution_of_the_estimator() -> None:
    """Weight times frequency of every pattern of a block is the chance that a random order passes through it,
    per token still to reveal; patterns of two blocks are independent."""
    sample, size, num_draws = random_sample(1, prompt=0, response=9), 4, 6_000
    objective, stage = objective_of("all"), stage_of(size)
    mean, square, both = np.zeros(16), np.zeros(16), np.zeros(2)
    for seed in range(num_draws):
        noisy = objective.rows(sample, stage, (3, seed)).noisy
        rates = noisy.mask_rates[4:8]
        pattern = int(((rates > 0) * [1, 2, 4, 8]).sum())
        weight = CERTAIN / rates.max() if pattern else 0.0
        mean[pattern] += weight / num_draws
        square[pattern] += weight**2 / num_draws
        both += np.array([(noisy.mask_rates[[3, 4]] > 0).all(), (noisy.mask_rates[[4, 5]] > 0).all()])
    for pattern in range(1, 16):
        num = pattern.bit_count()
        error = math.sqrt(square[pattern] / num_draws)
        assert mean[pattern] == pytest.approx(1 / (num * math.comb(size, num)), abs=5 * error), f"{pattern=}"
    assert both / num_draws == pytest.approx([1 / 4, 1 / 3], abs=5 * 0.5 / math.sqrt(num_draws))


@pytest.mark.parametrize("block_size", [2, 3, 4, 8])
@pytest.mark.parametrize("region", ["response", "all"])
def test_properties_of_the_rows(block_size: int, region: str) -> None:
    objective, draw = objective_of(region), np.random.default_rng(block_size)
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


def test_a_micro_batch_may_draw_no_mask() -> None:
    sample, model = random_sample(1, prompt=4, response=4), tiny_model("qwen3")
    nothing = np.zeros(8, dtype=bool)
    rows = objective_of().rows(sample, stage_of(4), (0,))
    noisy = objective_of().noisy_rows(
        sample.token_ids, sample.supervised, nothing, np.full(8, CERTAIN), block_size=4
    )
    terms = terms_of(model, collated([SampleRows(noisy=noisy, clean=rows.clean)]))
    assert terms.loss is not None
    terms.loss.backward()
    assert float(terms.loss.detach()) == float(terms.sums) == 0.0
    assert all(value.grad is None or not value.grad.any() for value in model.parameters())


class Two:
    """Two samples, again and again."""

    num_samples = None

    def sample(self, index: int) -> Sample:
        return random_sample(index % 2, prompt=5, response=20)

    def cost(self, index: int) -> int:
        return 25


def test_an_item_is_a_function_of_its_index_and_its_noise_differs() -> None:
    def dataset(seed: int) -> PackedDataset:
        made = PackedDataset(
            Two(),  # type: ignore[arg-type]
            objective_of(),
            max_length=40,
            row_length=130,
            overlong="error",
            pad_token_id=0,
            seed=seed,
        )
        made.curriculum = Curriculum(stages=(stage_of(4),), global_batch=8)
        return made

    first, again, other = dataset(1), dataset(1), dataset(2)
    seen = set()
    for item in (7, 0, 3):
        mine, same = first[item], again[item]
        assert all(np.array_equal(mine[name], same[name]) for name in mine)
        assert not np.array_equal(mine["mask_rates"], other[item]["mask_rates"])
        # The documents of a row, and rows with the same documents, are masked differently.
        for doc in range(2):
            seen.add(tuple(mine["mask_rates"][mine["is_noisy"] & (mine["doc_ids"] == doc)].tolist()))
    assert len(seen) == 6
