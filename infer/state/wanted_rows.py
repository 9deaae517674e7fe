"""The rows of a pass whose predictions a decoder wants: hidden states and the output head, not yet logits.

A decoder takes the best tokens alone, for which no logits are stored where a kernel can; or what it makes of
logits slice by slice, so that those of many rows never exist together; or all logits at once.
Shapes: R rows fed, X wanted rows, Y rows of a slice, D width, V vocabulary, S forbidden ids; in passes that
drop rows X the plan's wanted rows and H those that the head computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from idlm.infer.state.batch import StepPlan
from idlm.kernels.masked_logits import Proposals, masked_logits

Propose = Callable[[Tensor, slice], tuple[Tensor, ...]]
"""(logits_YV, slice of the wanted rows) -> tensors [Y, ...]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRows:
    """What a pass that dropped rows tells the decoder. Row h of the head is wanted row `origin_H[h]` of the
    plan (None: row h); `numbers_X` says the same the other way around, -1: the row was dropped. `waits_B`
    (bool): sequences that found no room, of which nothing is decided. int64, by sequence, what each asked for
    (0: it waited before): `num_fed_B` and `num_kept_B` rows, `num_wanted_B` rows of the head. `num_fed`: rows
    embedded, with padding.
    """

    origin_H: Tensor | None
    numbers_X: Tensor
    waits_B: Tensor
    num_fed_B: Tensor
    num_kept_B: Tensor
    num_wanted_B: Tensor
    num_fed: int

    def apply(self, plan: StepPlan) -> StepPlan:
        """The plan as the decoder is to advance by it: sequences that wait do not sample, and have stored
        only the tokens that the host scheduled.
        """
        active, num_feed_B = plan.active, plan.num_feed_B
        assert active is not None
        if active.num_scheduled_B is not None:
            num_scheduled_B = torch.minimum(num_feed_B, active.num_scheduled_B)
            num_feed_B = torch.where(self.waits_B, num_scheduled_B, num_feed_B)
        is_maskable_BW = active.is_maskable_BW & ~self.waits_B[:, None]
        return replace(
            plan,
            num_feed_B=num_feed_B,
            samples_B=plan.samples_B & ~self.waits_B,
            active=replace(
                active,
                is_maskable_BW=is_maskable_BW,
                waits_B=self.waits_B,
                num_wanted_B=self.num_wanted_B,
                num_fed_B=self.num_fed_B,
                num_kept_B=self.num_kept_B,
            ),
        )


class WantedRows:
    """Wanted row x is row `rows_X[x]` of `hidden_RD` (after the final norm).

    `dropped`: what accelerators dropped; None: no row. `head` maps hidden states [Y, D] to logits [Y, V] in
    the model's dtype; `weight_VD`: its weight, if `masked_logits` is to multiply with it; `workspace`: as
    there. `num_chunks(X, b)`: slices that the memory plan allows X rows, of which the decoder takes b bytes
    each beside the logits; None: one slice. No slice divides a `group` of rows (`StepPlan.logit_group`).
    """

    def __init__(
        self,
        hidden_RD: Tensor,
        rows_X: Tensor,
        head: Callable[[Tensor], Tensor],
        *,
        dropped: DroppedRows | None = None,
        num_chunks: Callable[[int, int], int] | None = None,
        weight_VD: Tensor | None = None,
        workspace: Tensor | None = None,
        group: int = 1,
    ) -> None:
        self.hidden_RD, self.rows_X, self.head, self.dropped = hidden_RD, rows_X, head, dropped
        self._num_chunks, self._weight_VD, self._workspace = num_chunks, weight_VD, workspace
        self.group = group
        self._logits_XV: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows_X)

    def logits(self) -> Tensor:
        """Logits [X, V] of all wanted rows; computed once."""
        if self._logits_XV is None:
            self._logits_XV = self.logits_of(self.rows_X)
        return self._logits_XV

    def best(self, forbidden_S: Tensor, is_wanted_X: Tensor, *, entropy: bool = False) -> Proposals | None:
        """The likeliest token of every row of `is_wanted_X` (bool), ties to the lower id; None where only
        logits tell. `forbidden_S` (int64): ids that have no probability. `entropy`: also return it. For other
        rows everything is 0, and nothing is computed for many of them in a row.
        """
        if self._weight_VD is None:
            return None
        return masked_logits(
            self.hidden_RD,
            torch.where(is_wanted_X, self.rows_X, -1),
            self._weight_VD,
            forbidden_S=forbidden_S,
            entropy=entropy,
            workspace=self._workspace,
        )

    def proposals(self, propose: Propose, *, row_bytes: int = 0) -> tuple[Tensor, ...]:
        """Apply `propose` to the logits of consecutive slices; returns its tensors joined to [X, ...].

        The memory plan decides the number of slices; `row_bytes`: what `propose` itself allocates for a row.
        The logits of a slice are freed before those of the next are computed: `propose` must not keep them.
        """
        num_groups = len(self) // self.group
        num_chunks = 1 if self._num_chunks is None else self._num_chunks(len(self), row_bytes)
        num_chunks = min(num_chunks, num_groups)
        # Of nearly equal size: products of very few rows are slow, and may sum in another order.
        ends = [self.group * (number * num_groups // num_chunks) for number in range(num_chunks + 1)]
        parts = []
        for start, stop in pairwise(ends):
            rows = slice(start, stop)
            parts.append(propose(self.logits_of(self.rows_X[rows]), rows))
        return parts[0] if len(parts) == 1 else tuple(torch.cat(each) for each in zip(*parts, strict=True))

    @torch.inference_mode()
    def logits_of(self, rows_Y: Tensor) -> Tensor:
        """Logits [Y, V] of any rows of the pass."""
        return self.head(self.hidden_RD[rows_Y])
