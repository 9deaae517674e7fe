"""Slices of wanted rows: consecutive, of nearly equal size, and never within a group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from idlm.infer.state.batch import WantedRows


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
