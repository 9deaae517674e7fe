"""The definition: one sequence after the other, in fp32 (fp64 from fp64). Rules in README.md.

I queries and J keys of a block, N query heads, K KV heads, H head dim."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


def importance_reference(q_INH: Tensor, k_JKH: Tensor, *, scale: float) -> Tensor:
    """The attention that each key gets, [J]: scores, the largest of three neighbours, softmax over keys; then
    summed over queries and heads."""
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
    """The positions that remain, how many of the first positions they see, and the budget.

    `deltas`: gained attention of every mask; `may_be_decided`: some of them."""
    values = list(deltas.values())
    mean = sum(values) / max(1, len(values))
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values)))
    num_strong = sum(value >= mean + std for value in values)
    budget = max(min(size, math.ceil(alpha * mean_decoded)), num_strong)
    if not is_mine or len(deltas) <= budget:
        return set(fed), size, budget
    chosen = set(sorted(may_be_decided, key=lambda index: (-deltas[index], index))[:budget])
    kept = chosen | {index for index in fed if index not in deltas}
    kept |= {index - 1 for index in chosen if index - 1 in deltas}
    last = max(kept, default=-1)
    kept |= {index for index in deltas if index < last and index not in processed}
    seen = kept | processed if sees_processed else kept
    return kept, max(seen, default=-1) + 1, budget


@dataclass(slots=True)
class LaneState:
    """What a lane remembers: its block and the one before (first slots), frozen tokens by position in both,
    processed positions, masks at the block's beginning and its passes, and both of earlier blocks."""

    start: int = -1
    before_start: int = -1
    is_new: bool = True
    frozen: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    processed: set[int] = field(default_factory=set)
    num_masks: int = 0
    num_passes: int = 0
    num_decoded: int = 0
    num_earlier: int = 0


def begin_reference(
    lane: LaneState,
    start: int,
    size: int,
    fed: dict[int, int],
    masks: set[int],
    stored: dict[int, int],
    *,
    of_request: bool,
    retains_stored: bool,
    shifted: bool,
    prefills: bool,
) -> tuple[bool, bool, float, set[int], set[int]]:
    """Whether the block is fed whole with masks and whether it may lose rows, the average, and the positions
    that are not computed, of the block and of the one before.

    `fed`, `stored`: tokens fed, by place of the block and of the one before."""
    mine = len(fed) == size and bool(masks)
    evicts = mine and not (prefills and lane.is_new)
    if mine and lane.start != start:
        lane.num_decoded += lane.num_masks if lane.num_passes else 0
        lane.num_earlier += lane.num_passes
        lane.num_passes = 0
        if retains_stored:
            lane.before_start, lane.before = lane.start, lane.frozen
        lane.start, lane.frozen, lane.processed = start, {}, set()
    if mine and not lane.num_passes:
        lane.num_masks = len(masks)
    decoded, passes = lane.num_masks - len(masks), lane.num_passes
    if of_request:
        decoded, passes = decoded + lane.num_decoded, passes + lane.num_earlier
    if mine:
        lane.frozen = {index: token for index, token in lane.frozen.items() if fed[index] == token}
    kept: dict[int, int] = {}
    if retains_stored and start - size in (lane.start, lane.before_start):
        kept = lane.frozen if lane.start == start - size else lane.before
    stays = {index for index, token in kept.items() if stored.get(index) == token}
    stays -= {size - 1} if shifted else set()
    return mine, evicts, max(1.0, decoded / max(1, passes)), set(lane.frozen) if mine else set(), stays


def finish_reference(
    lane: LaneState, fed: dict[int, int], masks: set[int], computed: set[int], *, evicts: bool, stability: str
) -> None:
    """The end of a pass of a block that is fed whole with masks, and that does not wait: `computed` positions
    went through all layers."""
    lane.processed |= computed
    lane.num_passes += evicts
    lane.is_new = False
    if stability == "off":
        return
    for index in fed.keys() - masks:
        if stability == "plain" or index + 1 not in masks:
            lane.frozen[index] = fed[index]
