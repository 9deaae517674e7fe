"""A launched step whose results are copied to the host without waiting for them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from idlm.contracts import TokenLogprob
from idlm.infer.request import Request
from idlm.infer.runtime.worker import Worker
from idlm.infer.state.batch import Schedule

POLL_SECONDS = 5e-5
POLLS_PER_CHECK = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """The result of a step for one request; see `StepOutcome`. `logprobs` is empty unless requested.

    `waited`: the request found no room in the pass, which decided nothing for it (`RowSelection`).
    """

    nonfinite: int
    waited: bool
    token_ids: list[int]
    num_accepted: int
    num_tested: int
    logprobs: list[TokenLogprob]


class InflightStep:
    """Launches a schedule on construction; `emissions` reads its results later."""

    def __init__(self, schedule: Schedule, worker: Worker) -> None:
        self.requests: list[Request] = schedule.requests
        self.samples: list[bool] = schedule.samples
        self.mode = schedule.mode
        self.only_decodes = all(schedule.samples) and max(schedule.num_feed) == 1
        launch_time = time.perf_counter()
        self._start = _mark(worker.device)
        result = worker.launch(schedule)
        self._counts = _to_host(result.counts_BJ)
        logprobs = (result.logprobs_BJ, result.top_ids_BJK, result.top_logprobs_BJK)
        self._logprobs = [_to_host(tensor) for tensor in logprobs if tensor is not None]
        self._event = _mark(worker.device)
        self._check = worker.check
        self._seconds = time.perf_counter() - launch_time

    def is_ready(self) -> bool:
        """Whether the GPU has finished the step; False on a CPU, where reading early gains nothing."""
        return self._event is not None and bool(self._event.query())

    def seconds(self) -> float:
        """Duration of the step; on a GPU it excludes waiting for earlier steps and needs a finished step."""
        if self._start is None or self._event is None:
            return self._seconds
        return self._start.elapsed_time(self._event) / 1e3

    def emissions(self) -> list[Emission]:
        """Results in the order of `requests`; waits for the step, and polls whether its ranks are alive."""
        num_polls = 0
        while self._event is not None and not self._event.query():
            time.sleep(POLL_SECONDS)
            num_polls += 1
            if num_polls % POLLS_PER_CHECK == 0:
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
    """A recorded event on the current stream of a GPU; None for a CPU."""
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
