"""The ablation without the shift of logits: what its masks predict and see, what its drafts compare with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.training.studies.study_no_shift import NEAREST, WithoutShift
from idlm.masks import RowMeta, dense_mask
from idlm.semantics import Semantics
from idlm.train.data.layout import Sample, SampleRows, pack_rows
from idlm.train.objectives.curriculum import Stage
from idlm.train.objectives.idlm import IntrospectiveConsistency

MASK = 99
SAMPLE = Sample.from_pair([10, 11, 12], [20, 21, 22, 23, 24, 25, 26])


def rows_of(kind: type[IntrospectiveConsistency], stride: int) -> SampleRows:
    stage = Stage(index=0, stride=stride, num_steps=1, clean_weight=0.2)
    return kind(mask_token_id=MASK, mask_region="response").rows(SAMPLE, stage, (0,))


@pytest.mark.parametrize("stride", [2, 3, 4])
def test_a_mask_predicts_its_own_token_from_clean_tokens_before_its_block(stride: int) -> None:
    rows = rows_of(WithoutShift, stride)
    packed = pack_rows([rows], len(rows), pad_token_id=0)
    fields = ("doc_ids", "block_starts", "is_noisy", "reach")
    meta = RowMeta(
        positions=torch.from_numpy(packed["position_ids"]),
        **{name: torch.from_numpy(packed[name]) for name in fields},
    )
    seen, num = dense_mask(meta).numpy(), len(rows.noisy)
    assert num == 7 and set(rows.noisy.input_ids) == {MASK}
    for row in range(num):
        place = int(rows.noisy.positions[row])
        assert rows.noisy.labels[row] == SAMPLE.token_ids[place]
        last_clean = int(np.flatnonzero(seen[row, num:]).max())
        # Masks of a block predict the tokens behind the last clean one, the first of them the next.
        assert place - last_clean == row % (stride - 1) + NEAREST
        masks = row % (stride - 1) + 1
        assert np.array_equal(np.flatnonzero(seen[row, :num]), np.arange(row - masks + 1, row + 1))


def test_all_else_is_as_with_the_shift() -> None:
    """Also which clean row predicts the token of a mask: the overlap of the two is the acceptance."""
    mine, other = rows_of(WithoutShift, 4), rows_of(IntrospectiveConsistency, 4)
    assert np.array_equal(mine.noisy.labels, other.noisy.labels)
    for name in ("input_ids", "positions", "block_starts", "labels"):
        assert np.array_equal(getattr(mine.clean, name), getattr(other.clean, name))
    assert np.array_equal(mine.noisy.labels, mine.clean.labels[mine.clean.labels >= 0])
    for rows, nearest in ((mine, NEAREST), (other, 2)):
        last_clean = rows.noisy.block_starts - 1
        distances = np.searchsorted(SAMPLE.token_ids, rows.noisy.labels) - last_clean
        assert distances.tolist() == [nearest, nearest + 1, nearest + 2] * 2 + [nearest]


def test_no_decoder_takes_its_checkpoint_for_one_that_drafts() -> None:
    objective = WithoutShift(mask_token_id=MASK, mask_region="response", max_stride=4)
    assert objective.semantics(4) == Semantics()
