"""The two halves of `emit_and_draft`, which the engine runs as one, so that a fault can replace either.

Each half is the whole op whose other output goes to a scratch tensor: so it runs with the kernels of
a GPU, and inside CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from idlm.kernels.sampling import Verdict, emit_and_draft


def _emit(
    probs: Any, store: Any, verdict: Verdict, *, lanes_B: Tensor, uniforms_B: Tensor, drafts_ZJ: Tensor
) -> None:
    num_drafts = drafts_ZJ.shape[1]
    emit_and_draft(
        probs,
        store,
        verdict,
        lanes_B=lanes_B,
        uniforms_BA=uniforms_B[:, None].repeat(1, num_drafts + 1),
        drafts_ZJ=drafts_ZJ.clone(),
        layout_Z=drafts_ZJ.new_zeros(len(drafts_ZJ)),
    )


def _draw_drafts(
    probs: Any, store: Any, verdict: Verdict, *, lanes_B: Tensor, uniforms_BJ: Tensor, **state: Any
) -> None:
    emitted_BA = verdict.token_ids_BA.clone()
    uniforms_BA = torch.cat((uniforms_BJ.new_full((len(uniforms_BJ), 1), 0.5), uniforms_BJ), dim=1)
    emit_and_draft(probs, store, verdict, lanes_B=lanes_B, uniforms_BA=uniforms_BA, **state)
    verdict.token_ids_BA.copy_(emitted_BA)


PARTS = {"emit": _emit, "draw_drafts": _draw_drafts}
