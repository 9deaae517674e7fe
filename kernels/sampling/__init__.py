"""Laws, draws and the test of drafts without laws in memory; contract and mathematics in README.md."""

from idlm.kernels.sampling.laws import DraftLaws, Drafts, Laws, LayoutTables, RowLaws, Tuning, Verdict
from idlm.kernels.sampling.op import (
    draft_laws,
    draft_probability,
    draw,
    draw_drafts,
    emit,
    emit_and_draft,
    entropy,
    judged_draws,
    lawless,
    probability,
    put,
    row_laws,
    uniforms,
    verify,
)
from idlm.kernels.sampling.reference import (
    draw_reference,
    law_reference,
    residual_reference,
    verify_reference,
)

__all__ = [
    "DraftLaws",
    "Drafts",
    "Laws",
    "LayoutTables",
    "RowLaws",
    "Tuning",
    "Verdict",
    "draft_laws",
    "draft_probability",
    "draw",
    "draw_drafts",
    "draw_reference",
    "emit",
    "emit_and_draft",
    "entropy",
    "judged_draws",
    "law_reference",
    "lawless",
    "probability",
    "put",
    "residual_reference",
    "row_laws",
    "uniforms",
    "verify",
    "verify_reference",
]
