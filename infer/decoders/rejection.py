"""What happens after a rejection: three strategies, all exact, as sets of row layouts.

After a rejection the drafts behind it are void. `cold` (arXiv 2604.11035, Algorithm 1) spends the next pass
on masks alone. `tree` feeds that pass the laws that the rejected pass had already computed further on, as
drafts, with the masks on a branch that does not see them. `branch` hangs a group of masks on every
possible rejection point, so there is no cold pass at all, for N^2 rows instead of 2N-1. Any law that is
known exactly when the draft is drawn is a valid q, hence all three emit the AR law. Layout 0 is the step
without drafts.
"""

from __future__ import annotations

from typing import Protocol

from idlm.infer.decoders.layout import RowLayout, mask_rows
from idlm.registry import Registry


class RejectionStrategy(Protocol):
    """Builds the layouts for `num_masks` = stride - 1; layout 0 has no drafts."""

    def layouts(self, num_masks: int) -> list[RowLayout]:
        """All layouts that can follow one another, indexed by their place in the list."""
        ...


STRATEGIES: Registry[type[RejectionStrategy]] = Registry("rejection_strategy", None)


@STRATEGIES.register("cold")
class Cold:
    """Drop the drafts; the next pass only proposes. TPF (2 + P_1 + .. + P_{N-2}) / (2 - P_{N-1}), eq. 3."""

    def layouts(self, num_masks: int) -> list[RowLayout]:
        """Propose only; verify and propose."""
        return [
            RowLayout(
                num_drafts=num_drafts,
                num_masks=num_masks,
                mask_parents=(num_drafts,),
                draft_rows=((),) * num_drafts + (mask_rows(num_drafts, num_masks, 0),),
                next_layouts=(0,) * num_drafts + (min(num_masks, 1),),
            )
            for num_drafts in sorted({0, num_masks})
        ]


@STRATEGIES.register("tree")
class Tree:
    """Draft from the rejected pass's own laws, masks beside them. Never fewer tokens than `cold`, same rows.

    After `a` of the m fill drafts pass, the masks' laws for the positions up to the new pending token are
    spent, so num_masks - a drafts remain for the next step.
    """

    def layouts(self, num_masks: int) -> list[RowLayout]:
        """Index m: m drafts from masks; index num_masks + m: m fill drafts, masks hanging on the pending
        token.
        """
        return [self._after_masks(m, num_masks) for m in range(num_masks + 1)] + [
            self._fill(m, num_masks) for m in range(1, num_masks + 1)
        ]

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
            next_layouts=(*(num_masks + num_drafts - a for a in rejected), num_masks),
        )

    def _fill(self, num_drafts: int, num_masks: int) -> RowLayout:
        group = mask_rows(num_drafts, num_masks, 0)
        return RowLayout(
            num_drafts=num_drafts,
            num_masks=num_masks,
            mask_parents=(0,),
            draft_rows=tuple(group[a:] for a in range(num_drafts + 1)),
            next_layouts=tuple(num_masks - a for a in range(num_drafts + 1)),
        )


@STRATEGIES.register("branch")
class Branch:
    """Masks behind every possible rejection point. TPF 1 + P_1 + .. + P_{N-1}, for N^2 rows."""

    def layouts(self, num_masks: int) -> list[RowLayout]:
        """The first step; every later step."""
        return [
            RowLayout(
                num_drafts=num_drafts,
                num_masks=num_masks,
                mask_parents=tuple(range(num_drafts + 1)),
                draft_rows=tuple(mask_rows(num_drafts, num_masks, a) for a in range(num_drafts + 1)),
                next_layouts=(min(num_masks, 1),) * (num_drafts + 1),
            )
            for num_drafts in sorted({0, num_masks})
        ]
