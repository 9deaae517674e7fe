"""Wanted rows whose head is the end of a planned pass: each chunk of logits has its place in the workspace,
or the numbers of a head without logits have theirs.

Shapes: R rows, X wanted rows, Y rows of a slice, D width, V vocabulary, S forbidden ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from idlm.infer.planning.canvas import PROPOSAL_BYTES
from idlm.infer.planning.template import Step
from idlm.infer.runtime.canvas_ops import CanvasPass, norm_rows
from idlm.infer.state.wanted_rows import Propose, WantedRows
from idlm.kernels.masked_logits import Proposals

LOGITS, CHOICE = "logits", "choose_tokens"


class CanvasRows(WantedRows):
    """`hidden_RD` is the residual stream in the workspace, and `head` norms it first. All of it is valid
    until the next pass.

    `steps`: the calls of the head, from which `proposals` gets its chunks.
    """

    def __init__(self, run: CanvasPass, steps: Sequence[Step], *, group: int = 1) -> None:
        first = steps[0]
        super().__init__(run.whole(first, "x", run.trunk.spec.width), run.rows_X, self._head, group=group)
        self._run, self._steps = run, steps

    def _head(self, hidden_YD: Tensor) -> Tensor:
        """Logits [Y, V] of any hidden states, outside of the workspace."""
        normed_YD = torch.empty_like(hidden_YD)
        norm_rows(self._run, hidden_YD, self._run.trunk.final_norm, normed_YD)
        return self._run.trunk.logits(normed_YD)

    @torch.inference_mode()
    def proposals(self, propose: Propose, *, row_bytes: int = 0) -> tuple[Tensor, ...]:
        """Apply `propose` to consecutive slices, as the base does: to parts of the planned chunks for which
        `propose` allocates at most PROPOSAL_BYTES (and to one group of rows at least).
        """
        run, found = self._run, []
        most = self.group * max(1, PROPOSAL_BYTES // max(1, self.group * row_bytes))

        def choose(run: CanvasPass, step: Step) -> None:
            logits_mV = run.rows(step, LOGITS, run.trunk.spec.vocab_size)
            for start in range(step.start, step.stop, most):
                rows = slice(start, min(step.stop, start + most))
                found.append(propose(logits_mV[rows.start - step.start : rows.stop - step.start], rows))

        for step in self._steps:
            run.execute(step, choose if step.op.name == CHOICE else None)
        return found[0] if len(found) == 1 else tuple(torch.cat(each) for each in zip(*found, strict=True))


class BestRows(WantedRows):
    """Rows of a pass planned for `WantedRows.best`. `hidden_RD` is in the workspace, after the final norm; it
    is valid until the next pass. Logits, if a request asks for them, are outside of the plan.

    `step`: the call of the head.
    """

    def __init__(self, run: CanvasPass, step: Step) -> None:
        trunk, num_bytes = run.trunk, run.plan.num_bytes["ranges"]
        super().__init__(
            run.whole(step, "x", trunk.spec.width),
            run.rows_X,
            trunk.logits,
            weight_VD=trunk.head_weight,
            workspace=run.arena.view(step.offsets["ranges"], (num_bytes // 4,), torch.float32),
        )
        self._run, self._step = run, step

    def best(self, forbidden_S: Tensor, is_wanted_X: Tensor, *, entropy: bool = False) -> Proposals | None:
        """As the base, once."""
        found: list[Proposals | None] = []
        ask = super().best

        def op(run: CanvasPass, step: Step) -> None:
            found.append(ask(forbidden_S, is_wanted_X, entropy=entropy))

        self._run.execute(self._step, op)
        return found[0]
