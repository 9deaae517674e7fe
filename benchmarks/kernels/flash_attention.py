"""FlashAttention 4 (`flash-attn-4`, compiled on first use) as an arm of the attention benchmark.

It serves rows that see exactly the slots up to their own. It does not split the cache of a sequence over
programs on Hopper, so long contexts of few sequences leave most of the device idle. B sequences, R rows of
this pass, N query heads, K KV heads, H head dim, S physical KV slots.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from idlm.kernels.paged_attention import AttentionRows, HeadShape

CAPABILITIES = (9, 10, 11)
"""Major compute capabilities whose kernels take pages."""
MAX_HEAD_DIM = 128
"""With larger heads a block has fewer slots than the threads that look up their pages."""


def obstacle(shape: HeadShape) -> str:
    """Why it cannot run here; empty if it can."""
    if any(importlib.util.find_spec(name) is None for name in ("flash_attn", "flash_attn.cute")):
        return "flash-attn-4 is not installed (pip install -e '.[flash-attn]')"
    if shape.head_dim > MAX_HEAD_DIM:
        return f"flash-attn-4 takes pages with head dims up to {MAX_HEAD_DIM}, got {shape.head_dim}"
    major = torch.cuda.get_device_capability()[0]
    if major not in CAPABILITIES:
        return f"flash-attn-4 takes pages on compute capability 9 to 11, got {major}"
    return ""


def make_attend(rows: AttentionRows, scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of q [R, N, H] and the caches [S, K, H] that returns the output [R, N, H].

    Computes lengths on the device, without waiting for it.
    """
    attention: Callable[..., Any] = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    num_slots_B = torch.where(rows.cu_rows.diff() > 0, rows.own_slots_R[rows.cu_rows[1:] - 1] + 1, 0).int()
    cu_rows, block_table = rows.cu_rows.int(), rows.block_table.int()

    def attend(q_RNH: Tensor, k_cache_SKH: Tensor, v_cache_SKH: Tensor) -> Tensor:
        caches = (cache.view(-1, rows.page_size, *cache.shape[1:]) for cache in (k_cache_SKH, v_cache_SKH))
        result = attention(
            q_RNH,
            *caches,
            cu_seqlens_q=cu_rows,
            max_seqlen_q=rows.max_rows,
            softmax_scale=scale,
            causal=True,
            seqused_k=num_slots_B,
            page_table=block_table,
            max_seqlen_k=rows.max_slots,
        )
        o_RNH: Tensor = result[0] if isinstance(result, tuple) else result
        return o_RNH

    return attend
