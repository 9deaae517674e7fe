"""Cross-entropy of a linear head without its logits in memory; contract and mathematics in README.md."""

from idlm.kernels.linear_cross_entropy.op import (
    DIVERGENCES,
    MAX_LOGITS_BYTES,
    chunk_rows,
    linear_cross_entropy,
    linear_distillation,
    linear_overlap,
    token_nll,
)
