"""Rows of a pass against their reference, and the interpreted kernels against plain torch."""

from __future__ import annotations

import pytest

from tests.kernels.cases.step_rows import MASK_ID, Case
from tests.kernels.references.step_rows import pack_rows_reference


@pytest.mark.parametrize("seed", range(40))
def test_rows_equal_the_reference(seed: int) -> None:
    case = Case(seed, "cpu")
    expected = pack_rows_reference(case.lanes, case.table, case.sequences, mask_token_id=MASK_ID)
    counts = [len(rows) for rows in expected]
    packed = case.pack(sum(counts) + case.padding)
    assert packed.cu_rows_B1.diff().tolist() == counts
    columns = ("token_ids_R", "positions_R", "slots_R", "limits_R", "branch_starts_R", "is_mask_R")
    found = list(zip(*(getattr(packed, name).tolist() for name in columns), strict=True))
    assert found[: sum(counts)] == [row for rows in expected for row in rows]
    assert not any(row[-1] for row in found[sum(counts) :])
    owners = [b for b, count in enumerate(counts) for _ in range(count)]
    assert packed.sequence_R.tolist()[: sum(counts)] == owners
    width = case.table.source_YW.shape[1]
    wanted = packed.logit_rows_X.view(-1, width).tolist()
    for b, (lane, num_feed, wants) in enumerate(case.sequences):
        is_open = bool(case.lanes.num_known_Z[lane] < case.lanes.ends_Z[lane])
        assert bool(packed.advances_B[b]) == is_open
        assert bool(packed.samples_B[b]) == (wants and is_open)
        first, end = sum(counts[:b]) + num_feed - 1, sum(counts[: b + 1])
        assert wanted[b] == [max(0, min(first + offset, end - 1)) for offset in range(width)]


def test_a_commit_appends_and_counts() -> None:
    case = Case(3, "cpu")
    before = {name: getattr(case.lanes, name).clone() for name in ("num_known_Z", "num_computed_Z")}
    steps = case.steps_Z.clone()
    after = case.run()
    for b, (lane, _, _) in enumerate(case.sequences):
        emitted, start = case.num_emitted[b], int(before["num_known_Z"][lane])
        assert (
            after["tokens"][lane, start : start + emitted].tolist() == case.emitted_BA[b, :emitted].tolist()
        )
        assert int(after["known"][lane]) == start + emitted
        assert int(after["computed"][lane]) == int(before["num_computed_Z"][lane]) + case.num_computed[b]
        assert int(after["steps"][lane]) == int(steps[lane]) + (emitted > 0)
