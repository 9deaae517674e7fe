"""The canvas of a real model as numbers for the planner: its shape, what libraries allocate, and how many
bytes a workspace may have.

Libraries allocate outside of the workspace: attention returns a new tensor for at most `PIECE_ROWS` query
rows, and a decoder judges at most `PROPOSAL_BYTES` of logits and copies at a time. Neither grows with the
length; `library_bytes` is their sum, which is taken off what a workspace may have.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from idlm.infer.models.base import ModelSpec
from idlm.infer.mosaic.template import WANTED, Size
from idlm.infer.mosaic.trunk import TrunkShape
from idlm.kernels.masked_logits import WORKSPACE_BYTES, WORKSPACE_ROW_BYTES

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
