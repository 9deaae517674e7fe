"""Sampling and verification of drafts without probabilities in memory; contract in README.md."""

from idlm.kernels.sampling.bits import allowed_logits, restrict
from idlm.kernels.sampling.drafts import draft_probs, draw_stored, emit_and_draft, put, verify
from idlm.kernels.sampling.draws import (
    draw,
    entropy,
    judged_draws,
    random_words,
    row_entropy,
    row_margin,
    uniforms,
)
from idlm.kernels.sampling.probs import nonfinite, row_probs
from idlm.kernels.sampling.types import DraftProbs, Drafts, LayoutTables, Probs, RowProbs, Tuning, Verdict
