"""Drawn traces of draft verification, replayed in the engine's own step without a host synchronisation.

The trace `p0.90`: every draft is accepted with that probability once its predecessors are. 0.90 is what the
authors' published tokens per forward imply by eq. 3: 1.80, 2.48, 2.96, 4.01 at strides 2, 3, 4, 8 give 0.889,
0.909, 0.905, 0.896 (I-DLM, arXiv 2604.11035).

Random weights accept nothing, so while `replaying` every verdict on drafts is overwritten with the trace's,
after the real test. Everything else runs unchanged: probabilities, test, residual, draws, commit. The
overwriting costs one small launch per step, which counts against us. Shapes: Z lanes, B sequences, J drafts,
A = J + 1, S tests of the trace, Y layouts."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from idlm.errors import UserError
from idlm.infer.decoders import isd
from idlm.kernels.sampling import LayoutTables, Verdict
from idlm.kernels.sampling.drafts import plain_verdict

STEP_BETWEEN_LANES = 617
"""Offset between the positions of the trace at which lanes begin, so that they are not in step."""


class Replay:
    """A trace on a device, and the position of each lane in it."""

    def __init__(self, trace: Trace, num_lanes: int, device: torch.device) -> None:
        self.accepted_S = torch.tensor(trace.accepted, dtype=torch.int64, device=device)
        self.num_tests_Z = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self.restart(0, trace)

    def restart(self, number: int, trace: Trace) -> None:
        """Replay `trace` from the positions at which every round of this number begins."""
        self.accepted_S.copy_(torch.tensor(trace.accepted))
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

            # The warm-up lists the kernels to compile on the meta device.
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
        # Of drafts that `tree` drew from a rejected pass the trace has none: all are rejected.
        is_other_B = layout_B % (2 * num_masks + 1) > num_masks
        traced_B = torch.where(is_other_B, 0, self.accepted_S[index_B % len(self.accepted_S)])
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


DRAWN_TESTS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """`accepted[i]` of `num_drafts` drafts passed in test i. `probability`: of a drawn one, of each draft."""

    name: str
    num_drafts: int
    accepted: tuple[int, ...]
    probability: float = math.nan

    @property
    def mean(self) -> float:
        return sum(self.accepted) / len(self.accepted)

    def acceptance(self) -> list[float]:
        """Acceptance per position, given that all previous drafts were accepted."""
        reached = [sum(count >= index for count in self.accepted) for index in range(self.num_drafts + 1)]
        return [after / max(1, before) for before, after in zip(reached, reached[1:])]


def trace_of(name: str, stride: int) -> Trace:
    """The trace `name` (p0.90) for `stride`; raises IDLM-0109."""
    try:
        probability = float(name.removeprefix("p"))
    except ValueError:
        probability = -1.0
    if not name.startswith("p") or not 0.0 <= probability <= 1.0:
        raise UserError("IDLM-0109", f"no trace {name!r}", fix="use p and a probability, as in p0.90")
    return drawn(probability, stride - 1)


def drawn(probability: float, num_drafts: int) -> Trace:
    rng = random.Random(1_000_000 * probability + num_drafts)
    accepted = []
    for _ in range(DRAWN_TESTS):
        count = 0
        while count < num_drafts and rng.random() < probability:
            count += 1
        accepted.append(count)
    name = f"p{probability:.2f}"
    return Trace(name=name, num_drafts=num_drafts, accepted=tuple(accepted), probability=probability)
