"""Base of kv-side accelerators that rank the slots before a block once, by the attention of the block's
queries to them, and select the best of them per layer and KV head for the block's other passes.

All layers are ranked at once after the last one, by `kernels/prefix_ranking`: attention leaves each row's
softmax sums over the slots before its block, and the pass stores the queries of blocks. Lists hold logical
slots, so they stay right when the prefix cache swaps a page.
B sequences, R rows, W positions of a block, S physical slots, C listed slots, N query heads, K KV heads, H
head dim, L sparse layers, Z lanes, X positions of all blocks of a pass."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from idlm.infer.sparse.accelerator import NOT_LISTED, BlockMemory, EngineSpec, KVAccelerator, KVPass, PassView
from idlm.infer.state.batch import to_device
from idlm.kernels.backend import memory_bytes
from idlm.kernels.paged_attention import BeforeBlock
from idlm.kernels.prefix_ranking import RankingPass, rank_prefix, workspace_bytes
from idlm.kernels.row_compaction import gather_rows

EVERYTHING = 1 << 30
"""A budget above the length of any prefix."""
STORED_ROWS = 512
"""A pass of at most this many rows holds the fused product of each sparse layer until its end. A larger one
copies the rows of blocks, which costs a launch a layer but little memory: most of its rows are prompts."""


class PrefixSets:
    """The slots that a block sees of those before it, per lane, sparse layer and KV head."""

    def __init__(self, spec: EngineSpec, *, exact_layers: int, num: int) -> None:
        self.exact_layers, self.memory = exact_layers, BlockMemory(spec.num_lanes, spec.device)
        num_layers = max(0, spec.num_layers - exact_layers)
        shape = (num_layers, spec.num_lanes, spec.heads.num_kv_heads, min(num, spec.max_slots))
        self.slots_LZKC = torch.full(shape, NOT_LISTED, dtype=torch.int32, device=spec.device)

    def reset(self, lanes: list[int]) -> None:
        self.memory.reset(lanes)
        self.slots_LZKC.index_fill_(1, to_device(lanes, self.slots_LZKC.device), NOT_LISTED)


class PrefixPass(KVPass):
    """`ranks_B` (bool): sequences whose sets this exact pass makes; the others use theirs of `sets`.

    What ranking needs is stored of all sequences, so that no shape depends on who ranks; ranking kernels end
    at once for a sequence that does not."""

    lists_ascend: ClassVar[bool] = True

    def __init__(self, view: PassView, sets: PrefixSets, *, is_sparse_B: Tensor, ranks_B: Tensor) -> None:
        super().__init__(view, is_sparse_B=is_sparse_B, needs_all_rows_B=ranks_B)
        self._sets, self._ranks_B = sets, ranks_B
        self._lists_LBKC = sets.slots_LZKC[:, view.plan.lanes_B]
        self._copies = len(view.plan.slots_R) > STORED_ROWS
        self._rows: list[tuple[tuple[Tensor, Tensor, Tensor], Tensor]] = []
        """Of each layer that is not copied yet: queries and sums of all rows, and the rows of blocks."""
        self._positions: list[Tensor] = []
        """Queries [L, X, N, H] and both sums [L, X, N] by position, as far as layers are copied."""
        self._num_copied = 0

    def select_kv(self, layer: int, q_RNH: Tensor) -> Tensor | None:
        """Return the sets made in an earlier pass over the block."""
        index = layer - self._sets.exact_layers
        return None if index < 0 else self._lists_LBKC[index]

    def prefix_sums(self, layer: int, q_RNH: Tensor) -> BeforeBlock:
        """Store the queries, and return where attention leaves their sums."""
        if self._copies:
            self._copy_positions()
        highest_RN, totals_RN = q_RNH.new_empty(2, *q_RNH.shape[:2], dtype=torch.float32)
        self._rows.append(((q_RNH, highest_RN, totals_RN), self.view.rows_BW))
        return BeforeBlock(highest_RN=highest_RN, totals_RN=totals_RN)

    def finish(self) -> None:
        """Rank all layers. The sets count from now on; a sequence that waited in this pass makes none."""
        view, sets = self.view, self._sets
        cache, first = view.cache, sets.exact_layers
        ranks_B = self._ranks_B & ~view.waits_B
        (q_LXNH, max_LXN, sum_LXN), rows_BW = self._stored()
        ranking = RankingPass(
            q_LRNH=q_LXNH,
            max_LRN=max_LXN,
            sum_LRN=sum_LXN,
            keys_LSKH=cache.keys[first:],
            block_table_BP=view.block_table_BP,
            page_size=view.page_size,
            rows_BW=rows_BW,
            starts_B=view.active.starts_B,
            ranks_B=ranks_B,
            max_slots=view.max_slots,
            scale=view.scale,
            k_scale_LK=None if cache.scales is None else cache.scales[0, first:],
        )
        rank_prefix(ranking, view.plan.lanes_B, sets.slots_LZKC)
        sets.memory.claim(view, ranks_B)

    def _stored(self) -> tuple[list[Tensor], Tensor]:
        """Queries and sums of all layers, and the row [B, W] of each position in them."""
        last_BW = self._rows[-1][1]
        # Rows are numbered anew where some are dropped, positions are not.
        if not self._copies and all(rows_BW is last_BW for _, rows_BW in self._rows):
            layers = zip(*(kept for kept, _ in self._rows), strict=True)
            return [torch.stack(each) for each in layers], last_BW
        self._copy_positions()
        positions_BW = torch.arange(last_BW.numel(), device=last_BW.device).view_as(last_BW)
        return self._positions, torch.where(last_BW >= 0, positions_BW, PassView.NOT_FED)

    def _copy_positions(self) -> None:
        """Copy what the layers left of the rows of blocks, and forget the others."""
        for kept, rows_BW in self._rows:
            rows_X = rows_BW.clamp(min=0).flatten()
            if not self._positions:
                shape = len(self._sets.slots_LZKC), len(rows_X)
                self._positions = [each.new_empty(*shape, *each.shape[1:]) for each in kept]
            gather_rows(rows_X, kept, out=[each[self._num_copied] for each in self._positions])
            self._num_copied += 1
        self._rows.clear()


class PrefixAccelerator(KVAccelerator, ABC):
    """Stores the sets of each lane's active block. The Config has `k` and `exact_layers`."""

    exact_options: ClassVar[Mapping[str, Any]] = {"k": EVERYTHING}
    is_static: ClassVar[bool] = True
    shards: ClassVar[bool] = True

    def problems(self) -> list[str]:
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
        assert spec.block_size is not None
        head_bytes, sum_bytes = spec.heads.head_dim * spec.heads.dtype.itemsize, 2 * 4 * spec.heads.num_heads
        index_bytes = spec.heads.num_heads * head_bytes + sum_bytes
        # A row in place holds the fused product.
        row_bytes = index_bytes + 2 * spec.heads.num_kv_heads * head_bytes
        kept = num_layers * min(spec.max_rows, STORED_ROWS) * (row_bytes + index_bytes)
        if spec.max_rows > STORED_ROWS:
            # Of a copied layer the product is held during the next one. A pass is padded to at most half as
            # many sequences again.
            num_positions = min(spec.max_rows, 3 * spec.num_lanes * spec.block_size // 2)
            kept = max(kept, num_layers * num_positions * index_bytes + spec.max_rows * row_bytes)
        lists = self._slot_bytes() * min(self.config.k, spec.max_slots)
        shares = workspace_bytes(num_layers, spec.num_lanes, spec.heads.num_kv_heads, spec.max_slots)
        return kept + lists + shares

    def _slot_bytes(self) -> int:
        """Bytes of one slot in the lists of all lanes, sparse layers and KV heads."""
        spec = self.spec
        return (
            4 * max(0, spec.num_layers - self.config.exact_layers) * spec.num_lanes * spec.heads.num_kv_heads
        )

    def allocate(self) -> None:
        self.sets = PrefixSets(self.spec, exact_layers=self.config.exact_layers, num=self.config.k)

    def reset(self, lanes: list[int]) -> None:
        self.sets.reset(lanes)


def set_problems(spec: EngineSpec, *, k: int, exact_layers: int) -> list[str]:
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
