"""Other choices of the masks that FOCUS keeps, of a fixed number K (FOCUS, section 5.1 and table 3).

B sequences, P parts of a sum, W places of a block, Z lanes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from idlm.infer.accelerators.focus import FocusPass
from idlm.kernels.block_eviction import Selected
from idlm.kernels.block_eviction.plain import best, with_context

TOP, RANDOM, BOTTOM = "top", "random", "bottom"
SELECTIONS = (TOP, RANDOM, BOTTOM)


@contextlib.contextmanager
def selecting(name: str, k: int) -> Iterator[None]:
    """Keep K masks of the highest, lowest or random deltas in place of FOCUS's budget (section 5.1). With
    each go its predecessor and the masks to its left without keys and values.
    """
    original = FocusPass._select

    def select(self: FocusPass, first_BPW: torch.Tensor, second_BPW: torch.Tensor) -> Selected:
        view, size = self.view, first_BPW.shape[2]
        deltas_BW = second_BPW.sum(dim=1) - first_BPW.sum(dim=1)
        if name != TOP:
            deltas_BW = -deltas_BW if name == BOTTOM else torch.rand_like(deltas_BW)
        is_mask_BW, fed_BW = view.is_mask_BW, view.rows_BW >= 0
        processed_BW = self._memory.processed_ZW[view.plan.lanes_B]
        budget_B = torch.full_like(view.plan.lanes_B, k)
        chosen_BW = best(deltas_BW, view.active.is_maskable_BW & is_mask_BW, budget_B)
        evicts_B = self._started.mine_B & (is_mask_BW.sum(dim=1) > k)
        context_BW = with_context(chosen_BW, is_mask_BW, fed_BW, processed_BW)
        kept_BW = torch.where(evicts_B[:, None], context_BW, fed_BW)
        place_W = torch.arange(size, device=kept_BW.device)
        ends_B = torch.where(kept_BW | processed_BW, place_W + 1, 0).amax(dim=1)
        return Selected(kept_BW=kept_BW, ends_B=torch.where(evicts_B, ends_B, size), budget_B=budget_B)

    FocusPass._select = select  # type: ignore[method-assign]
    try:
        yield
    finally:
        FocusPass._select = original  # type: ignore[method-assign]
