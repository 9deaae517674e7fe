"""Attention of packed ragged rows over a paged KV cache; contract and mathematics in README.md."""

from idlm.kernels.paged_attention.op import BACKENDS, BackendPlan, paged_attention, plan_attention, problems
from idlm.kernels.paged_attention.types import AttentionRows, BeforeBlock, HeadShape
