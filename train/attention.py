"""Our attention functions, registered with transformers, so that any of its causal models trains on `[x_t | x_0]`.

`idlm_sdpa` takes a dense bool mask [B, 1, T, T]; `idlm_flex` a FlexAttention BlockMask (GPU; it has no backward pass
on a CPU). transformers hands a prepared mask with four dimensions to every layer as it is, sliding-window layers
included: `idlm.train.model` refuses rows longer than such a window.

Shape letters: B packed rows, T rows of one packed row, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from idlm.masks import RowMeta, dense_mask, flex_block_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ATTENTIONS = ("idlm_sdpa", "idlm_flex")


def register_attention() -> None:
    """Make both functions known to transformers by name; safe to call again."""
    from transformers import AttentionInterface

    AttentionInterface.register("idlm_sdpa", sdpa_attention)
    AttentionInterface.register("idlm_flex", flex_attention)


def choose_attention(requested: str, device: torch.device) -> str:
    """`auto` is `idlm_flex` on a GPU and `idlm_sdpa` elsewhere."""
    if requested != "auto":
        return requested
    return "idlm_flex" if device.type == "cuda" else "idlm_sdpa"


def prepared_mask(meta: RowMeta, attention: str) -> Tensor | BlockMask:
    """The mask argument of a forward pass whose rows are `meta` ([B, T])."""
    return flex_block_mask(meta) if attention == "idlm_flex" else dense_mask(meta)[:, None]


def sdpa_attention(
    module: nn.Module,
    query_BNTH: Tensor,
    key_BKTH: Tensor,
    value_BKTH: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention under a bool mask; returns [B, T, N, H]. Without a mask it is plain causal."""
    output = F.scaled_dot_product_attention(
        query_BNTH,
        key_BKTH,
        value_BKTH,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=attention_mask is None,
        enable_gqa=query_BNTH.shape[1] != key_BKTH.shape[1],
    )
    return output.transpose(1, 2), None


def flex_attention(
    module: nn.Module,
    query_BNTH: Tensor,
    key_BKTH: Tensor,
    value_BKTH: Tensor,
    attention_mask: BlockMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """FlexAttention under a BlockMask; returns [B, T, N, H]. Attention dropout is not supported."""
    assert attention_mask is not None and dropout == 0.0, f"{attention_mask is None=} {dropout=}"
    kernel = _flex_kernel(query_BNTH.device.type)
    output = kernel(
        query_BNTH,
        key_BKTH,
        value_BKTH,
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=query_BNTH.shape[1] != key_BKTH.shape[1],
    )
    return output.transpose(1, 2), None


@functools.cache
def _flex_kernel(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention as kernel

    return torch.compile(kernel, dynamic=False) if device_type == "cuda" else kernel
