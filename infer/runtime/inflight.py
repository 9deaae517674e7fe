"""A pass on its way: what it will say about whom, copied to the host without waiting for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from idlm.contracts import TokenLogprob
from idlm.infer.request import Request
from idlm.infer.runtime.worker import Worker
from idlm.infer.scheduler import Schedule

POLL_SECONDS = 5e-5
POLLS_PER_CHECK = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What a pass says about one request. `logprobs` is empty where nobody asked; `nonfinite`: see
    `StepOutcome.nonfinite_B`; `waited`: it found no room and decided nothing (`RowSelection`).
    """

    nonfinite: int
    waited: bool
    token_ids: list[int]
    num_accepted: int
    num_tested: int
    logprobs: list[TokenLogprob]


class InflightStep:
    """One launched pass, whose results are read late: nobody waits for what was launched just now."""

    def __init__(self, schedule: Schedule, worker: Worker) -> None:
        self.requests: list[Request] = schedule.requests
        self.samples: list[bool] = schedule.samples
        self.mode = schedule.mode
        self.only_decodes = all(schedule.samples) and max(schedule.num_feed) == 1
        begun = time.perf_counter()
        self._start = _mark(worker.device)
        result = worker.launch(schedule)
        self._counts = _to_host(result.counts_BJ)
        logprobs = (result.logprobs_BJ, result.top_ids_BJK, result.top_logprobs_BJK)
        self._logprobs = [_to_host(tensor) for tensor in logprobs if tensor is not None]
        self._event = _mark(worker.device)
        self._check = worker.check
        self._seconds = time.perf_counter() - begun

    def is_ready(self) -> bool:
        """Whether a GPU has finished the pass; on a CPU there is nothing to gain from looking early."""
        return self._event is not None and bool(self._event.query())

    def seconds(self) -> float:
        """How long the pass took; on a GPU once it is back, without the time that it waited for others."""
        if self._start is None or self._event is None:
            return self._seconds
        return self._start.elapsed_time(self._event) / 1e3

    def emissions(self) -> list[Emission]:
        """What the pass says, in the order of `requests`; looks again and again until it is there."""
        num_looks = 0
        while self._event is not None and not self._event.query():
            time.sleep(POLL_SECONDS)
            num_looks += 1
            if num_looks % POLLS_PER_CHECK == 0:
                self._check()
        logprobs = [tensor.tolist() for tensor in self._logprobs]
        emissions = []
        counts = self._counts.tolist()[: len(self.requests)]
        for b, (request, row) in enumerate(zip(self.requests, counts, strict=True)):
            nonfinite, waited, num_emitted, num_accepted, num_tested, *tokens = row
            token_ids, wanted = tokens[:num_emitted], request.params.logprobs
            emissions.append(
                Emission(
                    nonfinite=nonfinite,
                    waited=waited > 0,
                    token_ids=token_ids,
                    num_accepted=num_accepted,
                    num_tested=num_tested,
                    logprobs=[] if wanted is None else _read(wanted, b, token_ids, logprobs),
                )
            )
        return emissions


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """This point in the work of `device`, None where it is no GPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _to_host(result: Tensor) -> Tensor:
    if not result.is_cuda:
        return result
    on_host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    return on_host.copy_(result, non_blocking=True)


def _read(num_top: int, b: int, token_ids: list[int], results: list[Any]) -> list[TokenLogprob]:
    chosen_BJ, top_ids_BJK, top_BJK = results
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=chosen_BJ[b][j],
            top=dict(zip(top_ids_BJK[b][j][:num_top], top_BJK[b][j][:num_top], strict=True)),
        )
        for j, token_id in enumerate(token_ids)
    ]
