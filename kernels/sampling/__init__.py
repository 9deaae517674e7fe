"""Sampling and verification of drafts without probabilities in memory; contract in README.md."""

from idlm.kernels.sampling.op import (
    allowed_logits,
    draft_probs,
    draw,
    emit_and_draft,
    entropy,
    judged_draws,
    nonfinite,
    put,
    restrict,
    row_probs,
    uniforms,
    verify,
)
from idlm.kernels.sampling.scores import row_entropy, row_margin
from idlm.kernels.sampling.types import DraftProbs, Drafts, LayoutTables, Probs, RowProbs, Tuning, Verdict
