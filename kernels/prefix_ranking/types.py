"""Arguments of the ops that rank the slots before a block.

L sparse layers, R rows of a pass, B sequences, W positions of a block, S physical KV slots, P pages of the
longest sequence, N query heads, K KV heads, H head dim."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

GROUP = 16
"""Slots of a group, whose largest share the selection looks at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingPass:
    """What a pass leaves for the ranking after its last layer; layer 0 is the first sparse one.

    `q_LRNH`: rotated queries. `max_LRN`, `sum_LRN` (fp32): the statistics of each row's softmax over the
    slots `[0, starts_B)` of its sequence, in base 2. With x = <q, k> * scale * log2(e), `max` is the largest
    x and `sum` the sum of 2 ** (x - max); without such a slot they are -inf and 0. Only rows named by
    `rows_BW` of sequences with `ranks_B` are read.

    `keys_LSKH`: the cache, in the dtype of the queries, or fp8 with factors `k_scale_LK` (fp32; None: 1).
    `block_table_BP`: pages of `page_size` slots. `rows_BW`: the row at each position of the active block, -1
    where it has none. `starts_B`: the first slot of the block. `ranks_B` (bool): sequences that are ranked.
    `max_slots`: bound of `starts_B` on the host. All tensors are on one device; integers are int64."""

    q_LRNH: Tensor
    max_LRN: Tensor
    sum_LRN: Tensor
    keys_LSKH: Tensor
    block_table_BP: Tensor
    page_size: int
    rows_BW: Tensor
    starts_B: Tensor
    ranks_B: Tensor
    max_slots: int
    scale: float
    k_scale_LK: Tensor | None = None

    def __post_init__(self) -> None:
        num_layers, num_rows, num_heads, head_dim = self.q_LRNH.shape
        num_kv_heads = self.keys_LSKH.shape[2]
        statistics = (num_layers, num_rows, num_heads)
        assert self.max_LRN.shape == self.sum_LRN.shape == statistics, f"{self.max_LRN.shape=} {statistics=}"
        assert self.keys_LSKH.shape[0] == num_layers and self.keys_LSKH.shape[3] == head_dim, (
            f"{self.keys_LSKH.shape=} {self.q_LRNH.shape=}"
        )
        assert num_heads % num_kv_heads == 0 and self.scale > 0, f"{num_heads=} {num_kv_heads=} {self.scale=}"
        assert self.max_slots <= self.block_table_BP.shape[1] * self.page_size, f"{self.max_slots=}"

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.keys_LSKH.shape[2]
