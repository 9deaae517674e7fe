"""Attention of packed ragged rows over a paged KV cache; contract and mathematics in README.md."""

from idlm.kernels.paged_attention.op import AttentionPlan, paged_attention, plan_attention
from idlm.kernels.paged_attention.reference import paged_attention_reference
from idlm.kernels.paged_attention.rows import AttentionRows

__all__ = ["AttentionPlan", "AttentionRows", "paged_attention", "paged_attention_reference", "plan_attention"]
