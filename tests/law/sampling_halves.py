"""The two halves of `emit_and_draft`, which the engine runs as one, so that a fault can replace either."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from idlm.kernels.sampling import Verdict, plain


def _emit(probs: Any, store: Any, verdict: Verdict, *, lanes_B: Tensor, uniforms_B: Tensor) -> None:
    plain.emit(probs, store, verdict, lanes_B, uniforms_B)


def _draw_drafts(
    probs: Any,
    verdict: Verdict,
    *,
    lanes_B: Tensor,
    uniforms_BJ: Tensor,
    takes_best: bool = False,
    **s: Tensor,
) -> None:
    state = (s["drafts_ZJ"], s["layout_Z"])
    plain.draw_drafts(probs, verdict, lanes_B, uniforms_BJ, state, takes_best=takes_best)


PARTS = {"emit": _emit, "draw_drafts": _draw_drafts}
