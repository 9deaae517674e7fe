"""Rows of a pass against their reference; the kernels compiled."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.step_rows import Lanes, Noise, RowTable, commit, map_slots, pack_rows
from tests.kernels.cases.step_rows import Case
from tests.kernels.hopper_compiler import assert_unspilled
from tests.kernels.references.step_rows import pack_rows_reference


@pytest.mark.parametrize("seed", range(16))
def test_rows_equal_the_reference(seed: int) -> None:
    case = Case(seed, "cpu")
    expected = pack_rows_reference(case.lanes, case.table, case.sequences, mask_token_id=case.mask_token_id)
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


@pytest.mark.sweep
@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("is_noise", [False, True])
def test_the_kernels_compile_for_hopper_without_spills(has_drafts: bool, is_noise: bool) -> None:
    lanes_Z, numbers_B = (torch.empty(num, dtype=torch.int64, device="meta") for num in (9, 200))
    table_YW = lanes_Z.new_empty(2, 7)
    drafts = (lanes_Z, lanes_Z.new_empty(9, 3)) if has_drafts else ()
    lanes = Lanes(lanes_Z, lanes_Z, lanes_Z, lanes_Z.new_empty(9, 4096), *drafts)
    table = RowTable(table_YW[:, 0], *[table_YW] * 4)
    mask = Noise(lanes_Z, lanes_Z, lanes_Z, low=1, high=151_669) if is_noise else 5

    def run() -> None:
        columns = {"lanes_B": numbers_B, "num_feed_B": numbers_B, "wants_B": numbers_B.bool()}
        rows = pack_rows(lanes, table, **columns, num_rows=999, mask_token_id=mask)
        pages_BP = numbers_B.new_empty(200, 64)
        map_slots(pages_BP, rows.sequence_R, rows.slots_R, rows.cu_rows_B1, page_size=16)
        emitted_BA = numbers_B.new_empty(200, 4)
        counts = {"num_emitted_B": numbers_B, "num_computed_B": numbers_B}
        commit(lanes, lanes_Z, lanes_B=numbers_B, token_ids_BA=emitted_BA, **counts)

    assert_unspilled(run, "pack_rows_kernel", "map_slots_kernel", "commit_kernel")
