"""The definition of page_bounds in fp32 (fp64 of fp64), one piece or page at a time.

B sequences, I pieces, R rows, W places of a block, S physical slots, X pieces of the cache, Q queries of a KV
head, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from idlm.kernels.page_bounds.types import PageLayout


def write_bounds_reference(
    keys_SKH: Tensor,
    k_scale_K: Tensor | None,
    least_XKH: Tensor,
    largest_XKH: Tensor,
    *,
    first_slots_I: Tensor,
    sequences_I: Tensor,
    ends_B: Tensor,
    layout: PageLayout,
) -> None:
    """See `op.write_bounds`."""
    for first, b in zip(first_slots_I.tolist(), sequences_I.tolist(), strict=True):
        begin, end = first // layout.piece * layout.piece, int(ends_B[b])
        if first >= end:
            continue
        slots = [_physical(slot, b, layout) for slot in range(begin, min(begin + layout.piece, end))]
        k_SKH = keys_SKH[slots].to(torch.float64 if keys_SKH.dtype == torch.float64 else torch.float32)
        if k_scale_K is not None:
            k_SKH = k_SKH * k_scale_K[:, None]
        piece = slots[0] // layout.piece
        least_XKH[piece] = k_SKH.amin(0).to(least_XKH.dtype)
        largest_XKH[piece] = k_SKH.amax(0).to(largest_XKH.dtype)


def page_scores_reference(
    q_RNH: Tensor,
    rows_W: Tensor,
    least_XKH: Tensor,
    largest_XKH: Tensor,
    *,
    sequence: int,
    start: int,
    layout: PageLayout,
) -> list[list[float]]:
    """Scores of the pages before `start` of one sequence, by KV head."""
    rows = [row for row in rows_W.tolist() if row >= 0]
    num_kv_heads = least_XKH.shape[1]
    found = []
    for head in range(num_kv_heads):
        group = q_RNH.shape[1] // num_kv_heads
        q_QH = q_RNH[rows, head * group : (head + 1) * group].flatten(0, 1).double()
        scores = []
        for first in range(0, start, layout.page):
            slots = range(first, min(first + layout.page, start), layout.piece)
            pieces = [_physical(slot, sequence, layout) // layout.piece for slot in slots]
            least_H, largest_H = least_XKH[pieces, head].amin(0).double(), largest_XKH[pieces, head].amax(0)
            bound_Q = torch.maximum(q_QH * least_H, q_QH * largest_H.double()).sum(1)
            scores.append(float(bound_Q.mean()) if rows else math.nan)
        found.append(scores)
    return found


def _physical(slot: int, sequence: int, layout: PageLayout) -> int:
    page = int(layout.block_table_BP[sequence, slot // layout.page_size])
    return page * layout.page_size + slot % layout.page_size
