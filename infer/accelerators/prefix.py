"""Base of kv-side accelerators that rank the slots before a block once, by the attention of the block's
queries to them, and keep the best of them per layer and KV head for the block's other passes.

b sequences, W places of a block, S slots of the longest prefix, C listed slots, N query heads, K KV heads,
G = N / K, H head dim, L sparse layers, Z lanes.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from idlm.infer.accelerators.base import BlockMemory, EngineSpec, KVAccelerator, KVPass
from idlm.infer.sparse.view import PassView
from idlm.infer.state.batch import to_device

NOT_LISTED = -1
EVERYTHING = 1 << 30
"""A budget above the length of any prefix."""
MAX_NUMBERS = 1 << 26
"""Scores, or elements of keys, that ranking holds at a time."""


def attention_mass(view: PassView, layer: int, q_RNH: Tensor, sequences_b: Tensor, num_slots: int) -> Tensor:
    """Return the attention to the first `num_slots` slots, [b, K, S] fp32 (fp64 from fp64): the softmax of
    each query's scores over the slots before its block, averaged over the queries of a KV head (G heads at
    the positions that have a row). 0 at other slots.
    """
    is_fed_bW = view.rows_BW[sequences_b] >= 0
    slots_S = torch.arange(num_slots, device=q_RNH.device)
    is_before_bS = slots_S < view.active.starts_B[sequences_b, None]
    k_bSKH = view.keys(layer, slots_S.expand(len(sequences_b), -1), sequences_b)
    q_bWNH = view.queries(q_RNH, sequences_b)
    q_bWKGH = q_bWNH.unflatten(2, (k_bSKH.shape[2], -1))
    # Slots that were never written may hold NaN.
    k_bSKH = torch.where(is_before_bS[:, :, None, None], k_bSKH, 0)
    scores_bKGWS = torch.einsum("bwkgh,bskh->bkgws", q_bWKGH, k_bSKH) * view.scale
    scores_bKGWS = scores_bKGWS.masked_fill(~is_before_bS[:, None, None, None], float("-inf"))
    # A block at slot 0 has no slot before it, so its softmax is NaN.
    is_counted_bWS = is_fed_bW[:, :, None] & is_before_bS[:, None]
    attention_mass_bKGWS = torch.where(is_counted_bWS[:, None, None], scores_bKGWS.softmax(dim=-1), 0)
    num_queries_b = is_fed_bW.sum(-1).clamp(min=1) * q_bWKGH.shape[3]
    return attention_mass_bKGWS.sum((2, 3)) / num_queries_b[:, None, None]


def best(scores_bKS: Tensor, is_candidate_bS: Tensor, num: int) -> Tensor:
    """Return the `num` candidates [b, K, num] with the largest scores, `NOT_LISTED` where there are fewer. Of
    equal scores the lower slot comes first on every device; `topk` does not define the order of ties.
    """
    scores_bKS = scores_bKS.masked_fill(~is_candidate_bS[:, None], float("-inf"))
    ranked_bKS, order_bKS = scores_bKS.sort(dim=-1, descending=True, stable=True)
    places_bKC = torch.where(ranked_bKS > float("-inf"), order_bKS, NOT_LISTED)[..., :num]
    missing = num - places_bKC.shape[-1]
    return torch.nn.functional.pad(places_bKC, (0, missing), value=NOT_LISTED)


class PrefixSets:
    """The slots that a block sees of those before it, per lane, sparse layer and KV head."""

    def __init__(self, spec: EngineSpec, *, exact_layers: int, num: int) -> None:
        self.exact_layers, self.num = exact_layers, min(num, spec.max_slots)
        self.spec, self.memory = spec, BlockMemory(spec.num_lanes, spec.device)
        num_layers = max(0, spec.num_layers - exact_layers)
        shape = (num_layers, spec.num_lanes, spec.num_kv_heads, self.num)
        self.slots_LZKC = torch.full(shape, NOT_LISTED, dtype=torch.int32, device=spec.device)

    def reset(self, lanes: list[int]) -> None:
        """Clear the sets of these lanes."""
        self.memory.reset(lanes)
        self.slots_LZKC.index_fill_(1, to_device(lanes, self.slots_LZKC.device), NOT_LISTED)


class PrefixPass(KVPass):
    """`ranks_B` (bool): sequences whose sets this exact pass makes; the others use theirs of `sets`.

    Scores are computed for all sequences and kept for those of `ranks_B`, so that no shape depends on who
    ranks.
    """

    def __init__(self, view: PassView, sets: PrefixSets, *, is_sparse_B: Tensor, ranks_B: Tensor) -> None:
        super().__init__(view, is_sparse_B=is_sparse_B, needs_all_rows_B=ranks_B)
        self._sets, self._ranks_B = sets, ranks_B
        # Per slot of a sequence ranking holds its scores, or its keys.
        spec = sets.spec
        num_per_slot = max(spec.num_heads * view.active.size, spec.num_kv_heads * spec.head_dim)
        self._parts = view.sequences_B.split(max(1, MAX_NUMBERS // (view.max_slots * num_per_slot)))

    def select_kv(self, layer: int, q_RNH: Tensor) -> Tensor | None:
        """Return the sets made in an earlier pass over the block; make those of `ranks_B`."""
        sets, view = self._sets, self.view
        index = layer - sets.exact_layers
        if index < 0:
            return None
        slots_ZKC = sets.slots_LZKC[index]
        slots_S = torch.arange(view.max_slots, device=q_RNH.device)
        for sequences_b in self._parts:
            attention_mass_bKS = attention_mass(view, layer, q_RNH, sequences_b, view.max_slots)
            is_before_bS = slots_S < view.active.starts_B[sequences_b, None]
            slots_bKC = best(attention_mass_bKS, is_before_bS, sets.num).to(torch.int32)
            lanes_b, ranks_b11 = view.plan.lanes_B[sequences_b], self._ranks_B[sequences_b, None, None]
            slots_ZKC[lanes_b] = torch.where(ranks_b11, slots_bKC, slots_ZKC[lanes_b])
        return slots_ZKC[view.plan.lanes_B].long()

    def finish(self) -> None:
        """Sets made in this pass count from now on."""
        self._sets.memory.claim(self.view, self._ranks_B & ~self.view.waits_B)


class PrefixAccelerator(KVAccelerator, ABC):
    """Keeps the sets of each lane's active block. The Config has `k` and `exact_layers`."""

    exact_options: ClassVar[Mapping[str, Any]] = {"k": EVERYTHING}
    is_static: ClassVar[bool] = True
    shards: ClassVar[bool] = True

    def problems(self) -> list[str]:
        """Also names numbers out of range."""
        return [
            *super().problems(),
            *set_problems(self.spec, k=self.config.k, exact_layers=self.config.exact_layers),
        ]

    def allocate(self) -> None:
        """Allocate a set per lane."""
        self.sets = PrefixSets(self.spec, exact_layers=self.config.exact_layers, num=self.config.k)

    def reset(self, lanes: list[int]) -> None:
        """Clear the sets of these lanes."""
        self.sets.reset(lanes)


def set_problems(spec: EngineSpec, *, k: int, exact_layers: int) -> list[str]:
    """Return what is wrong with the numbers of a kv-side accelerator."""
    found = []
    if k < 1:
        found.append(f"k={k!r} is below 1")
    if exact_layers < 0:
        found.append(f"exact_layers={exact_layers!r} is below 0")
    if exact_layers >= spec.num_layers:
        found.append(
            f"exact_layers={exact_layers!r} thins nothing: the model has {spec.num_layers} layers (allowed: "
            f"0 to {spec.num_layers - 1})"
        )
    return found
