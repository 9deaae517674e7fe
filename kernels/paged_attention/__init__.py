"""Attention of packed ragged rows over a paged KV cache; contract and mathematics in README.md."""

from idlm.kernels.paged_attention.backends import BACKENDS, Plan, paged_attention, plan_attention, problems
from idlm.kernels.paged_attention.reference import paged_attention_reference, sums_before_reference
from idlm.kernels.paged_attention.sparse import sparse_attention
from idlm.kernels.paged_attention.types import AttentionRows, BeforeBlock, HeadShape, SlotLists

__all__ = [
    "BACKENDS",
    "AttentionRows",
    "BeforeBlock",
    "HeadShape",
    "Plan",
    "SlotLists",
    "paged_attention",
    "paged_attention_reference",
    "plan_attention",
    "problems",
    "sparse_attention",
    "sums_before_reference",
]
