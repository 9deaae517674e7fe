"""Split attention as one custom operator with a backward pass, which never breaks a torch.compile graph.

bfloat16 and float16 on a GPU; under TRITON_INTERPRET=1 also float32 on a CPU. Contract in README.md.
B packed rows, T rows of one packed row, N query heads, K KV heads, H head dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from idlm.kernels.backend import INTERPRETED
from idlm.kernels.split_attention.visibility import Visibility, from_tensors

MAX_HEAD_DIM = 256


def split_attention_ranges(
    query_BNTH: torch.Tensor,
    key_BKTH: torch.Tensor,
    value_BKTH: torch.Tensor,
    ranges: Sequence[torch.Tensor],
    *,
    scale: float,
) -> torch.Tensor:
    """Attention [B, T, N, H] with the `ranges` of `Visibility.tensors()`, zero for padding rows, whose inputs
    are never read. Strides may be any.

    The reference, with T x T scores, computes what the kernel does not support (float32, a CPU)."""
    if not takes(query_BNTH):
        return split_attention_reference(query_BNTH, key_BKTH, value_BKTH, from_tensors(ranges), scale=scale)
    return _forward(query_BNTH, key_BKTH, value_BKTH, list(ranges), scale)[0]


def takes(query_BNTH: torch.Tensor) -> bool:
    """Whether the kernel computes inputs of this device, dtype and head dim."""
    head_dim = query_BNTH.shape[-1]
    if INTERPRETED:
        return head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0
    is_16_bit = query_BNTH.dtype in (torch.bfloat16, torch.float16)
    return query_BNTH.is_cuda and is_16_bit and head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0


@torch.library.custom_op("idlm::split_attention", mutates_args=())
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranges: Sequence[torch.Tensor], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, T, N, H] and base-2 log-sum-exp [B, N, T] in float32."""
    from idlm.kernels.split_attention.launch import run_forward

    return run_forward(query, key, value, from_tensors(ranges), scale)


@_forward.register_fake
def _forward_shapes(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, num_heads, num_rows, head_dim = query.shape
    lse = query.new_empty(batch, num_heads, num_rows, dtype=torch.float32)
    return query.new_empty(batch, num_rows, num_heads, head_dim), lse


@torch.library.custom_op("idlm::split_attention_backward", mutates_args=())
def _backward(
    doutput: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    ranges: Sequence[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, all contiguous as [B, T, heads, H]."""
    from idlm.kernels.split_attention.launch import run_backward

    return run_backward(doutput, query, key, value, output, lse, from_tensors(ranges), scale)


@_backward.register_fake
def _backward_shapes(
    doutput: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: Any, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, num_kv_heads, num_rows, head_dim = key.shape
    dkey, dvalue = (key.new_empty(batch, num_rows, num_kv_heads, head_dim) for _ in range(2))
    return torch.empty_like(output), dkey, dvalue


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ranges, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, *ranges)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, doutput: torch.Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, output, lse, *ranges = ctx.saved_tensors
    gradients = _backward(doutput, query, key, value, output, lse, ranges, ctx.scale)
    return *(gradient.transpose(1, 2) for gradient in gradients), [None] * len(ranges), None


torch.library.register_autograd("idlm::split_attention", _gradients, setup_context=_save_for_backward)


def visible(see: Visibility, num_keys: int | None = None) -> torch.Tensor:
    """Bool [B, T, T]; entry [b, q, k] is whether row q sees row k. Padding sees nothing. `num_keys`: where
    there are more keys than queries."""
    num_keys = see.own_start_BT.shape[1] if num_keys is None else num_keys
    keys_T = torch.arange(num_keys, device=see.own_start_BT.device)
    across = (keys_T >= see.across_start_BT[..., None]) & (keys_T < see.across_end_BT[..., None])
    return across | ((keys_T >= see.own_start_BT[..., None]) & (keys_T < see.own_until_BT[..., None]))


def split_attention_reference(
    query_BNTH: torch.Tensor,
    key_BKTH: torch.Tensor,
    value_BKTH: torch.Tensor,
    see: Visibility,
    *,
    scale: float,
) -> torch.Tensor:
    """Return [B, T, N, H] in query's dtype, zero for padding; computed in fp32, fp64 for an fp64 query.

    Keys may have more rows than queries (`visibility(..., num_queries=...)`)."""
    compute_dtype = torch.float64 if query_BNTH.dtype == torch.float64 else torch.float32
    group = query_BNTH.shape[1] // key_BKTH.shape[1]
    num_queries, num_keys = query_BNTH.shape[2], key_BKTH.shape[2]
    is_real = torch.arange(num_keys, device=query_BNTH.device) < see.num_rows_B[:, None]
    is_query = torch.arange(num_queries, device=query_BNTH.device) < see.num_queries_B[:, None]
    query, key, value = (
        # What padding holds may be NaN, and 0 * NaN is NaN.
        torch.where(real[:, None, :, None], tensor, 0).to(compute_dtype)
        for tensor, real in ((query_BNTH, is_query), (key_BKTH, is_real), (value_BKTH, is_real))
    )
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    sees = visible(see, num_keys)[:, None]
    weights_BNTT = (query @ key.transpose(-1, -2) * scale).masked_fill(~sees, float("-inf")).softmax(dim=-1)
    weights_BNTT = torch.where(is_query[:, None, :, None], weights_BNTT, 0)
    return (weights_BNTT @ value).transpose(1, 2).to(query_BNTH.dtype)
