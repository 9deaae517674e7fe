"""One forward pass as a function of tensors: plan -> forward -> advance. Runs as it is, or in a graph.

Nothing in here waits for the device, and with `Batch.num_rows` given no shape depends on its contents.
Shapes: B sequences, J tokens a pass can emit, K likeliest tokens, X wanted rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.contracts import StepOutcome, StepPlan
from idlm.infer.decoders.base import Batch, Decoder
from idlm.infer.runtime.model_runner import Runner
from idlm.infer.scheduler import Schedule
from idlm.infer.state.sequence_state import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the host wants to know of a pass, still on the device.

    `counts_BJ`: per sequence whether its logits were a law (`StepOutcome.nonfinite_B`), whether it waited for
    room (1; it then decided nothing), the number of tokens emitted, drafts accepted and drafts tested, then
    the token ids. The rest is None where no logprobs are wanted: the tokens' own, ids and logprobs of the
    likeliest.
    """

    counts_BJ: Tensor
    logprobs_BJ: Tensor | None = None
    top_ids_BJK: Tensor | None = None
    top_logprobs_BJK: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The three moves of a pass."""

    decoder: Decoder
    table: SequenceState
    runner: Runner

    def __call__(self, batch: Batch) -> StepResult:
        """Feed `batch`, commit what comes of it into the table, and report."""
        plan = self.decoder.plan(self.table, batch)
        logits_XV, dropped = self.runner.forward(plan)
        waits_B = torch.zeros_like(plan.samples_B) if dropped is None else dropped.waits_B
        plan = plan if dropped is None else dropped.apply(plan)
        outcome = self.decoder.advance(self.table, batch, plan, logits_XV)
        counts = (
            outcome.nonfinite_B,
            waits_B.long(),
            outcome.num_emitted_B,
            outcome.num_accepted_B,
            outcome.num_tested_B,
        )
        counts_BJ = torch.cat((*(count_B[:, None] for count_B in counts), outcome.token_ids_BJ), dim=1)
        if batch.num_top is None:
            return StepResult(counts_BJ=counts_BJ)
        return _with_logprobs(counts_BJ, logits_XV, plan, outcome, num_top=batch.num_top)


@dataclass(frozen=True, slots=True)
class EagerStep:
    """A `Step` by schedule, of just the rows that are fed."""

    step: Step

    def __call__(self, schedule: Schedule) -> StepResult:
        """Launch the pass."""
        return self.step(schedule.batch(self.step.table.device))


def _with_logprobs(
    counts_BJ: Tensor, logits_XV: Tensor, plan: StepPlan, outcome: StepOutcome, *, num_top: int
) -> StepResult:
    """Under the model's own law, before temperature and truncation."""
    token_ids_BJ = outcome.token_ids_BJ
    offsets_J = torch.arange(token_ids_BJ.shape[1], device=token_ids_BJ.device)
    rows_BJ = (plan.first_logit_B[:, None] + offsets_J).clamp(max=len(logits_XV) - 1)
    logits_BJV = logits_XV[rows_BJ]
    probs_BJV = torch.log_softmax(logits_BJV.double(), dim=-1)
    top_ids_BJK = _likeliest(logits_BJV, min(num_top, probs_BJV.shape[-1]))
    return StepResult(
        counts_BJ=counts_BJ,
        logprobs_BJ=probs_BJV.gather(-1, token_ids_BJ[..., None])[..., 0],
        top_ids_BJK=top_ids_BJK,
        top_logprobs_BJK=probs_BJV.gather(-1, top_ids_BJK),
    )


def _likeliest(logits_BJV: Tensor, num: int) -> Tensor:
    """Ids of the largest logits, of equal ones the lower id first. topk promises no order of ties, so it gets
    keys without ties: an integer that orders as the fp32 logit does, then the id.
    """
    bits_BJV = (logits_BJV.float() + 0.0).view(torch.int32)  # + 0.0: -0 is 0.
    keys_BJV = (bits_BJV ^ ((bits_BJV >> 31) & 0x7FFFFFFF)).long() << 32
    keys_BJV -= torch.arange(logits_BJV.shape[-1], device=logits_BJV.device)
    return keys_BJV.topk(num, dim=-1).indices
