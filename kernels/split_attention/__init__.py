"""Attention of `[x_t | x_0]` training rows by two ranges per row; contract and mathematics in README.md."""

from idlm.kernels.split_attention.op import split_attention_ranges, split_attention_reference
from idlm.kernels.split_attention.visibility import Visibility, visibility
