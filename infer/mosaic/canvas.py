"""The canvas of a real model as numbers for the planner: its shape, what libraries allocate, and how many
bytes a workspace may have; and the attention of one canvas, whose rows all see all of it.

Libraries allocate outside of the workspace: attention returns a new tensor for at most `PIECE_ROWS` query
rows, and a decoder judges at most `PROPOSAL_BYTES` of logits and copies at a time. Neither grows with the
length; `library_bytes` is their sum, which is taken off what a workspace may have.

Torch has no attention that writes to a given position: it runs on pieces of query rows, whose outputs are
copied. On a GPU the library is cuDNN where it can be, else FlashAttention. On a CPU the arithmetic is that of
kernels/paged_attention: same bits.
Shapes: m query rows, R rows of the canvas, N query heads, K KV heads, G = N / K, H head dim."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from idlm.infer.models.base import ModelSpec
from idlm.infer.mosaic.template import WANTED, Size
from idlm.infer.mosaic.trunk import TrunkShape
from idlm.kernels.masked_logits import WORKSPACE_BYTES, WORKSPACE_ROW_BYTES
from idlm.kernels.paged_attention.plain import FEW_ROWS

PIECE_ROWS = 4096
PROPOSAL_BYTES = 128 << 20
HEADROOM_BYTES = 384 << 20
"""Left free on a GPU: workspaces of cuBLAS, kernels that are loaded later, the integers of a pass's rows."""
CPU_WORKSPACE_BYTES = 2 << 30


def canvas_shape(spec: ModelSpec, dtype: torch.dtype) -> TrunkShape:
    """Return the numbers of a trunk whose layers are all alike, with weights and activations of `dtype`."""
    moe = spec.moe
    return TrunkShape(
        width=spec.width,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn_width if moe is None else moe.ffn_width,
        vocab=spec.vocab_size,
        num_layers=spec.num_layers,
        num_experts=0 if moe is None else moe.num_experts,
        top_k=0 if moe is None else moe.num_chosen,
        item_bytes=dtype.itemsize,
    )


def fused_head(shape: TrunkShape) -> TrunkShape:
    workspace = Size(row_bytes=WORKSPACE_ROW_BYTES, rows=WANTED, constant=WORKSPACE_BYTES)
    return replace(shape, fused_head=workspace)


def library_bytes(shape: TrunkShape) -> int:
    """Bytes that libraries allocate outside the workspace, at any length."""
    # The output and, in fp32, a copy of the queries; the log-sum-exp of each head.
    attention = PIECE_ROWS * (2 * shape.q_bytes + 4 * shape.num_heads)
    return attention + PROPOSAL_BYTES


def workspace_bytes(shape: TrunkShape, device: torch.device) -> int:
    """Bytes that a workspace may have, once everything else that stays is allocated; below 0 if none."""
    if device.type != "cuda":
        return CPU_WORKSPACE_BYTES
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused - HEADROOM_BYTES - library_bytes(shape)


LIBRARIES = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""In order of preference. Torch's own arithmetic is not among them: it stores all scores."""
CPU_BLOCK, CPU_LARGEST_STEP = 256, 768
"""On a CPU torch takes query rows in blocks of 256 from 768 rows on, else in smaller ones, and the bits of a
row depend on the other rows of its block (measured)."""


def attend(q_mNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, out_mNH: Tensor, *, first: int) -> None:
    """Write the attention of query rows `first` to `first` + m of a canvas to `out_mNH`."""
    num_rows, is_cpu = len(k_RKH), not q_mNH.is_cuda
    for start in range(0, len(q_mNH), PIECE_ROWS):
        q_pNH = q_mNH[start : start + PIECE_ROWS]
        low, high = first + start, first + start + len(q_pNH)
        begin, end = _cpu_piece(low, high, num_rows) if is_cpu else (low, high)
        if (begin, end) != (low, high):
            padded_pNH = q_pNH.new_zeros(end - begin, *q_pNH.shape[1:])
            padded_pNH[low - begin : high - begin] = q_pNH
            q_pNH = padded_pNH
        shares_keys = q_mNH.shape[1] > k_RKH.shape[1]
        if shares_keys and (num_rows <= FEW_ROWS if is_cpu else q_mNH.dtype == torch.float32):
            o_pNH = _heads_as_rows(q_pNH, k_RKH, v_RKH)
        else:
            o_pNH = _attention(q_pNH, k_RKH, v_RKH)
        out_mNH[start : start + PIECE_ROWS] = o_pNH[low - begin : high - begin]


def _cpu_piece(low: int, high: int, num_rows: int) -> tuple[int, int]:
    """The rows around rows `low` to `high` with which they have the bits that they have among all rows."""
    if num_rows < CPU_LARGEST_STEP:
        return 0, num_rows
    end = min(num_rows, -(-high // CPU_BLOCK) * CPU_BLOCK)
    begin = min(low, end - CPU_LARGEST_STEP) // CPU_BLOCK * CPU_BLOCK
    return max(0, begin), max(end, min(num_rows, CPU_LARGEST_STEP))


def _attention(q_pNH: Tensor, k_RKH: Tensor, v_RKH: Tensor) -> Tensor:
    q_NpH, k_KRH, v_KRH = (each.transpose(0, 1)[None] for each in (q_pNH, k_RKH, v_RKH))
    scale, shares_keys = q_pNH.shape[-1] ** -0.5, q_pNH.shape[1] > k_RKH.shape[1]
    if not q_pNH.is_cuda:
        o = F.scaled_dot_product_attention(q_NpH, k_KRH, v_KRH, scale=scale, enable_gqa=shares_keys)
    else:
        with sdpa_kernel(LIBRARIES, set_priority=True):
            o = F.scaled_dot_product_attention(q_NpH, k_KRH, v_KRH, scale=scale, enable_gqa=shares_keys)
    return o[0].transpose(0, 1)


def _heads_as_rows(q_pNH: Tensor, k_RKH: Tensor, v_RKH: Tensor) -> Tensor:
    """Query heads that share a KV head become rows of it: not every library takes fewer KV heads (fp32)."""
    num_rows, num_heads, head_dim = q_pNH.shape
    num_kv_heads = k_RKH.shape[1]
    q_pKGH = q_pNH.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    q_XKH = q_pKGH.permute(2, 0, 1, 3).reshape(-1, num_kv_heads, head_dim)
    o_XKH = _attention(q_XKH, k_RKH, v_RKH)
    return o_XKH.reshape(-1, num_rows, num_kv_heads, head_dim).permute(1, 2, 0, 3).reshape(q_pNH.shape)
