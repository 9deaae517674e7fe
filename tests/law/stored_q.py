"""A planted fault: drafts are stored with the q of other logits than they are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from idlm.infer.decoders import isd
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels import sampling


def store_q_of(patch: pytest.MonkeyPatch, seen: Mapping[str, Tensor]) -> None:
    """Store as q what the `logits` that were `seen` last give."""
    probs_of, stored = SequenceState.probs, dict[str, Any]()

    def probs(self: SequenceState, logits_XV: Tensor, lanes_B: Tensor, filters: bool) -> Any:
        stored["probs"] = probs_of(self, seen["logits"], lanes_B, filters)
        return probs_of(self, logits_XV, lanes_B, filters)

    def put(store: Any, lanes_B: Tensor, probs: Any, rows_BJ: Tensor, *, active_B: Tensor) -> None:
        sampling.put(store, lanes_B, stored["probs"], rows_BJ, active_B=active_B)

    patch.setattr(SequenceState, "probs", probs)
    patch.setattr(isd, "put", put)
