"""The rows of a pass whose predictions a decoder wants: hidden states and the output head, not yet logits.

A decoder takes either all logits at once, or what it makes of them slice by slice, so that the logits of many
rows never exist together.
Shapes: R rows fed, X wanted rows, Y rows of a slice, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from idlm.infer.state.batch import StepPlan

Propose = Callable[[Tensor, slice], tuple[Tensor, ...]]
"""(logits_YV, slice of the wanted rows) -> tensors [Y, ...]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRows:
    """What a pass that dropped rows tells the decoder. `has_logits_X` (bool): wanted rows that were computed
    to the end. `waits_B` (bool): sequences that found no room, of which nothing is decided.
    """

    has_logits_X: Tensor
    waits_B: Tensor

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
            active=replace(active, is_maskable_BW=is_maskable_BW, waits_B=self.waits_B),
        )


class WantedRows:
    """Wanted row x is row `rows_X[x]` of `hidden_RD` (after the final norm).

    `dropped`: what accelerators dropped; None: no row. `head` maps hidden states [Y, D] to logits [Y, V] in
    the model's dtype. `num_chunks(X, b)`: slices that the memory plan allows X rows, of which the decoder
    takes b bytes each beside the logits; None: one slice.
    """

    def __init__(
        self,
        hidden_RD: Tensor,
        rows_X: Tensor,
        head: Callable[[Tensor], Tensor],
        *,
        dropped: DroppedRows | None = None,
        num_chunks: Callable[[int, int], int] | None = None,
    ) -> None:
        self.hidden_RD, self.rows_X, self.head, self.dropped = hidden_RD, rows_X, head, dropped
        self._num_chunks = num_chunks
        self._logits_XV: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows_X)

    @property
    def has_logits_X(self) -> Tensor | None:
        """Bool: False for a row that an accelerator dropped, whose logits mean nothing; None: no row was."""
        return None if self.dropped is None else self.dropped.has_logits_X

    def logits(self) -> Tensor:
        """Logits [X, V] of all wanted rows; computed once."""
        if self._logits_XV is None:
            self._logits_XV = self._logits_of(self.rows_X)
        return self._logits_XV

    def proposals(self, propose: Propose, *, row_bytes: int = 0) -> tuple[Tensor, ...]:
        """Apply `propose` to the logits of consecutive slices; returns its tensors joined to [X, ...].

        The memory plan decides the number of slices; `row_bytes`: what `propose` itself allocates for a row.
        The logits of a slice are freed before those of the next are computed: `propose` must not keep them.
        """
        num_rows = len(self)
        num_chunks = 1 if self._num_chunks is None else self._num_chunks(num_rows, row_bytes)
        parts = []
        for number in range(num_chunks):
            # Of nearly equal size: products of very few rows are slow, and may sum in another order.
            rows = slice(number * num_rows // num_chunks, (number + 1) * num_rows // num_chunks)
            parts.append(propose(self._logits_of(self.rows_X[rows]), rows))
        return parts[0] if len(parts) == 1 else tuple(torch.cat(each) for each in zip(*parts, strict=True))

    @torch.inference_mode()
    def _logits_of(self, rows_Y: Tensor) -> Tensor:
        return self.head(self.hidden_RD[rows_Y])
