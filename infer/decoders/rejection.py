"""What happens after a rejection: strategies, all exact, as row layouts.

A rejection makes the drafts after it void. `cold` (arXiv 2604.11035, Algorithm 1) spends the next pass on
masks alone. `tree` draws drafts for that pass from the distributions that the rejected pass had already
computed further on, with the masks on a branch that does not see them. `branch` hangs a group of masks on
every possible rejection point, so there is no cold pass at all, for N^2 rows instead of 2N-1; `branch_K`
hangs K groups, on the pending token, on the last draft and evenly between them. `alternate` saves rows where
they are dear: a pass that verifies feeds no masks, and the next one only drafts, for N rows. Any distribution
that is known exactly when the draft is drawn is a valid q, hence all of them emit the AR law. So does leaving
out drafts by a choice that does not look at them, which is how the stride changes; a sequence may change its
layouts after any step. `plan_rows` feeds these rows, as every token-causal decoder feeds its rows. Shapes:
Y draft buffers, B sequences of the step, R rows, X wanted rows, Z lanes, W rows of the widest layout, A =
num_masks + 1 possible counts of accepted drafts, J = num_masks drafts."""

from __future__ import annotations

import functools
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from idlm.acceptance import cumulative_acceptance, tokens_per_forward_branch, tokens_per_forward_cold
from idlm.infer.state.batch import Batch, StepPlan, row_columns
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.sampling import LayoutTables
from idlm.kernels.step_rows import MASK, Noise, RowTable, pack_rows
from idlm.registry import Registry


class RejectionStrategy(ABC):
    """Defines which rows are fed for a buffer of drafts, of which it may use the first `num_masks`."""

    @abstractmethod
    def layout(self, draft_buffer: DraftBuffer, num_masks: int) -> RowLayout:
        """The layout of one step at stride num_masks + 1."""

    def tokens_per_forward(self, acceptance_J: Sequence[float]) -> float:
        """Expected tokens of a pass, those of `cold` (eq. 3) at least; see `Decoder.tokens_per_forward`."""
        return tokens_per_forward_cold(acceptance_J)


NUM_ITERATIONS = 4
"""Passes until the numbers of drafts that passes have hardly change."""
STRATEGIES: Registry[type[RejectionStrategy]] = Registry("rejection_strategy", None)


def layouts(strategy: str, *, num_masks: int, max_drafts: int) -> list[RowLayout]:
    """One layout for each of `draft_buffers(max_drafts)`; UserError IDLM-0102 for an unknown strategy."""
    chosen = strategy_of(strategy)
    return [chosen.layout(draft_buffer, num_masks) for draft_buffer in draft_buffers(max_drafts)]


def strategy_of(name: str) -> RejectionStrategy:
    """The strategy called `name`, "branch_2" and so on included; UserError IDLM-0102 for an unknown one."""
    groups = re.fullmatch(r"branch_([2-9]|[1-9]\d)", name)
    if groups is not None:
        return Branch(int(groups[1]))
    return STRATEGIES.get(name, key="decoder.rejection_strategy")()


@STRATEGIES.register("cold")
class Cold(RejectionStrategy):
    """Drop the drafts; the next pass only proposes. TPF (2 + P_1 + .. + P_{N-2}) / (2 - P_{N-1}), eq. 3."""

    def layout(self, draft_buffer: DraftBuffer, num_masks: int) -> RowLayout:
        """Verify and propose. Drafts from verification rows are dropped: masks after them would see them."""
        num_drafts = _num_chained(draft_buffer, num_masks)
        return _one_group(num_drafts, num_masks)


@STRATEGIES.register("alternate")
class Alternate(RejectionStrategy):
    """Propose in one pass and verify in the next: masks only fill rows that no draft takes.
    TPF 1 + (P_1 + .. + P_{N-1}) / 2, for N rows."""

    def layout(self, draft_buffer: DraftBuffer, num_masks: int) -> RowLayout:
        """Fewer drafts than masks come from another mode; masks after the last one fill the other rows."""
        num_drafts = _num_chained(draft_buffer, num_masks)
        return _one_group(num_drafts, num_masks - num_drafts)

    def tokens_per_forward(self, acceptance_J: Sequence[float]) -> float:
        """The mean of a pass that proposes, which emits one token, and of one that verifies."""
        return (1.0 + tokens_per_forward_branch(acceptance_J)) / 2


def _num_chained(draft_buffer: DraftBuffer, maximum: int) -> int:
    return 0 if draft_buffer.from_verify_rows else min(draft_buffer.num_drafts, maximum)


def _one_group(num_drafts: int, num_masks: int) -> RowLayout:
    """Masks after the last draft alone; after a rejection there are no drafts."""
    return RowLayout(
        num_drafts=num_drafts,
        num_masks=num_masks,
        mask_parents=(num_drafts,),
        draft_rows=((),) * num_drafts + (mask_rows(num_drafts, num_masks, 0),),
        next_buffers=(DraftBuffer(0),) * num_drafts + (DraftBuffer(num_masks),),
    )


@STRATEGIES.register("tree")
class Tree(RejectionStrategy):
    """Draft from the rejected pass's own distributions, and masks. Never fewer tokens than `cold` in
    as many rows. After `a` of the m drafts from verification rows pass, the masks' distributions up to the
    new pending token are used up, so num_masks - a drafts remain for the next step."""

    def layout(self, draft_buffer: DraftBuffer, num_masks: int) -> RowLayout:
        """Masks hang on the last draft from masks, or on the pending token next to other drafts."""
        num_drafts = min(draft_buffer.num_drafts, num_masks)
        return (self._fill if draft_buffer.from_verify_rows else self._after_masks)(num_drafts, num_masks)

    def _after_masks(self, num_drafts: int, num_masks: int) -> RowLayout:
        rejected = range(num_drafts)
        return RowLayout(
            num_drafts=num_drafts,
            num_masks=num_masks,
            mask_parents=(num_drafts,),
            draft_rows=(
                *(tuple(range(a + 1, num_drafts + 1)) for a in rejected),
                mask_rows(num_drafts, num_masks, 0),
            ),
            next_buffers=(*(DraftBuffer(num_drafts - a, True) for a in rejected), DraftBuffer(num_masks)),
        )

    def _fill(self, num_drafts: int, num_masks: int) -> RowLayout:
        group = mask_rows(num_drafts, num_masks, 0)
        return RowLayout(
            num_drafts=num_drafts,
            num_masks=num_masks,
            mask_parents=(0,),
            draft_rows=tuple(group[a:] for a in range(num_drafts + 1)),
            next_buffers=tuple(DraftBuffer(num_masks - a) for a in range(num_drafts + 1)),
        )


@STRATEGIES.register("branch")
class Branch(RejectionStrategy):
    """Masks after every possible rejection point. TPF 1 + P_1 + .. + P_{N-1}, for N^2 rows.

    With `num_groups` K, for 1 + (K + 1)(N - 1) rows: a rejection d positions after a group is followed by
    what is left of that group, d drafts fewer, whose distributions saw d tokens less."""

    def __init__(self, num_groups: int | None = None) -> None:
        self._num_groups = num_groups

    def layout(self, draft_buffer: DraftBuffer, num_masks: int) -> RowLayout:
        """The first step has no drafts; with all groups every later one has as many as masks."""
        num_drafts = min(draft_buffer.num_drafts, num_masks)
        parents = self._parents(num_drafts)
        groups = [mask_rows(num_drafts, num_masks, index) for index in range(len(parents))]
        # After `a` accepted drafts: the group of the last parent up to `a`, from its position a - parent.
        last = [sum(parent <= a for parent in parents) - 1 for a in range(num_drafts + 1)]
        draft_rows = tuple(groups[index][a - parents[index] :] for a, index in enumerate(last))
        return RowLayout(
            num_drafts=num_drafts,
            num_masks=num_masks,
            mask_parents=parents,
            draft_rows=draft_rows,
            next_buffers=tuple(DraftBuffer(len(rows)) for rows in draft_rows),
        )

    def _parents(self, num_drafts: int) -> tuple[int, ...]:
        """Positions that have a group. Where they are even, a rejection loses the fewest drafts."""
        if self._num_groups is None or self._num_groups > num_drafts:
            return tuple(range(num_drafts + 1))
        gaps = self._num_groups - 1
        return tuple(sorted({number * num_drafts // gaps for number in range(gaps + 1)}))

    def tokens_per_forward(self, acceptance_J: Sequence[float]) -> float:
        """Without cold passes. With some groups: over the numbers of drafts that passes have in the long run,
        as if a draft were accepted as often after a rejection as elsewhere."""
        num_masks = len(acceptance_J)
        if self._num_groups is None or self._num_groups > num_masks:
            return tokens_per_forward_branch(acceptance_J)
        reached = [1.0, *cumulative_acceptance(acceptance_J)]
        emitted = list(itertools.accumulate(reached))
        shares, following = [0.0] * num_masks + [1.0], _num_following(self._num_groups, num_masks)
        for _ in range(NUM_ITERATIONS - 1):
            before, shares = shares, [0.0] * (num_masks + 1)
            for num_drafts, share in enumerate(before):
                for a, num_left in enumerate(following[num_drafts]):
                    later = reached[a + 1] if a < num_drafts else 0.0
                    shares[num_left] += share * (reached[a] - later)
        return sum(share * tokens for share, tokens in zip(shares, emitted, strict=True))


@functools.cache
def _num_following(num_groups: int, num_masks: int) -> list[list[int]]:
    """By numbers of drafts of a pass and of accepted ones: drafts of the next pass."""
    branch = Branch(num_groups)
    return [
        [buffer.num_drafts for buffer in branch.layout(DraftBuffer(num_drafts), num_masks).next_buffers]
        for num_drafts in range(num_masks + 1)
    ]


NO_ROW = -1


@dataclass(frozen=True, slots=True)
class DraftBuffer:
    """The drafts that a sequence holds. `from_verify_rows`: they were drawn from verification rows after a
    rejection, not from masks. `is_single`: none, and none will be drawn."""

    num_drafts: int
    from_verify_rows: bool = False
    is_single: bool = False

    def index(self, max_drafts: int) -> int:
        """Its index in `draft_buffers(max_drafts)`, or that of `SINGLE_TOKEN` after them."""
        if self.is_single:
            return 2 * max_drafts + 1
        return self.num_drafts + (max_drafts if self.from_verify_rows and self.num_drafts else 0)


def draft_buffers(max_drafts: int) -> list[DraftBuffer]:
    """Every buffer of at most so many drafts; the empty one is the first."""
    counts = range(1, max_drafts + 1)
    return [
        DraftBuffer(0),
        *(DraftBuffer(count) for count in counts),
        *(DraftBuffer(count, True) for count in counts),
    ]


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """Rows of one step: `[pending, draft_1 .. draft_m]`, then groups of `num_masks` masks.

    Group g hangs on chain row `mask_parents[g]`: its masks see everything up to that row and each other,
    causally. `draft_rows[a]`: the rows that the next drafts are drawn from, in order, after exactly `a`
    accepted drafts; they fill the buffer `next_buffers[a]`."""

    num_drafts: int
    num_masks: int
    mask_parents: tuple[int, ...]
    draft_rows: tuple[tuple[int, ...], ...]
    next_buffers: tuple[DraftBuffer, ...]

    def __post_init__(self) -> None:
        assert len(self.draft_rows) == len(self.next_buffers) == self.num_drafts + 1, f"{self=}"
        assert all(0 <= parent <= self.num_drafts for parent in self.mask_parents), f"{self=}"

    @property
    def width(self) -> int:
        return 1 + self.num_drafts + self.num_masks * len(self.mask_parents)

    @cached_property
    def rows(self) -> tuple[tuple[int, int, int, int], ...]:
        """Per row: chain index or MASK, position, limit (exclusive), start of the row's own branch."""
        chain = [(depth, depth, depth + 1, depth + 1) for depth in range(self.num_drafts + 1)]
        masks = []
        for index, parent in enumerate(self.mask_parents):
            group = mask_rows(self.num_drafts, self.num_masks, index)
            masks += [(MASK, parent + 1 + offset, parent + 1, group[0]) for offset in range(self.num_masks)]
        return tuple(chain + masks)


def mask_rows(num_drafts: int, num_masks: int, group: int) -> tuple[int, ...]:
    """Row numbers of a mask group after a chain of `num_drafts` drafts."""
    first = 1 + num_drafts + group * num_masks
    return tuple(range(first, first + num_masks))


SINGLE_BUFFER = DraftBuffer(0, is_single=True)
SINGLE_TOKEN = RowLayout(
    num_drafts=0, num_masks=0, mask_parents=(), draft_rows=((),), next_buffers=(SINGLE_BUFFER,)
)
"""Of a sequence that decodes as `ar` does, next to others with drafts."""


class DraftLayout:
    """Layouts by draft buffer, padded and stacked as int64 tensors on the engine's device, and after them
    `SINGLE_TOKEN`; those of the `narrow` half of the sequences follow, in the order of the first ones."""

    def __init__(
        self, layouts: list[RowLayout], device: torch.device, narrow: Sequence[RowLayout] = ()
    ) -> None:
        max_drafts = len(layouts) // 2
        layouts = [*layouts, SINGLE_TOKEN, *narrow]
        self.layouts = layouts
        self.max_width = max(layout.width for layout in layouts)
        # Of all modes that sequences may come from.
        self.max_stride = max_drafts + 1

        def stack(rows: Iterable[Sequence[int]], width: int, fill: int = 0) -> Tensor:
            padded = [[*row, *[fill] * (width - len(row))] for row in rows]
            return torch.tensor(padded, dtype=torch.int64, device=device)

        source_YW, position_YW, limit_YW, branch_YW = (
            stack(([row[field] for row in layout.rows] for layout in layouts), self.max_width)
            for field in range(4)
        )
        self.rows = RowTable(
            width_Y=torch.tensor([layout.width for layout in layouts], device=device),
            source_YW=source_YW,
            position_YW=position_YW,
            limit_YW=limit_YW,
            branch_YW=branch_YW,
        )
        counts = range(max_drafts + 1)
        draft_rows = (y.draft_rows[a] if a <= y.num_drafts else () for y in layouts for a in counts)
        next_layouts = ([buffer.index(max_drafts) for buffer in y.next_buffers] for y in layouts)
        shape = (len(layouts), max_drafts + 1, max_drafts)
        self.tables = LayoutTables(
            num_drafts_Y=torch.tensor([layout.num_drafts for layout in layouts], device=device),
            draft_rows_YAJ=stack(draft_rows, max_drafts, NO_ROW).view(shape),
            next_layouts_YA=stack(next_layouts, max_drafts + 1),
        )


def plan_rows(
    table: SequenceState,
    batch: Batch,
    *,
    layout: DraftLayout,
    mask_token_id: int | Noise,
    draft_buffer_Z: Tensor | None = None,
    drafts_ZJ: Tensor | None = None,
    is_packed: bool = False,
) -> StepPlan:
    """Lay out known tokens up to the pending one, then drafts and masks of the layout. If `is_packed` and no
    sequence feeds a prompt, logits are computed of the rows alone: sequences have different numbers of them.

    There is no prefill branch: masks follow a prompt if `samples_B`, never because of a row count. A
    sequence of full length feeds its pending token again and decodes nothing."""
    lanes_B, width = batch.lanes_B, layout.max_width
    packed = pack_rows(
        table.lanes(draft_buffer_Z, drafts_ZJ),
        layout.rows,
        lanes_B=lanes_B,
        num_feed_B=batch.num_feed_B,
        wants_B=batch.samples_B,
        num_rows=batch.num_rows,
        mask_token_id=mask_token_id,
    )
    columns, logit_rows_X = row_columns(packed), packed.logit_rows_X
    first_logit_B, logit_lanes_X = torch.arange(len(lanes_B), device=table.device) * width, None
    if is_packed and batch.max_feed == 1 and batch.decides:
        logit_rows_X = torch.arange(len(packed.token_ids_R), device=table.device)
        first_logit_B, logit_lanes_X = packed.cu_rows_B1[:-1], lanes_B[packed.sequence_R]
    if width == 1:
        columns["is_mask_R"] = None
    return StepPlan(
        lanes_B=lanes_B,
        **columns,
        logit_rows_X=logit_rows_X,
        first_logit_B=first_logit_B,
        logit_lanes_X=logit_lanes_X,
        num_feed_B=batch.num_feed_B,
        samples_B=packed.samples_B,
        advances_B=packed.advances_B,
        max_rows=batch.max_feed - 1 + width,
        decoding_rows=width,
        # An earlier pass, in a wider mode, may have gone past the end of a sequence.
        max_slots=batch.max_known - 1 + max(width, layout.max_stride),
    )
