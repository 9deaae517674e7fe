"""The definition of split attention: every row by its two ranges of keys; slow on purpose. README.md.

B packed rows, T rows of one packed row, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

import torch

from idlm.kernels.split_attention.visibility import Visibility


def visible(see: Visibility, num_keys: int | None = None) -> torch.Tensor:
    """Bool [B, T, T]; entry [b, q, k] says whether row q sees row k. Padding sees nothing. `num_keys`: where
    there are more keys than queries.
    """
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

    Keys may have more rows than queries (`visibility(..., num_queries=...)`).
    """
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
