"""A pass on its way: what it will say about whom, copied to the host without waiting for it.

Shapes: B sequences, J tokens a pass can emit, K likeliest tokens, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.contracts import StepOutcome, StepPlan, TokenLogprob
from idlm.infer.request import Request
from idlm.infer.scheduler import Schedule

SECONDS_BETWEEN_LOOKS = 5e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What a pass says about one request. `logprobs` is empty where nobody asked."""

    token_ids: list[int]
    num_accepted: int
    num_tested: int
    logprobs: list[TokenLogprob]


class Flight:
    """One launched pass, whose results are read late: nobody waits for what was launched just now."""

    def __init__(self, schedule: Schedule, plan: StepPlan, outcome: StepOutcome, logits_XV: Tensor) -> None:
        self.requests: list[Request] = schedule.requests
        self.samples: list[bool] = schedule.samples
        counts_B3 = torch.stack((outcome.num_emitted_B, outcome.num_accepted_B, outcome.num_tested_B), dim=1)
        self._results = [_to_host(torch.cat((counts_B3, outcome.token_ids_BJ), dim=1))]
        wanted = [request.params.logprobs for request in schedule.requests]
        asked = [number for number in wanted if number is not None]
        if asked:
            self._results += map(_to_host, _logprobs(logits_XV, plan, outcome, num_top=max(asked)))
        self._event = torch.cuda.Event() if logits_XV.is_cuda else None
        if self._event is not None:
            self._event.record()

    def is_back(self) -> bool:
        """Whether a GPU has finished the pass; on a CPU there is nothing to gain from looking early."""
        return self._event is not None and bool(self._event.query())

    def emissions(self) -> list[Emission]:
        """What the pass says, in the order of `requests`; looks again and again until it is there."""
        while self._event is not None and not self._event.query():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        table, *logprobs = (result.tolist() for result in self._results)
        return [
            Emission(
                token_ids=tokens[:num_emitted],
                num_accepted=num_accepted,
                num_tested=num_tested,
                logprobs=_read(request.params.logprobs, b, tokens[:num_emitted], logprobs),
            )
            for b, (request, (num_emitted, num_accepted, num_tested, *tokens)) in enumerate(
                zip(self.requests, table, strict=True)
            )
        ]


def _to_host(result: Tensor) -> Tensor:
    if not result.is_cuda:
        return result
    on_host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    return on_host.copy_(result, non_blocking=True)


def _logprobs(
    logits_XV: Tensor, plan: StepPlan, outcome: StepOutcome, *, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Under the model's own law, before temperature and truncation: those of the tokens [B, J], and ids and
    log-probabilities [B, J, K] of the likeliest.
    """
    token_ids_BJ = outcome.token_ids_BJ
    offsets_J = torch.arange(token_ids_BJ.shape[1], device=token_ids_BJ.device)
    rows_BJ = (plan.first_logit_B[:, None] + offsets_J).clamp(max=len(logits_XV) - 1)
    law_BJV = torch.log_softmax(logits_XV[rows_BJ].double(), dim=-1)
    top = law_BJV.topk(min(num_top, law_BJV.shape[-1]), dim=-1)
    return law_BJV.gather(-1, token_ids_BJ[..., None])[..., 0], top.indices, top.values


def _read(num_top: int | None, b: int, token_ids: list[int], results: list) -> list[TokenLogprob]:
    if num_top is None:
        return []
    chosen_BJ, top_ids_BJK, top_BJK = results
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=chosen_BJ[b][j],
            top=dict(zip(top_ids_BJK[b][j][:num_top], top_BJK[b][j][:num_top], strict=True)),
        )
        for j, token_id in enumerate(token_ids)
    ]
