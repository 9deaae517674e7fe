"""Replays a trace of acceptances in the engine's own step, on the device, without a host synchronisation.

Random weights accept nothing, so while `replaying` every verdict on drafts is overwritten with the trace's,
after the real test. Everything else runs unchanged: probabilities, test, residual, draws, commit. The
overwriting costs one small launch per step, which counts against us. Shapes: Z lanes, B sequences, J drafts,
A = J + 1, S tests of the trace, Y layouts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.engine.decoding.trace import Trace
from idlm.infer.decoders import isd
from idlm.kernels.sampling import LayoutTables, Verdict
from idlm.kernels.sampling.drafts import plain_verdict

STEP_BETWEEN_LANES = 617
"""Offset between the places of the trace at which lanes begin, so that they are not in step."""


class Replay:
    """A trace on a device, and the position of each lane in it."""

    def __init__(self, trace: Trace, num_lanes: int, device: torch.device) -> None:
        self.accepted_S = torch.tensor(trace.accepted, dtype=torch.int64, device=device)
        self.num_tests_Z = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self.restart(0)

    def restart(self, number: int) -> None:
        """Go to the places of the trace at which every round of this number begins."""
        lanes_Z = torch.arange(len(self.num_tests_Z), device=self.num_tests_Z.device)
        self.num_tests_Z.copy_(STEP_BETWEEN_LANES * (lanes_Z + number * len(lanes_Z)))

    def overwrite(
        self,
        verdict: Verdict,
        tables: LayoutTables,
        *,
        lanes_B: Tensor,
        first_rows_B: Tensor,
        active_B: Tensor,
        drafts_ZJ: Tensor,
        layout_Z: Tensor,
        **unused: Tensor,
    ) -> None:
        """Replace the verdict of each active sequence that has drafts by the trace's next outcome."""
        columns = (lanes_B, first_rows_B, active_B, drafts_ZJ, layout_Z)
        if lanes_B.is_cuda or lanes_B.is_meta:
            from benchmarks.engine.decoding import kernels as decode_kernels

            # A warm-up asks on the meta device which kernels there are to compile.
            device = lanes_B.device
            trace = (self.accepted_S.to(device), self.num_tests_Z.to(device))
            decode_kernels.overwrite(trace, verdict, tables, columns)
        else:
            self._overwrite_plainly(verdict, tables, columns)

    def _overwrite_plainly(
        self, verdict: Verdict, tables: LayoutTables, columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    ) -> None:
        lanes_B, _, active_B, drafts_ZJ, layout_Z = columns
        num_masks = drafts_ZJ.shape[1]
        layout_B = layout_Z[lanes_B]
        num_drafts_B = torch.where(active_B, tables.num_drafts_Y[layout_B], 0)
        index_B = self.num_tests_Z[lanes_B]
        # Of drafts that `tree` drew from a rejected pass the trace knows nothing: all are rejected.
        traced_B = torch.where(layout_B > num_masks, 0, self.accepted_S[index_B % len(self.accepted_S)])
        self.num_tests_Z[lanes_B] += (num_drafts_B > 0).long()
        traced = plain_verdict(torch.minimum(traced_B, num_drafts_B), tables, columns)
        verdict.values_FB.copy_(traced.values_FB)
        verdict.token_ids_BA.copy_(traced.token_ids_BA)
        verdict.draft_rows_BJ.copy_(traced.draft_rows_BJ)


@contextlib.contextmanager
def replaying(replay: Replay | None) -> Iterator[None]:
    """Replace every verdict on drafts in this process by that of `replay` (None: change nothing)."""
    if replay is None:
        yield
        return
    original = isd.verify

    def verify(probs: Any, store: Any, tables: LayoutTables, **columns: Tensor) -> Verdict:
        verdict = original(probs, store, tables, **columns)
        replay.overwrite(verdict, tables, **columns)
        return verdict

    with patch.object(isd, "verify", verify):
        yield
