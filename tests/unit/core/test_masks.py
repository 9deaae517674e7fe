"""The mask against a brute-force reading of the rule, for every short length, packed and not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from idlm.kernels.paged_attention import AttentionRows
from idlm.masks import RowMeta, dense_mask
from idlm.train.data.layout import Sample, pack_rows
from idlm.train.objectives.curriculum import Stage
from idlm.train.objectives.idlm import IntrospectiveConsistency
from tests.kernels.references.paged_attention import paged_attention_reference

MASK = 99


def packed_meta(
    lengths: list[tuple[int, int]], stride: int, *, padding: int = 0, mask_region: str = "response"
) -> RowMeta:
    """Meta of one packed row of (prompt length, response length) documents."""
    objective = IntrospectiveConsistency(mask_token_id=MASK, mask_region=mask_region)
    stage = Stage(index=0, stride=stride, num_steps=1, clean_weight=0.2)
    samples = [Sample.from_pair(range(prompt), range(response)) for prompt, response in lengths]
    total = sum(objective.num_rows(len(sample), sample.num_targets) for sample in samples)
    row = pack_rows([objective.rows(s, stage) for s in samples], total + padding, pad_token_id=0)
    return RowMeta(
        doc_ids=torch.from_numpy(row["doc_ids"]),
        positions=torch.from_numpy(row["position_ids"]),
        block_starts=torch.from_numpy(row["block_starts"]),
        is_noisy=torch.from_numpy(row["is_noisy"]),
    )


def brute_force(meta: RowMeta) -> np.ndarray:
    """The rule, word by word, one pair at a time."""
    rows = list(
        zip(
            meta.doc_ids.tolist(),
            meta.positions.tolist(),
            meta.block_starts.tolist(),
            meta.is_noisy.tolist(),
            strict=True,
        )
    )
    seen = np.zeros((len(rows), len(rows)), dtype=bool)
    for q, (doc_q, pos_q, start_q, noisy_q) in enumerate(rows):
        for k, (doc_k, pos_k, start_k, noisy_k) in enumerate(rows):
            if doc_q == -1:
                seen[q, k] = q == k
            elif doc_q != doc_k:
                continue
            elif noisy_q and noisy_k:
                seen[q, k] = start_q == start_k and pos_k <= pos_q
            elif noisy_q:
                seen[q, k] = pos_k < start_q
            elif not noisy_k:
                seen[q, k] = pos_k <= pos_q
    return seen


@pytest.mark.parametrize("stride", [2, 3, 4, 5, 16])
@pytest.mark.parametrize("mask_region", ["response", "all"])
def test_dense_mask_is_the_rule_for_every_length(stride: int, mask_region: str) -> None:
    for length in range(2, 33):
        prompt = length // 3
        meta = packed_meta([(prompt, length - prompt)], stride, padding=length % 3, mask_region=mask_region)
        assert np.array_equal(dense_mask(meta).numpy(), brute_force(meta)), f"{length=}"


@pytest.mark.parametrize("stride", [2, 3, 4, 5, 16])
def test_packed_documents_never_see_each_other(stride: int) -> None:
    rng = np.random.default_rng(stride)
    for _ in range(8):
        lengths = [(int(rng.integers(0, 6)), int(rng.integers(2, 9))) for _ in range(rng.integers(2, 5))]
        meta = packed_meta(lengths, stride, padding=3)
        mask = dense_mask(meta)
        assert np.array_equal(mask.numpy(), brute_force(meta))
        other_doc = meta.doc_ids[:, None] != meta.doc_ids[None, :]
        assert not (mask & other_doc).any()


def visible_slots(
    limits: torch.Tensor, branch_starts: torch.Tensor, own: torch.Tensor, num_slots: int
) -> torch.Tensor:
    """Bool [R, S] of one sequence: the slots to which attention gives weight, read off one-hot values."""
    rows = AttentionRows(
        cu_rows=torch.tensor([0, len(own)]),
        block_table=torch.zeros(1, 1, dtype=torch.int64),
        page_size=num_slots,
        own_slots_R=own,
        limits_R=limits,
        branch_starts_R=branch_starts,
        max_rows=len(own),
        max_slots=num_slots,
    )
    q_RNH, k_SKH = torch.zeros(len(own), 1, num_slots), torch.zeros(num_slots, 1, num_slots)
    return (
        paged_attention_reference(q_RNH, k_SKH, torch.eye(num_slots)[:, None], rows=rows, scale=1.0)[:, 0] > 0
    )


def test_the_rows_of_the_engine_see_what_the_rows_of_training_see() -> None:
    """The engine feeds the last token and its masks after a clean prefix; its two ranges per row give the
    visibility of the noisy rows of a block."""
    meta = packed_meta([(6, 3)], 4)
    mask = dense_mask(meta)
    noisy = torch.nonzero(meta.is_noisy).squeeze(-1)
    start = int(meta.block_starts[noisy[0]])
    clean_seen = mask[noisy][:, ~meta.is_noisy]
    noisy_seen = mask[noisy][:, noisy]
    slots = start + torch.arange(3)
    layout = visible_slots(torch.full((3,), start), torch.full((3,), start), slots, start + 3)
    assert torch.equal(layout[:, :start], clean_seen[:, :start])
    assert not clean_seen[:, start:].any()
    assert torch.equal(layout[:, start:], noisy_seen)
