"""Our attention functions, registered with transformers, so that any of its causal models trains on `[x_t |
x_0]`.

`idlm_sdpa` takes a dense bool mask [B, 1, T, T], the plain reference; `idlm_split` runs each document of a
packed row by itself, since a dense kernel would compute all pairs across documents only to mask them;
`idlm_flex` takes a FlexAttention BlockMask (GPU; it has no backward pass on a CPU). transformers hands a
prepared mask with four dimensions to every layer as it is, sliding-window layers included: `idlm.train.model`
refuses rows longer than such a window.

Shape letters: B packed rows, T rows of one packed row, M rows of all documents, N query heads, K KV heads, H
head dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from idlm.masks import PADDING_DOC, RowMeta, dense_mask, flex_block_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ATTENTIONS = ("idlm_sdpa", "idlm_split", "idlm_flex")


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentMasks:
    """`rows`: flat indices into B*T, document after document; `masks`: bool [1, 1, m, m] per document."""

    rows: Tensor
    masks: tuple[Tensor, ...]


def register_attention() -> None:
    """Make the functions known to transformers by name; safe to call again."""
    from transformers import AttentionInterface

    AttentionInterface.register("idlm_sdpa", sdpa_attention)
    AttentionInterface.register("idlm_split", split_attention)
    AttentionInterface.register("idlm_flex", flex_attention)


def choose_attention(requested: str, device: torch.device) -> str:
    """`auto` is `idlm_flex` on a GPU and `idlm_split` elsewhere."""
    if requested != "auto":
        return requested
    return "idlm_flex" if device.type == "cuda" else "idlm_split"


def mask_arguments(meta: RowMeta, attention: str) -> dict[str, Any]:
    """Keyword arguments that give a forward pass the visibility of `meta` ([B, T])."""
    if attention == "idlm_flex":
        return {"attention_mask": flex_block_mask(meta)}
    if attention == "idlm_sdpa":
        return {"attention_mask": dense_mask(meta)[:, None]}
    # Any tensor with four dimensions keeps transformers from building a mask of its own.
    placeholder = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=meta.doc_ids.device)
    return {"attention_mask": placeholder, "document_masks": document_masks(meta)}


def document_masks(meta: RowMeta) -> DocumentMasks:
    """The dense masks of all documents of the packed rows, one by one; padding belongs to none."""
    rows, masks = [], []
    num_rows = meta.doc_ids.shape[1]
    for b, doc_ids_T in enumerate(meta.doc_ids):
        for doc in doc_ids_T.unique().tolist():
            if doc == PADDING_DOC:
                continue
            (rows_m,) = torch.nonzero(doc_ids_T == doc, as_tuple=True)
            own = RowMeta(
                doc_ids=doc_ids_T[rows_m],
                positions=meta.positions[b, rows_m],
                block_starts=meta.block_starts[b, rows_m],
                is_noisy=meta.is_noisy[b, rows_m],
            )
            rows.append(rows_m + b * num_rows)
            masks.append(dense_mask(own)[None, None])
    return DocumentMasks(rows=torch.cat(rows), masks=tuple(masks))


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
    """Scaled dot-product attention under a bool mask; returns [B, T, N, H]. Without a mask it is plain
    causal.
    """
    output = functional.scaled_dot_product_attention(
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


def split_attention(
    module: nn.Module,
    query_BNTH: Tensor,
    key_BKTH: Tensor,
    value_BKTH: Tensor,
    attention_mask: Tensor | None,
    *,
    document_masks: DocumentMasks | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention document by document; returns [B, T, N, H], zero for padding rows."""
    assert document_masks is not None, "the model does not hand keyword arguments on to its attention"
    rows_M = document_masks.rows
    sizes = [mask.shape[-1] for mask in document_masks.masks]
    parts = [
        tensor.transpose(1, 2).flatten(0, 1)[rows_M].split(sizes)
        for tensor in (query_BNTH, key_BKTH, value_BKTH)
    ]
    outputs = [
        functional.scaled_dot_product_attention(
            query_mNH.transpose(0, 1)[None],
            key_mKH.transpose(0, 1)[None],
            value_mKH.transpose(0, 1)[None],
            attn_mask=mask,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query_BNTH.shape[1] != key_BKTH.shape[1],
        )[0].transpose(0, 1)
        for mask, query_mNH, key_mKH, value_mKH in zip(document_masks.masks, *parts, strict=True)
    ]
    num_seqs, num_heads, num_rows, head_dim = query_BNTH.shape
    flat = query_BNTH.new_zeros(num_seqs * num_rows, num_heads, head_dim)
    return flat.index_copy(0, rows_M, torch.cat(outputs)).unflatten(0, (num_seqs, num_rows)), None


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
