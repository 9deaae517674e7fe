"""Every strategy's row layouts against brute force: what a row may see, and where a draft will be tested."""

from __future__ import annotations

import random

import pytest
import torch

from idlm.infer.decoders.rejection import (
    MASK,
    NO_ROW,
    STRATEGIES,
    DraftBuffer,
    DraftLayout,
    RowLayout,
    draft_buffers,
    layouts,
    strategy_of,
)

NAMES = [*STRATEGIES.names(), "branch_2", "branch_3", "branch_4"]
CASES = [
    (name, num_masks, max_drafts) for name in NAMES for num_masks in range(8) for max_drafts in (num_masks, 7)
]
"""A sequence may come from a layout of a larger stride, with more drafts than there are masks."""
OF_ONE_STRIDE = [(name, num_masks) for name in NAMES if name != "alternate" for num_masks in range(8)]


def _layouts(strategy: str, num_masks: int, max_drafts: int | None = None) -> list[RowLayout]:
    return layouts(strategy, num_masks=num_masks, max_drafts=num_masks if max_drafts is None else max_drafts)


def _visible(layout: RowLayout, row: int) -> set[int]:
    """Rows that `row` sees, by the two ranges of the attention contract."""
    _, _, limit, branch_start = layout.rows[row]
    return set(range(limit)) | set(range(branch_start, row + 1))


def _owner(layout: RowLayout, row: int) -> tuple[int, int] | None:
    """(parent chain row, position in its group) of a mask row, None for a chain row; counted off one by
    one."""
    walk = layout.num_drafts + 1
    for parent in layout.mask_parents:
        for offset in range(layout.num_masks):
            if walk == row:
                return parent, offset
            walk += 1
    return None


def _tested_position(num_accepted: int, draft: int) -> int:
    """From the old pending token: after `a` accepted the new one is at a + 1, draft d (from 0) behind it."""
    return num_accepted + 1 + draft + 1


def assert_rows_see_their_prefix(layouts: list[RowLayout]) -> None:
    """Chain rows see the chain up to themselves; masks their parent's prefix and their own group so far."""
    for layout in layouts:
        assert len(layout.rows) == layout.width
        for row, (source, position, _, _) in enumerate(layout.rows):
            owner = _owner(layout, row)
            if owner is None:
                assert source == row
                assert position == row
                assert _visible(layout, row) == set(range(row + 1))
            else:
                parent, offset = owner
                assert source == MASK
                assert position == parent + 1 + offset
                assert _visible(layout, row) == set(range(parent + 1)) | set(range(row - offset, row + 1))


@pytest.mark.parametrize(("strategy", "num_masks", "max_drafts"), CASES)
def test_each_row_sees_exactly_its_prefix(strategy: str, num_masks: int, max_drafts: int) -> None:
    assert_rows_see_their_prefix(_layouts(strategy, num_masks, max_drafts))


@pytest.mark.parametrize(("strategy", "num_masks", "max_drafts"), CASES)
def test_each_draft_is_drawn_where_it_will_be_tested(strategy: str, num_masks: int, max_drafts: int) -> None:
    """A row's law is of the token at its position + 1, and it may not hang on a draft that was rejected."""
    for draft_buffer, layout in zip(
        draft_buffers(max_drafts), _layouts(strategy, num_masks, max_drafts), strict=True
    ):
        assert layout.num_masks <= num_masks
        assert layout.num_drafts <= min(draft_buffer.num_drafts, num_masks)
        for num_accepted, (draft_rows, following) in enumerate(
            zip(layout.draft_rows, layout.next_buffers, strict=True)
        ):
            assert following.num_drafts == len(draft_rows) <= num_masks
            for draft, row in enumerate(draft_rows):
                assert 0 <= row < layout.width
                assert layout.rows[row][1] + 1 == _tested_position(num_accepted, draft)
                owner = _owner(layout, row)
                assert (owner is None) == following.from_verify_rows
                if owner is not None:
                    assert owner[0] <= num_accepted, "masks hang on a rejected draft"


@pytest.mark.parametrize(("strategy", "num_masks"), OF_ONE_STRIDE)
def test_an_accepted_run_is_followed_by_masks_that_saw_all_of_it(strategy: str, num_masks: int) -> None:
    """After a clean sweep the next drafts come from masks behind the last draft, as many as there are."""
    mode_layouts = _layouts(strategy, num_masks)
    draft_buffer = mode_layouts[0].next_buffers[0]
    for _ in range(3):
        layout = mode_layouts[draft_buffer.index(num_masks)]
        assert layout.num_drafts == num_masks
        assert len(layout.draft_rows[-1]) == num_masks
        for row in layout.draft_rows[-1]:
            assert _visible(layout, row) >= set(range(layout.num_drafts + 1))
        draft_buffer = layout.next_buffers[-1]


@pytest.mark.parametrize(("stride", "acceptance"), [(2, 0.7), (4, 0.3), (8, 0.9)])
def test_tokens_of_a_strategy_are_those_of_a_simulation(stride: int, acceptance: float) -> None:
    rng, previous = random.Random(stride), 0.0
    for name in ("alternate", "branch_2", "branch_3", "branch"):
        mode_layouts, held, emitted = _layouts(name, stride - 1), DraftBuffer(stride - 1), 0
        for _ in range(20_000):
            layout = mode_layouts[held.index(stride - 1)]
            accepted = next((j for j in range(layout.num_drafts) if rng.random() >= acceptance), None)
            accepted = layout.num_drafts if accepted is None else accepted
            held, emitted = layout.next_buffers[accepted], emitted + accepted + 1
        formula = strategy_of(name).tokens_per_forward([acceptance] * (stride - 1))
        assert formula == pytest.approx(emitted / 20_000, rel=0.02)
        assert formula >= previous - 1e-9, "more rows never draft less"
        previous = formula


@pytest.mark.parametrize(("strategy", "num_masks", "max_drafts"), CASES)
def test_the_stacked_layouts_equal_the_single_ones(strategy: str, num_masks: int, max_drafts: int) -> None:
    mode_layouts = _layouts(strategy, num_masks, max_drafts)
    stacked = DraftLayout(mode_layouts, torch.device("cpu"))
    assert stacked.max_width == max(layout.width for layout in mode_layouts)
    for y, layout in enumerate(mode_layouts):
        assert int(stacked.rows.width_Y[y]) == layout.width
        assert int(stacked.tables.num_drafts_Y[y]) == layout.num_drafts
        rows = stacked.rows
        columns = (rows.source_YW, rows.position_YW, rows.limit_YW, rows.branch_YW)
        table = torch.stack([column_YW[y, : layout.width] for column_YW in columns], dim=1)
        assert [tuple(row) for row in table.tolist()] == list(layout.rows)
        for a, (draft_rows, following) in enumerate(zip(layout.draft_rows, layout.next_buffers, strict=True)):
            row_J = stacked.tables.draft_rows_YAJ[y, a].tolist()
            assert row_J[: len(draft_rows)] == list(draft_rows)
            assert set(row_J[len(draft_rows) :]) <= {NO_ROW}
            assert int(stacked.tables.next_layouts_YA[y, a]) == following.index(max_drafts)
