"""Lists of the slots before a block that its queries attend to most, for all sparse layers at once.

Kernels on a GPU, plain torch elsewhere and for fp64; no shape depends on what a tensor holds. Contract and
reasons in README.md. L sparse layers, R rows of a pass, B sequences, b some of them, W positions of a block,
P pages of the longest sequence, N query heads, K KV heads, G = N / K, H head dim, S slots of a sequence, or
of the cache, C listed slots, Z lanes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from idlm.kernels.backend import FP8, LOG2_E, computes, num_multiprocessors, read_slots, runs_kernels

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


MAX_NUMBERS = 1 << 26
"""Scores, or elements of keys, in memory at a time in plain torch."""
NOT_LISTED = -1
MAX_SHARE_BYTES = 256 << 20
"""Most memory for the shares of a group of layers, unless one layer needs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingLaunch:
    """A tile has `block_n` slots and at most `max_queries` queries, the widest product of Hopper; keys are
    loaded with `stages` buffers. `per_sm` programs share a multiprocessor, so that some compute exponentials
    while others wait for products. The selection reads `read` scores together, and then looks at `tile`
    candidates together."""

    block_n: int = 64
    max_queries: int = 256
    warps: int = 4
    stages: int = 5
    per_sm: int = 2
    tile: int = 1024
    read: int = 4096
    select_warps: int = 8


USUAL = RankingLaunch()
LARGE = RankingLaunch(stages=3)
"""More queries, or wider heads: they leave less shared memory for keys."""
FP32 = RankingLaunch(block_n=32, max_queries=32, stages=2)
MAX_QUERY_NUMBERS = 128 * 128


def choose(dtype: torch.dtype, num_queries: int, block_h: int) -> RankingLaunch:
    """Launch parameters by the dtype and number of queries and the padded head dim."""
    if dtype == torch.float32:
        return FP32
    if num_queries * block_h <= MAX_QUERY_NUMBERS:
        return USUAL
    return LARGE if block_h <= 128 else replace(LARGE, max_queries=LARGE.max_queries // 2)


@torch.inference_mode()
def rank_prefix(ranking: RankingPass, lanes_B: Tensor, slots_LZKC: Tensor) -> None:
    """Write the lists of sequences that rank into `slots_LZKC[:, lanes_B]` (int32); others stay.

    A list has the C slots before the block with the largest `attention_share`, ascending, then -1. Of
    equal shares the lower slot is taken. Nothing waits for the device, and no shape depends on contents."""
    num_layers, num_sequences = len(ranking.q_LRNH), len(ranking.starts_B)
    assert len(slots_LZKC) == num_layers and slots_LZKC.dtype == torch.int32, f"{slots_LZKC.shape=}"
    maximum = layers_at_once(num_layers, num_sequences, ranking.num_kv_heads, ranking.max_slots)
    for first in range(0, num_layers, maximum):
        # In a function, so that the shares of a group are freed before those of the next are computed.
        _rank_layers(ranking, lanes_B, slots_LZKC, first, min(maximum, num_layers - first))


def _rank_layers(
    ranking: RankingPass, lanes_B: Tensor, slots_LZKC: Tensor, first_layer: int, num_layers: int
) -> None:
    shares_LBKS = attention_share(ranking, first_layer, num_layers)
    lists_LZKC = slots_LZKC[first_layer : first_layer + num_layers]
    select_largest(shares_LBKS, ranking.starts_B, ranking.ranks_B, lanes_B, lists_LZKC)


def attention_share(ranking: RankingPass, first_layer: int, num_layers: int) -> Tensor:
    """Mean attention [L, B, K, S] of a block's queries to the slots before it (fp32; fp64 of fp64).

    The mean is over the rows fed and the heads of a KV head, of 2 ** (x - max) / sum. S is at least
    `max_slots`. Entries from the block on, and those of sequences that do not rank, are undefined."""
    if not computes(ranking.q_LRNH):
        return _plain_share(ranking, first_layer, num_layers)
    import triton

    from idlm.kernels.prefix_ranking.kernel import share_kernel

    layers = slice(first_layer, first_layer + num_layers)
    q_LRNH, keys_LSKH, k_scale_LK = ranking.q_LRNH[layers], ranking.keys_LSKH[layers], ranking.k_scale_LK
    max_LRN, sum_LRN = ranking.max_LRN[layers], ranking.sum_LRN[layers]
    (num_sequences, num_positions), device = ranking.rows_BW.shape, q_LRNH.device
    num_heads, head_dim = q_LRNH.shape[2:]
    num_kv_heads = ranking.num_kv_heads
    assert keys_LSKH.dtype in (q_LRNH.dtype, FP8), f"{keys_LSKH.dtype=} {q_LRNH.dtype=}"
    assert q_LRNH.stride(3) == keys_LSKH.stride(3) == 1, f"{q_LRNH.stride()=} {keys_LSKH.stride()=}"
    assert max_LRN.stride() == sum_LRN.stride() and max_LRN[0].is_contiguous(), f"{max_LRN.stride()=}"
    assert ranking.rows_BW.is_contiguous() and ranking.block_table_BP.stride(1) == 1
    assert k_scale_LK is None or k_scale_LK.is_contiguous(), f"{k_scale_LK=}"
    num_slots = triton.cdiv(ranking.max_slots, GROUP) * GROUP
    shares_LBKS = q_LRNH.new_empty(num_layers, num_sequences, num_kv_heads, num_slots, dtype=torch.float32)
    num_queries = num_positions * (num_heads // num_kv_heads)
    block_h = max(16, triton.next_power_of_2(head_dim))
    launch = choose(q_LRNH.dtype, num_queries, block_h)
    block_m = max(16, min(launch.max_queries, triton.next_power_of_2(num_queries)))
    max_tiles = num_layers * num_sequences * triton.cdiv(ranking.max_slots, launch.block_n)
    workers = max(1, min(max_tiles, num_multiprocessors(device) * launch.per_sm // num_kv_heads))
    share_kernel[(workers * num_kv_heads,)](
        *(q_LRNH, max_LRN, sum_LRN, keys_LSKH, k_scale_LK if k_scale_LK is None else k_scale_LK[layers]),
        *(ranking.block_table_BP, ranking.rows_BW, ranking.starts_B, ranking.ranks_B, shares_LBKS),
        ranking.scale * LOG2_E,
        *(num_layers, num_sequences, num_slots),
        *(*q_LRNH.stride()[:3], max_LRN.stride(0), *keys_LSKH.stride()[:3], ranking.block_table_BP.stride(0)),
        W=num_positions,
        K=num_kv_heads,
        G=num_heads // num_kv_heads,
        H=head_dim,
        PAGE=ranking.page_size,
        SCALED=k_scale_LK is not None,
        PARTS=triton.cdiv(num_queries, block_m),
        BLOCK_B=triton.next_power_of_2(num_sequences),
        BLOCK_W=triton.next_power_of_2(num_positions),
        BLOCK_M=block_m,
        BLOCK_N=launch.block_n,
        BLOCK_H=block_h,
        STAGES=launch.stages,
        PRECISION="ieee" if q_LRNH.dtype == torch.float32 else "tf32",
        IS_NARROW=keys_LSKH.shape[1] * keys_LSKH.stride(1) < 1 << 31,
        num_warps=launch.warps,
    )
    return shares_LBKS


def _plain_share(ranking: RankingPass, first_layer: int, num_layers: int) -> Tensor:
    num_heads, head_dim = ranking.q_LRNH.shape[2:]
    num_sequences, num_positions = ranking.rows_BW.shape
    per_slot = max(num_heads * num_positions, ranking.num_kv_heads * head_dim)
    sequences_B = torch.arange(num_sequences, device=ranking.starts_B.device)
    parts = sequences_B.split(max(1, MAX_NUMBERS // max(1, ranking.max_slots * per_slot)))
    shares = [
        torch.cat([_share(ranking, layer, sequences_b) for sequences_b in parts])
        for layer in range(first_layer, first_layer + num_layers)
    ]
    return torch.stack(shares)


def _share(ranking: RankingPass, layer: int, sequences_b: Tensor) -> Tensor:
    """Mean attention [b, K, S] of some sequences' queries in one layer; 0 from the block on."""
    q_RNH, num_kv_heads = ranking.q_LRNH[layer], ranking.num_kv_heads
    wide = torch.float64 if q_RNH.dtype == torch.float64 else torch.float32
    slots_S = torch.arange(ranking.max_slots, device=q_RNH.device)
    is_before_bS = slots_S < ranking.starts_B[sequences_b, None]
    pages_bS = ranking.block_table_BP[sequences_b][:, slots_S // ranking.page_size]
    physical_bS = pages_bS * ranking.page_size + slots_S % ranking.page_size
    k_bSKH = read_slots(ranking.keys_LSKH[layer], physical_bS).to(wide)
    if ranking.k_scale_LK is not None:
        k_bSKH = k_bSKH * ranking.k_scale_LK[layer][:, None]
    # Slots that were never written may hold NaN, and 0 * NaN is NaN.
    k_bSKH = torch.where(is_before_bS[:, :, None, None], k_bSKH, 0)
    rows_bW = ranking.rows_BW[sequences_b]
    is_fed_bW, rows_bW = rows_bW >= 0, rows_bW.clamp(min=0)
    q_bWKGH = q_RNH[rows_bW].to(wide).unflatten(2, (num_kv_heads, -1))
    scores_bKGWS = torch.einsum("bwkgh,bskh->bkgws", q_bWKGH, k_bSKH) * (ranking.scale * LOG2_E)
    offset_bWN = ranking.max_LRN[layer, rows_bW] + ranking.sum_LRN[layer, rows_bW].log2()
    offset_bKGW1 = offset_bWN.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1)[..., None]
    is_counted_bWS = is_fed_bW[:, :, None] & is_before_bS[:, None]
    shares_bKGWS = torch.where(is_counted_bWS[:, None, None], (scores_bKGWS - offset_bKGW1).exp2(), 0)
    num_queries_b = is_fed_bW.sum(-1).clamp(min=1) * q_bWKGH.shape[3]
    return shares_bKGWS.sum((2, 3)) / num_queries_b[:, None, None]


def select_largest(
    scores_LBKS: Tensor,
    counts_B: Tensor,
    is_selected_B: Tensor,
    lanes_B: Tensor,
    slots_LZKC: Tensor,
    *,
    group: int = GROUP,
    launch: RankingLaunch = USUAL,
) -> None:
    """Write the positions of the C largest of the first `counts_B` scores, ascending, then -1, into
    `slots_LZKC[:, lanes_B]` (int32), for the sequences selected (bool). Of equal scores the lower position is
    taken; NaN counts as the largest. Scores may be negative. `group`, `launch`: launch parameters."""
    if not runs_kernels(scores_LBKS) or scores_LBKS.dtype != torch.float32:
        num, last = slots_LZKC.shape[-1], scores_LBKS.shape[-1]
        slots_S = torch.arange(last, device=scores_LBKS.device)
        is_candidate_BKS = (slots_S < counts_B[:, None])[:, None]
        for scores_BKS, slots_ZKC in zip(scores_LBKS, slots_LZKC, strict=True):
            # The sort is stable: of equal scores the lower position is first, which `topk` does not define.
            masked_BKS = scores_BKS.masked_fill(~is_candidate_BKS, -torch.inf)
            order_BKS = masked_BKS.argsort(dim=-1, descending=True, stable=True)[..., :num]
            is_best_BKS = torch.zeros_like(scores_BKS, dtype=torch.bool).scatter_(-1, order_BKS, True)
            best_BKS = torch.where(is_best_BKS & is_candidate_BKS, slots_S, last)
            best_BKS = best_BKS.sort(dim=-1).values[..., :num]
            best_BKC = torch.nn.functional.pad(best_BKS, (0, num - best_BKS.shape[-1]), value=last)
            best_BKC = torch.where(best_BKC < last, best_BKC, NOT_LISTED).to(slots_ZKC.dtype)
            slots_ZKC[lanes_B] = torch.where(is_selected_B[:, None, None], best_BKC, slots_ZKC[lanes_B])
        return
    import triton

    from idlm.kernels.prefix_ranking.kernel_select import select_kernel

    num_layers, num_sequences, num_kv_heads, num_scores = scores_LBKS.shape
    assert scores_LBKS.is_contiguous() and slots_LZKC.dtype == torch.int32, f"{scores_LBKS.stride()=}"
    assert slots_LZKC[0, 0].is_contiguous(), f"{slots_LZKC.stride()=}"
    max_groups = triton.cdiv(num_scores, group)
    scratch = scores_LBKS.new_empty(
        num_layers * num_sequences * num_kv_heads * max_groups * 2, dtype=torch.int32
    )
    select_kernel[(num_layers * num_sequences * num_kv_heads,)](
        *(scores_LBKS, scratch, counts_B, is_selected_B, lanes_B, slots_LZKC),
        *(num_sequences, num_scores, max_groups, slots_LZKC.shape[3]),
        *slots_LZKC.stride()[:2],
        K=num_kv_heads,
        GROUP_BITS=group.bit_length() - 1,
        TILE=launch.tile,
        GROUPS=max(1, launch.read // group),
        num_warps=launch.select_warps,
    )


def layers_at_once(num_layers: int, num_sequences: int, num_kv_heads: int, max_slots: int) -> int:
    """Layers of a group: few groups, of about equal size."""
    per_layer = layer_bytes(num_sequences, num_kv_heads, max_slots)
    maximum = max(1, MAX_SHARE_BYTES // max(1, per_layer))
    num_groups = max(1, -(-num_layers // maximum))
    return max(1, -(-num_layers // num_groups))


def layer_bytes(num_sequences: int, num_kv_heads: int, max_slots: int) -> int:
    """Bytes of one layer's shares, with those that its selection needs in addition."""
    num_groups = -(-max_slots // GROUP)
    return 4 * num_sequences * num_kv_heads * num_groups * (GROUP + 2)


def workspace_bytes(num_layers: int, num_sequences: int, num_kv_heads: int, max_slots: int) -> int:
    """Bytes that `rank_prefix` allocates at most; known before any page is allocated."""
    # A smaller pass takes more layers at once.
    per_layer = layer_bytes(num_sequences, num_kv_heads, max_slots)
    return min(num_layers * per_layer, max(MAX_SHARE_BYTES, per_layer))
