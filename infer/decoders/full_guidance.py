"""Classifier-free guidance of decoder `full`: a pass feeds a second, unconditional canvas of a sequence,
whose prompt is masked, and draws from logits that lead away from it.

LLaDA's (arXiv 2502.09992, `cfg_scale` of its code): the logits of the unconditional canvas plus
(1 + guidance) times what the prompt adds to them. Dream has no published guidance and gets the same.
Departure: logits are mixed in fp32, whatever the dtype of the model.
Shapes: B sequences, C canvases of the pass (one of each sequence, then the second ones), R rows, X wanted
places, Y places of a slice, Z lanes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from idlm.infer.decoders.full_cache import FedRows
from idlm.infer.decoders.full_rows import CanvasPlan
from idlm.infer.state.batch import Batch

NUM_CANVASES = 2
MIXED_BYTES = 4
"""Bytes for each logit of both canvases that mixing allocates: two numbers in fp32 for a pair."""


def canvases_of(batch: Batch, guidance_Z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every canvas the lane, the number of tokens to feed, and whether it is fed (bool); all [C]."""
    lanes_B, num_feed_B, samples_B = batch.lanes_B, batch.num_feed_B, batch.samples_B
    if batch.num_canvases == 1:
        return lanes_B, num_feed_B, samples_B
    is_guided_B = samples_B & (guidance_Z[lanes_B] > 0)
    return lanes_B.repeat(NUM_CANVASES), num_feed_B.repeat(NUM_CANVASES), torch.cat((samples_B, is_guided_B))


def guided(
    plan: CanvasPlan, fed: FedRows, ends_C: Tensor, prompt_ends_C: Tensor, *, mask_token_id: int
) -> CanvasPlan:
    """The plan of `fed` rows with second canvases, which so far equal the first ones: their prompts, which
    end at `prompt_ends_C`, become masks, they get slots after the first canvas, which ends at `ends_C`, and
    every wanted place wants a pair of rows.
    """
    assert plan.is_mask_R is not None
    num_sequences = len(ends_C) // NUM_CANVASES
    is_second_C = torch.arange(len(ends_C), device=ends_C.device) >= num_sequences
    hidden_R = (is_second_C * prompt_ends_C)[fed.sequence_R]
    is_hidden_R = fed.is_fed_R & (fed.slots_R < hidden_R)
    # A sequence without guidance has no second row: any row will do.
    other_X = fed.rows_of(plan.sequence_X + num_sequences, fed.slots_R[plan.logit_rows_X])
    return replace(
        plan,
        token_ids_R=torch.where(is_hidden_R, mask_token_id, plan.token_ids_R),
        is_mask_R=plan.is_mask_R | is_hidden_R,
        logit_rows_X=torch.stack((plan.logit_rows_X, other_X), dim=1).flatten(),
        first_slots_B=is_second_C * ends_C,
        logit_group=NUM_CANVASES,
    )


def mixed_logits(logits_YV: Tensor, guidance_Y: Tensor) -> Tensor:
    """Logits [Y, V] (fp32) to draw from: those [2Y, V] of pairs of rows, mixed with a guidance (fp64) each.

    Without guidance (0) the first row of a pair counts alone, bit for bit, whatever the second one holds.
    """
    logits_YV, other_YV = logits_YV[0::NUM_CANVASES], logits_YV[1::NUM_CANVASES]
    other_YV = torch.where(guidance_Y[:, None] > 0, other_YV, logits_YV).float()
    return (logits_YV - other_YV).mul_(1 + guidance_Y.float()[:, None]).add_(other_YV)
