"""Base of kv-side accelerators that rank the slots before a block once, by the attention of the block's
queries to them, and keep the best of them per layer and KV head for the block's other passes.

All layers are ranked at once behind the last one, by `kernels/prefix_ranking`: attention leaves each row's
softmax sums over the slots before its block, and the pass keeps its queries. Lists hold logical slots, so
they stay right when the prefix cache swaps a page.
B sequences, R rows, W places of a block, S physical slots, C listed slots, N query heads, K KV heads, H head
dim, L sparse layers, Z lanes.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from idlm.devices import memory_bytes
from idlm.infer.accelerators.base import BlockMemory, EngineSpec, KVAccelerator, KVPass
from idlm.infer.sparse.view import NOT_LISTED, PassView, by_row
from idlm.infer.state.batch import to_device
from idlm.kernels.paged_attention import BeforeBlock
from idlm.kernels.prefix_ranking import RankingPass, rank_prefix, workspace_bytes

EVERYTHING = 1 << 30
"""A budget above the length of any prefix."""


class PrefixSets:
    """The slots that a block sees of those before it, per lane, sparse layer and KV head."""

    def __init__(self, spec: EngineSpec, *, exact_layers: int, num: int) -> None:
        self.exact_layers, self.memory = exact_layers, BlockMemory(spec.num_lanes, spec.device)
        num_layers = max(0, spec.num_layers - exact_layers)
        shape = (num_layers, spec.num_lanes, spec.num_kv_heads, min(num, spec.max_slots))
        self.slots_LZKC = torch.full(shape, NOT_LISTED, dtype=torch.int32, device=spec.device)

    def reset(self, lanes: list[int]) -> None:
        """Clear the sets of these lanes."""
        self.memory.reset(lanes)
        self.slots_LZKC.index_fill_(1, to_device(lanes, self.slots_LZKC.device), NOT_LISTED)


class PrefixPass(KVPass):
    """`ranks_B` (bool): sequences whose sets this exact pass makes; the others use theirs of `sets`.

    What ranking needs is kept of all sequences, so that no shape depends on who ranks; nothing is copied
    until the last layer, and ranking kernels end at once for a sequence that does not rank.
    """

    lists_ascend: ClassVar[bool] = True

    def __init__(self, view: PassView, sets: PrefixSets, *, is_sparse_B: Tensor, ranks_B: Tensor) -> None:
        super().__init__(view, is_sparse_B=is_sparse_B, needs_all_rows_B=ranks_B)
        self._sets, self._ranks_B = sets, ranks_B
        self._lists_LBKC = sets.slots_LZKC[:, view.plan.lanes_B]
        self._layers: list[tuple[Tensor, Tensor, BeforeBlock]] = []
        """Per sparse layer: queries, the rows of blocks as they were numbered there, and sums."""

    def select_kv(self, layer: int, q_RNH: Tensor) -> Tensor | None:
        """Return the sets made in an earlier pass over the block."""
        index = layer - self._sets.exact_layers
        return None if index < 0 else self._lists_LBKC[index]

    def prefix_sums(self, layer: int, q_RNH: Tensor) -> BeforeBlock:
        """Keep the queries, and return where attention leaves their sums."""
        highest_RN, totals_RN = q_RNH.new_empty(2, *q_RNH.shape[:2], dtype=torch.float32)
        sums = BeforeBlock(highest_RN=highest_RN, totals_RN=totals_RN)
        self._layers.append((q_RNH, self.view.rows_BW, sums))
        return sums

    def finish(self) -> None:
        """Rank all layers. The sets count from now on; a sequence that waited in this pass makes none."""
        view, sets = self.view, self._sets
        cache, first = view.cache, sets.exact_layers
        ranks_B = self._ranks_B & ~view.waits_B
        q_LRNH, max_LRN, sum_LRN = (torch.stack(each) for each in zip(*map(self._numbered, self._layers)))
        ranking = RankingPass(
            q_LRNH=q_LRNH,
            max_LRN=max_LRN,
            sum_LRN=sum_LRN,
            keys_LSKH=cache.keys[first:],
            block_table_BP=view.block_table_BP,
            page_size=view.page_size,
            rows_BW=view.rows_BW,
            starts_B=view.active.starts_B,
            ranks_B=ranks_B,
            max_slots=view.max_slots,
            scale=view.scale,
            k_scale_LK=None if cache.scales is None else cache.scales[0, first:],
        )
        rank_prefix(ranking, view.plan.lanes_B, sets.slots_LZKC)
        sets.memory.claim(view, ranks_B)

    def _numbered(self, layer: tuple[Tensor, Tensor, BeforeBlock]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and sums of a layer by the numbers that rows have in the last one."""
        (q_RNH, rows_BW, sums), (last_RNH, last_rows_BW, _) = layer, self._layers[-1]
        kept = q_RNH, sums.highest_RN, sums.totals_RN
        if rows_BW is last_rows_BW:
            return kept
        earlier_R = by_row(rows_BW.clamp(min=0), last_rows_BW, len(last_RNH), other=0)
        return kept[0][earlier_R], kept[1][earlier_R], kept[2][earlier_R]


class PrefixAccelerator(KVAccelerator, ABC):
    """Keeps the sets of each lane's active block. The Config has `k` and `exact_layers`."""

    exact_options: ClassVar[Mapping[str, Any]] = {"k": EVERYTHING}
    is_static: ClassVar[bool] = True
    shards: ClassVar[bool] = True

    def problems(self) -> list[str]:
        """Also names numbers out of range."""
        spec, k, exact_layers = self.spec, self.config.k, self.config.exact_layers
        found = set_problems(spec, k=k, exact_layers=exact_layers)
        # The lists of lanes, and those that a pass takes of them.
        slot_bytes = 2 * self._slot_bytes()
        num_bytes, free = slot_bytes * min(k, spec.max_slots), memory_bytes(spec.device)[0]
        if not found and num_bytes > free:
            found.append(
                f"k={k} lists of {spec.num_lanes - 1} sequences take {num_bytes:,} bytes and {free:,} are "
                f"free (allowed: k up to {free // slot_bytes}, or fewer max_num_seqs)"
            )
        return [*super().problems(), *found]

    def pass_bytes(self) -> int:
        """Return the bytes of queries, sums and lists of all sparse layers, and of the shares of some."""
        spec, num_layers = self.spec, self.spec.num_layers - self.config.exact_layers
        # The fused product, and a copy of its queries.
        kept_heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
        row_bytes = kept_heads * spec.head_dim * spec.dtype.itemsize + 4 * 4 * spec.num_heads
        lists = self._slot_bytes() * min(self.config.k, spec.max_slots)
        shares = workspace_bytes(num_layers, spec.num_lanes, spec.num_kv_heads, spec.max_slots)
        return num_layers * spec.max_rows * row_bytes + lists + shares

    def _slot_bytes(self) -> int:
        """Bytes of one slot in the lists of all lanes, sparse layers and KV heads."""
        spec = self.spec
        return 4 * max(0, spec.num_layers - self.config.exact_layers) * spec.num_lanes * spec.num_kv_heads

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
