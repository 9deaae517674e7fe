"""Wanted rows: slices are consecutive, of nearly equal size, and never within a group; the last layer ends
with wanted rows alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.infer.models.dense import DenseLayer
from idlm.infer.state.batch import WantedRows
from tests.contracts.engines import MASK_ID, build_engine


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("num_positions", [1, 2, 7])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7, 14])
def test_no_slice_divides_a_group(num_positions: int, num_chunks: int, group: int) -> None:
    """A plan that asks for more slices than there are groups gets one of each group."""
    num_rows = group * num_positions
    hidden_RD = torch.arange(40.0)[:, None]
    rows_X = torch.arange(num_rows) * 2
    wanted = WantedRows(
        hidden_RD,
        rows_X,
        lambda hidden: hidden + 1,
        num_chunks=lambda number, row_bytes: min(number, num_chunks),
        group=group,
    )
    slices = []

    def propose(logits_YV: Tensor, rows: slice) -> tuple[Tensor, ...]:
        slices.append(rows)
        assert len(logits_YV) == rows.stop - rows.start > 0
        return (logits_YV[::group, 0],)

    [found] = wanted.proposals(propose)
    assert torch.equal(found, hidden_RD[rows_X][::group, 0] + 1)
    assert len(slices) == min(num_chunks, num_positions)
    assert all(rows.start % group == rows.stop % group == 0 for rows in slices)
    sizes = [rows.stop - rows.start for rows in slices]
    assert max(sizes) - min(sizes) <= group


@pytest.mark.parametrize(
    ("decoder", "options", "num_fed", "num_wanted"),
    [("ar", {}, 9, 1), ("isd", {"stride": 2, "rejection_strategy": "tree", "mask_token_id": MASK_ID}, 10, 3)],
    ids=str,
)
def test_the_last_layer_ends_with_the_wanted_rows_of_a_prompt(
    toy: Path,
    decoder: str,
    options: dict[str, Any],
    num_fed: int,
    num_wanted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build_engine(toy, decoder, prefix_cache=False, **options)
    feed_forward, num_rows = DenseLayer.feed_forward, list[int]()

    def counted(self: DenseLayer, normed_RD: Tensor, *inputs: Any) -> Tensor:
        num_rows.append(len(normed_RD))
        return feed_forward(self, normed_RD, *inputs)

    monkeypatch.setattr(DenseLayer, "feed_forward", counted)
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.generate([[1] * 9], params)
    assert num_rows == [num_fed, num_wanted]
    num_rows.clear()
    engine.generate([[1] * 9], replace(params, prompt_logprobs=0))
    assert num_rows == [num_fed, num_fed]
