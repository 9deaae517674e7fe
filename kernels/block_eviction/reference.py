"""The definition: one sequence after the other, in fp32 (fp64 from fp64). Rules in README.md.

I queries and J keys of a block, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def importance_reference(q_INH: Tensor, k_JKH: Tensor, *, scale: float) -> Tensor:
    """The attention that each key gets, [J]: scores, the largest of three neighbours, softmax over keys; then
    summed over queries and heads.
    """
    wide = torch.float64 if q_INH.dtype == torch.float64 else torch.float32
    q_INH, k_JKH = q_INH.to(wide), k_JKH.to(wide)
    found_J = torch.zeros(len(k_JKH), dtype=wide)
    group = q_INH.shape[1] // k_JKH.shape[1]
    for query_NH in q_INH:
        for head, query_H in enumerate(query_NH):
            scores_J = (k_JKH[:, head // group] * query_H).sum(-1) * scale
            pooled = [scores_J[max(0, j - 1) : j + 2].amax() for j in range(len(scores_J))]
            found_J += torch.stack(pooled).softmax(dim=0).cpu()
    return found_J


def select_reference(
    deltas: dict[int, float],
    may_be_decided: list[int],
    fed: set[int],
    processed: set[int],
    *,
    size: int,
    mean_decoded: float,
    alpha: float,
    is_mine: bool,
    sees_processed: bool = True,
) -> tuple[set[int], int, int]:
    """The places that go on, how many of the first places they see, and the budget.

    `deltas`: gained attention of every mask; `may_be_decided`: some of them.
    """
    values = list(deltas.values())
    mean = sum(values) / max(1, len(values))
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values)))
    num_strong = sum(value >= mean + std for value in values)
    budget = max(min(size, math.ceil(alpha * mean_decoded)), num_strong)
    if not is_mine or len(deltas) <= budget:
        return set(fed), size, budget
    chosen = set(sorted(may_be_decided, key=lambda place: (-deltas[place], place))[:budget])
    kept = chosen | {place for place in fed if place not in deltas}
    kept |= {place - 1 for place in chosen if place - 1 in deltas}
    last = max(kept, default=-1)
    kept |= {place for place in deltas if place < last and place not in processed}
    seen = kept | processed if sees_processed else kept
    return kept, max(seen, default=-1) + 1, budget
