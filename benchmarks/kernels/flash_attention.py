"""FlashAttention as an arm of the attention benchmark: version 3 (`flash_attn_interface`), version 4
(`flash-attn-4`, compiled on first use) or version 2 (`flash-attn`), in this order.

It serves rows that see exactly the slots up to their own. Version 2 has pages of multiples of 256 slots,
versions 3 and 4 of any size. Version 4 does not split the cache of a sequence over programs on Hopper, so
long contexts of few sequences leave most of the device idle. B sequences, R rows of this pass, N query heads,
K KV heads, H head dim, S physical KV slots.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from idlm.kernels.paged_attention import AttentionRows, HeadShape

OLD_PAGE_SIZE = 256
NEW_CAPABILITIES = (9, 10, 11)
"""Major compute capabilities whose kernels of version 4 take pages."""
NEW_HEAD_DIM = 128
"""With larger heads a block of version 4 has fewer slots than the threads that look up their pages."""


def obstacles(shape: HeadShape, *, page_size: int, device: torch.device) -> dict[int, str]:
    """Per version the reason why it cannot run here, "" if it can; the preferred version comes first."""
    found = {3: "", 4: "", 2: ""}
    if not is_installed("flash_attn_interface"):
        found[3] = "flash_attn_interface (version 3) is not installed"
    if not _is_part_installed("cute"):
        found[4] = "flash-attn-4 is not installed (pip install -e '.[flash-attn]')"
    elif shape.head_dim > NEW_HEAD_DIM:
        found[4] = f"flash-attn-4 takes pages with head dims up to {NEW_HEAD_DIM}, got {shape.head_dim}"
    elif torch.cuda.is_available() and device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0]
        if major not in NEW_CAPABILITIES:
            found[4] = f"flash-attn-4 takes pages on compute capability 9 to 11, got {major}"
    if not _is_part_installed("flash_attn_interface"):
        found[2] = "flash-attn (version 2) is not installed"
    elif page_size % OLD_PAGE_SIZE:
        found[2] = f"flash-attn 2 takes pages of a multiple of {OLD_PAGE_SIZE} slots, got {page_size}"
    return found


def is_installed(package: str) -> bool:
    """Whether the package can be imported."""
    return importlib.util.find_spec(package) is not None


def _is_part_installed(name: str) -> bool:
    """Whether the package `flash_attn`, which versions 2 and 4 share, has this module."""
    return is_installed("flash_attn") and is_installed(f"flash_attn.{name}")


def version(shape: HeadShape, *, page_size: int, device: torch.device) -> int | None:
    """The preferred version that can run, None if none can."""
    found = obstacles(shape, page_size=page_size, device=device)
    return next((number for number, obstacle in found.items() if not obstacle), None)


def make_attend(rows: AttentionRows, number: int, scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of q [R, N, H] and the caches [S, K, H] that returns the output [R, N, H], by version
    `number`.

    Computes lengths on the device, without waiting for it.
    """
    num_slots_B = torch.where(rows.cu_rows.diff() > 0, rows.own_slots_R[rows.cu_rows[1:] - 1] + 1, 0).int()
    shared = {
        "cu_seqlens_q": rows.cu_rows.int(),
        "max_seqlen_q": rows.max_rows,
        "softmax_scale": scale,
        "causal": True,
    }
    block_table = rows.block_table.int()
    call: Callable[..., Any]
    if number == 3:
        call = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
        shared |= {"cache_seqlens": num_slots_B, "page_table": block_table}
    elif number == 4:
        call = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
        shared |= {"seqused_k": num_slots_B, "page_table": block_table, "max_seqlen_k": rows.max_slots}
    else:
        call = importlib.import_module("flash_attn").flash_attn_varlen_func
        cu_slots = torch.nn.functional.pad(num_slots_B.cumsum(0, dtype=torch.int32), (1, 0))
        shared |= {"cu_seqlens_k": cu_slots, "block_table": block_table, "max_seqlen_k": rows.max_slots}

    def attend(q_RNH: Tensor, k_cache_SKH: Tensor, v_cache_SKH: Tensor) -> Tensor:
        caches = (cache.view(-1, rows.page_size, *cache.shape[1:]) for cache in (k_cache_SKH, v_cache_SKH))
        result = call(q_RNH, *caches, **shared)
        o_RNH: Tensor = result[0] if isinstance(result, tuple) else result
        return o_RNH

    return attend
