"""Log-probabilities under the model's own distribution, before temperature and filters: of emitted tokens,
and of the tokens of prompts.

Shapes: B sequences, J tokens that a pass can emit, V vocabulary, K likeliest tokens, R rows of the pass, I
rows of prompts, Y rows of a slice."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from idlm.infer.state.batch import PromptRows, StepOutcome, StepPlan, WantedRows, to_device
from idlm.infer.state.sequence_state import SequenceState

ROWS_AT_ONCE = 64
"""Rows of prompts whose logits exist together: their fp64 copies are the largest tensors of such a pass (78
MB for a vocabulary of 151,936)."""


class Logprobs(NamedTuple):
    """Of some tokens [...] (fp64), and the ids and log-probabilities [..., K] of the likeliest ones."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def emitted_logprobs(logits_XV: Tensor, plan: StepPlan, outcome: StepOutcome, *, num_top: int) -> Logprobs:
    """Those of the emitted tokens, [B, J]."""
    token_ids_BJ = outcome.token_ids_BJ
    offsets_J = torch.arange(token_ids_BJ.shape[1], device=token_ids_BJ.device)
    rows_BJ = (plan.first_logit_B[:, None] + offsets_J).clamp(max=len(logits_XV) - 1)
    return token_logprobs(logits_XV[rows_BJ], token_ids_BJ, num_top=num_top)


def prompt_logprobs(wanted: WantedRows, plan: StepPlan, table: SequenceState, rows: PromptRows) -> Logprobs:
    """Those of the tokens that follow the `rows`, [I]."""
    positions = [(b, position) for b, count in enumerate(rows.counts) for position in range(count)]
    sequence_I, position_I = to_device(positions, table.device).unbind(dim=1)
    rows_I = plan.cu_rows_B1[sequence_I] + position_I
    token_ids_I = table.tokens_ZL[plan.lanes_B[sequence_I], plan.slots_R[rows_I] + 1]
    slices = zip(rows_I.split(ROWS_AT_ONCE), token_ids_I.split(ROWS_AT_ONCE), strict=True)
    parts = [
        token_logprobs(wanted.logits_of(rows_Y), token_ids_Y, num_top=rows.num_top)
        for rows_Y, token_ids_Y in slices
    ]
    return Logprobs(*map(torch.cat, zip(*parts, strict=True)))


def token_logprobs(logits: Tensor, token_ids: Tensor, *, num_top: int) -> Logprobs:
    """Those of tokens [...] by logits [..., V]."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logprobs.gather(-1, token_ids[..., None])[..., 0]
    top_ids = likeliest(logits, min(num_top, logits.shape[-1]))
    return Logprobs(chosen, top_ids, logprobs.gather(-1, top_ids))


def likeliest(logits: Tensor, num: int) -> Tensor:
    """Ids [..., num] of the largest logits [..., V], the lower id first among equal ones. topk promises no
    order of ties, so it sorts keys without ties: an integer that orders as the fp32 logit does, then the
    id."""
    bits = (logits.float() + 0.0).view(torch.int32)  # + 0.0: -0 is 0.
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys -= torch.arange(logits.shape[-1], device=logits.device)
    return keys.topk(num, dim=-1).indices
