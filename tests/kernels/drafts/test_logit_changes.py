"""The kernels of logit_changes compiled for Hopper; `test_seeded.py` compares the op with its definition."""

from __future__ import annotations

import pytest
import torch

from idlm.infer.state.sequence_state import LogitChanges
from idlm.kernels.logit_changes import ChangedRows, KnownTokens
from tests.kernels.hopper_compiler import compiled_launches


@pytest.mark.sweep
def test_the_kernels_compile_for_hopper() -> None:
    """With drafts, with positions of blocks, and without either."""
    device = torch.device("meta")
    ints = torch.empty(8, dtype=torch.int64, device=device)
    logits_XV = torch.empty(8, 151_936, dtype=torch.bfloat16, device=device)
    drafts_ZN = torch.empty(5, 3, dtype=torch.int64, device=device)

    def run() -> None:
        changes = LogitChanges(5, 401, device)
        for drafts, own in ((None, None), (drafts_ZN, None), (drafts_ZN, ints)):
            known = KnownTokens(ints[:5], torch.empty(5, 401, dtype=torch.int64, device=device), drafts)
            changes.apply(logits_XV, known, ChangedRows(ints, ints, ints, own), ints[:4])

    names = [name for name, _ in compiled_launches(run)]
    assert set(names) == {"count_kernel", "change_kernel"} and names.count("change_kernel") == 3
