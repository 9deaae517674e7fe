"""Attention functions registered with transformers, so that any of its causal models trains on `[x_t | x_0]`.

`idlm_sdpa` takes a dense bool mask [B, 1, T, T] and is the plain reference. `idlm_documents` runs each
document of a packed row by itself, because a dense kernel would compute all pairs across documents only to
mask them. `idlm_split` is our Triton kernel (GPU, 16 bits). `idlm_flex` and `idlm_flash` are FlexAttention
(GPU) with its Triton and its FlashAttention-4 back end. transformers passes a prepared mask with four
dimensions to every layer unchanged, sliding-window layers included: `idlm.train.model.checks` refuses rows
longer than such a window.

B packed rows, T rows of one packed row, M rows of all documents, N query heads, K KV heads, H head dim,
J key blocks of one packed row."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from idlm.config.project import install_command
from idlm.errors import UserError
from idlm.kernels.split_attention import Visibility, split_attention_ranges, visibility
from idlm.masks import PADDING_DOC, RowMeta, dense_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ATTENTIONS = ("idlm_sdpa", "idlm_documents", "idlm_split", "idlm_flex", "idlm_flash")
GPU_ONLY = ("idlm_split", "idlm_flex", "idlm_flash")
"""FlexAttention has no backward pass on a CPU, the Triton kernel does not run there."""
Heads = tuple[Tensor, Tensor, Tensor]
"""query [B, N, T, H], key and value [B, K, T, H]."""
Attention = Callable[..., Tensor]
"""`(heads, mask, **further arguments of transformers) -> [B, T, N, H]`."""
STORED, SEEN = "stored", "seen"
"""What becomes of the keys and values of clean rows, for a batch whose noisy rows run by themselves:
attention modules store them as `STORED_KEYS`, or noisy rows see them too."""
STORED_KEYS = "clean_keys"
"""An attribute of the module: compiled layers that read it there share one graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentMasks:
    """`rows`: flat indices into B*T, document after document; `masks`: bool [1, 1, m, m] per document."""

    rows: Tensor
    masks: tuple[Tensor, ...]


def register_attention() -> None:
    from transformers import AttentionInterface

    flash = functools.partial(flex_attention, backend="FLASH")
    functions: list[Any] = [sdpa_attention, document_attention, split_attention, flex_attention, flash]
    for name, function in zip(ATTENTIONS, functions, strict=True):
        AttentionInterface.register(name, functools.partial(_attend, function))


def _attend(
    function: Attention,
    module: nn.Module,
    query_BNTH: Tensor,
    key_BKTH: Tensor,
    value_BKTH: Tensor,
    attention_mask: Any,
    *,
    clean_keys: str | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; raises UserError IDLM-0505 for an argument that would be ignored."""
    for name, what in UNSUPPORTED.items():
        if further.get(name) is not None:
            raise UserError(
                "IDLM-0505",
                f"{type(module).__name__} has {what} ({name}), which idlm's attention does not compute",
                fix="use a model without it: trained without, it would be another model",
            )
    width, value_width = query_BNTH.shape[-1], value_BKTH.shape[-1]
    heads = query_BNTH, key_BKTH, value_BKTH
    if width != value_width:
        # Filled up with zeros to the wider of them, for kernels that support one head dim.
        widest = max(width, value_width)
        query, key, value = (functional.pad(head, (0, widest - head.shape[-1])) for head in heads)
        heads = query, key, value
        further["scaling"] = width**-0.5 if further.get("scaling") is None else further["scaling"]
    if clean_keys is None:
        output = function(heads, attention_mask, **further)
    else:
        output = _attend_apart(function, clean_keys, module, heads, attention_mask, **further)
    return output[..., :value_width], None


def _attend_apart(
    function: Attention, clean_keys: str, module: nn.Module, heads: Heads, attention_mask: Any, **further: Any
) -> Tensor:
    """Attention of clean rows, whose keys and values are stored, or of noisy rows, to which they are added.
    Keys of noisy rows come first. Our kernel takes fewer queries than keys; for the others queries are filled
    up, and the results of those rows are dropped."""
    query_BNTH, key_BKTH, value_BKTH = heads
    if clean_keys == STORED:
        setattr(module, STORED_KEYS, (key_BKTH, value_BKTH))
        return function(heads, attention_mask, **further)
    key, value = getattr(module, STORED_KEYS)
    query = query_BNTH
    if function is not split_attention:
        query = functional.pad(query_BNTH, (0, 0, 0, key.shape[2]))
    heads = query, torch.cat([key_BKTH, key], dim=2), torch.cat([value_BKTH, value], dim=2)
    return function(heads, attention_mask, **further)[:, : query_BNTH.shape[2]]


def forget_clean_keys(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop(STORED_KEYS, None)


def leave_out_of_compiled_layers() -> None:
    """Let compiled layers call `_attend_apart` without looking into it, in four pieces instead of one. For
    FlexAttention, whose kernel would be compiled for numbers of rows that differ from batch to batch."""
    globals()["_attend_apart"] = torch.compiler.disable(_attend_apart)


def choose_attention(
    requested: str, device: torch.device, *, is_16_bit: bool = False, is_elsewhere: bool = False
) -> str:
    """The attention to run. `auto` chooses the fastest (kernels/split_attention/README.md): by document on a
    CPU; on a GPU the Triton kernel in 16 bits and FlexAttention in float32. UserError IDLM-0542 where the
    requested one cannot run. `is_elsewhere`: on another machine, whose packages are not known."""
    if requested == "auto":
        if device.type != "cuda":
            return "idlm_documents"
        return "idlm_split" if is_16_bit and _is_installed("triton") else "idlm_flex"
    if problem := _problem(requested, device, is_16_bit, is_elsewhere):
        raise UserError("IDLM-0542", f"model.attention={requested} {problem[0]}", fix=problem[1])
    return requested


def _problem(
    requested: str, device: torch.device, is_16_bit: bool, is_elsewhere: bool
) -> tuple[str, str] | None:
    """(problem, remedy) of a choice, None where it can run."""
    if requested in GPU_ONLY and device.type != "cuda":
        return f"has no backward pass on a {device.type.upper()}", "set model.attention=auto"
    if requested in ("idlm_split", "idlm_flash") and not is_16_bit:
        return (
            "computes in 16 bits, and this run in float32",
            "set train.bf16=true or model.dtype=bfloat16, or model.attention=idlm_flex",
        )
    if is_elsewhere:
        return None
    if requested == "idlm_split" and not _is_installed("triton"):
        return (
            "needs Triton",
            f"install the extra gpu: {install_command('gpu')}; or set model.attention=idlm_flex",
        )
    return flash_problem() if requested == "idlm_flash" else None


def flash_problem() -> tuple[str, str] | None:
    """(problem, remedy) where `idlm_flash` cannot run on this machine."""
    if _is_installed("flash_attn.cute"):
        return None
    return (
        "needs FlashAttention 4",
        f"install the extra flash-attn: {install_command('flash-attn')}; or set model.attention=auto",
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def mask_arguments(meta: RowMeta, attention: str, *, num_queries: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a forward pass that set the visibility of `meta` ([B, T]) in all layers;
    `num_queries`: only the first rows, the noisy ones, need results."""
    if attention in ("idlm_flex", "idlm_flash"):
        return {"attention_mask": flex_block_mask(row_ranges(meta))}
    if attention == "idlm_sdpa":
        return {"attention_mask": dense_mask(meta)[:, None]}
    # Any tensor with four dimensions prevents transformers from building a mask of its own.
    placeholder = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=meta.doc_ids.device)
    if attention == "idlm_split":
        ranges = row_ranges(meta, num_queries=num_queries).tensors()
        return {"attention_mask": placeholder, "row_ranges": ranges}
    return {"attention_mask": placeholder, "document_masks": document_masks(meta)}


def row_ranges(meta: RowMeta, *, num_queries: int | None = None) -> Visibility:
    """The visibility of `meta` ([B, T]) as ranges of rows; nothing waits for the device."""
    columns = meta.doc_ids, meta.positions, meta.block_starts, meta.is_noisy, meta.reach
    return visibility(*columns, num_queries=num_queries)


def document_masks(meta: RowMeta) -> DocumentMasks:
    """The dense masks of all documents of the packed rows; padding belongs to no document."""
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
                reach=None if meta.reach is None else meta.reach[b, rows_m],
            )
            rows.append(rows_m + b * num_rows)
            masks.append(dense_mask(own)[None, None])
    return DocumentMasks(rows=torch.cat(rows), masks=tuple(masks))


UNSUPPORTED = {"softcap": "a cap on attention scores", "s_aux": "attention sinks"}
"""Arguments that transformers passes to the attention of some families and that no function here computes."""


def sdpa_attention(
    heads: Heads, mask: Tensor | None, *, dropout: float = 0.0, scaling: float | None = None, **_: Any
) -> Tensor:
    """Scaled dot-product attention under a bool mask, causal without one."""
    return _dense(*heads, mask, dropout, scaling).transpose(1, 2)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scaling: float | None
) -> Tensor:
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def document_attention(
    heads: Heads,
    _mask: Tensor | None,
    *,
    document_masks: DocumentMasks | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> Tensor:
    """Scaled dot-product attention document by document; zero for padding rows."""
    if document_masks is None:
        raise _lost_arguments()
    query_BNTH, rows_M = heads[0], document_masks.rows
    sizes = [mask.shape[-1] for mask in document_masks.masks]
    parts = [tensor.transpose(1, 2).flatten(0, 1)[rows_M].split(sizes) for tensor in heads]
    outputs = []
    for mask, *document in zip(document_masks.masks, *parts, strict=True):
        query, key, value = (part_mNH.transpose(0, 1)[None] for part_mNH in document)
        outputs.append(_dense(query, key, value, mask, dropout, scaling)[0].transpose(0, 1))
    num_seqs, num_heads, num_rows, head_dim = query_BNTH.shape
    flat = query_BNTH.new_zeros(num_seqs * num_rows, num_heads, head_dim)
    return flat.index_copy(0, rows_M, torch.cat(outputs)).unflatten(0, (num_seqs, num_rows))


def split_attention(
    heads: Heads,
    _mask: Tensor | None,
    *,
    row_ranges: tuple[Tensor, ...] | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> Tensor:
    if row_ranges is None:
        raise _lost_arguments()
    assert dropout == 0.0, f"{dropout=}"
    query, key, value = _computed_in_one_dtype(*heads)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return split_attention_ranges(query, key, value, row_ranges, scale=scale)


def _lost_arguments() -> UserError:
    return UserError(
        "IDLM-0505",
        "the layers of this architecture hand the attention mask alone to their attention, not further "
        "arguments, such as which rows a document has",
        fix="set model.attention=idlm_sdpa on a CPU or idlm_flex on a GPU; an adapter needs "
        "adapter.gated=false and export.merge=true then",
    )


def _computed_in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast under autocast, where a normalised query may be float32 and the value bfloat16."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device_type)) for tensor in tensors)


def flex_attention(
    heads: Heads,
    mask: BlockMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
    **_: Any,
) -> Tensor:
    """FlexAttention of `heads` [B, N or K, T, H] under a BlockMask. Dropout is not supported."""
    assert mask is not None and dropout == 0.0, f"{mask is None=} {dropout=}"
    query, key, value = _computed_in_one_dtype(*heads)
    output: Tensor = _flex_kernel(query.device.type)(
        query,
        key,
        value,
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=None if backend is None else {"BACKEND": backend},
    )
    return output.transpose(1, 2)


@functools.cache
def _flex_kernel(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention as kernel

    # Not for one shape each: gated batches have other numbers of noisy rows every time.
    return torch.compile(kernel) if device_type == "cuda" else kernel


BLOCK_ROWS = 128


def flex_predicate(see: Visibility) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The ranges as a `mask_mod(b, h, q_idx, kv_idx)`; padding rows see nothing."""
    start_BT, end_BT = see.across_start_BT, see.across_end_BT
    own_start_BT, own_until_BT = see.own_start_BT, see.own_until_BT

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        across = (kv_idx >= start_BT[b, q_idx]) & (kv_idx < end_BT[b, q_idx])
        return across | ((kv_idx >= own_start_BT[b, q_idx]) & (kv_idx < own_until_BT[b, q_idx]))

    return mask_mod


def flex_block_mask(see: Visibility, *, block_rows: int = BLOCK_ROWS) -> BlockMask:
    """The BlockMask of all heads; fully visible blocks run no predicate. `create_block_mask` would evaluate
    all T x T pairs; this counts, per row and key block, how many keys of the block its two ranges cover."""
    from torch.nn.attention.flex_attention import BlockMask

    num_rows = see.own_start_BT.shape[1]
    starts_J = torch.arange(0, num_rows, block_rows, device=see.own_start_BT.device)
    covered_BTJ = _overlap(see.across_start_BT, see.across_end_BT, starts_J, block_rows)
    covered_BTJ += _overlap(see.own_start_BT, see.own_until_BT, starts_J, block_rows)
    padded = torch.nn.functional.pad(covered_BTJ, (0, 0, 0, -num_rows % block_rows))
    tiles_BIRJ = padded.unflatten(1, (-1, block_rows))
    seen_BIJ = (tiles_BIRJ > 0).any(dim=2)
    full_BIJ = (tiles_BIRJ == block_rows).all(dim=2)
    return BlockMask.from_kv_blocks(
        *_table(seen_BIJ & ~full_BIJ),
        *_table(full_BIJ),
        BLOCK_SIZE=block_rows,
        mask_mod=flex_predicate(see),
        seq_lengths=(num_rows, num_rows),
    )


def _overlap(start_BT: Tensor, end_BT: Tensor, starts_J: Tensor, block_rows: int) -> Tensor:
    """Int [B, T, J]: how many keys of each block lie in `[start, end)`."""
    low = torch.maximum(start_BT[..., None], starts_J)
    high = torch.minimum(end_BT[..., None], starts_J + block_rows)
    return (high - low).clamp(min=0)


def _table(wanted_BIJ: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [B, 1, I] and indices [B, 1, I, J], wanted blocks first and ascending."""
    indices = wanted_BIJ.to(torch.int8).argsort(dim=2, descending=True, stable=True)
    return wanted_BIJ.sum(dim=2, dtype=torch.int32)[:, None], indices[:, None].int()
