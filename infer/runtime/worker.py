"""Executes schedules on one device, without decisions of its own: fills lanes, rewinds KV pointers and
launches steps, whose results `InflightStep` copies to the host without waiting. With tensor parallelism that
of rank 0 (`launcher.DriverWorker`) broadcasts each schedule to those of the others. Shapes: Z lanes, L tokens
of the longest sequence, B sequences, J tokens that a pass can emit, K likeliest tokens."""

from __future__ import annotations

import time
from typing import Any

import torch

from idlm.contracts import TokenLogprob
from idlm.devices import is_out_of_memory
from idlm.infer.parts import EngineParts
from idlm.infer.request import Request
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.model_runner import NUM_COUNTS, StepResult
from idlm.infer.sparse.row_reservation import RowDemand
from idlm.infer.state.batch import PassRows, Schedule, lane_of, to_host

POLL_SECONDS = 5e-5
POLLS_PER_CHECK = 1000


class Worker:
    """Executes schedules on the device of `parts`."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.device = parts.table.device

    def launch(self, schedule: Schedule) -> StepResult:
        """Prepare the lanes of a schedule and launch its step, without waiting for it."""
        self._admit(schedule)
        return self.parts.step(schedule)

    def check(self) -> None:
        """Raise UserError if a rank has died, so that launched steps never finish. Without ranks: never."""

    def capture_missed(self) -> bool:
        """See `StaticStep.capture_missed`; False if memory is short, and on ranks that share a model."""
        step = self.parts.step
        try:
            return isinstance(step, StaticStep) and step.captures and step.capture_missed()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False

    def free_cached_memory(self) -> None:
        """Free captured graphs and the allocator's cache, after a step that ran out of memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if isinstance(self.parts.step, StaticStep):
            self.parts.step.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """End the ranks of this engine, if it has any."""

    def _admit(self, schedule: Schedule) -> None:
        """Fill the lanes of new requests, and rewind those that were preempted or resumed."""
        parts, new = self.parts, schedule.scheduled_new_requests
        rewound = [*schedule.preempted, *schedule.resumed]
        new_lanes, rewound_lanes = ([lane_of(request) for request in part] for part in (new, rewound))
        if new:
            parts.table.admit(new)
            parts.decoder.admit(new_lanes, [request.params for request in new])
        for request, lane in zip(rewound, rewound_lanes, strict=True):
            parts.table.rewind(lane, request.num_computed, request.num_known if request.num_again else None)
            if request.num_again:
                parts.table.changes.recount([request])
        if rewound:
            parts.decoder.rewind(rewound_lanes)
        if parts.stack is not None and (new or rewound):
            parts.stack.reset(new_lanes + rewound_lanes)


class InflightStep:
    """Launches a schedule on construction; `counts` reads its results later."""

    def __init__(self, schedule: Schedule, worker: Worker) -> None:
        self.schedule = schedule
        self.requests: list[Request] = schedule.requests
        self.samples: list[bool] = schedule.samples
        self.mode = schedule.mode
        # Of token-causal decoders no rows are reserved.
        self._certain = [] if schedule.num_lookahead_tokens else schedule.certain_rows()
        launch_time = time.perf_counter()
        self._start = _mark(worker.device)
        result = worker.launch(schedule)
        self.widths, self.is_queued = result.widths, result.is_queued
        self._counts = to_host(result.counts_BJ)
        self._logprobs = [to_host(tensor) for tensor in result.logprobs or ()]
        self._prompt_logprobs = [to_host(tensor) for tensor in result.prompt_logprobs or ()]
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

    def counts(self) -> list[list[int]]:
        """The columns of `StepResult.counts_BJ` before the token ids, of which `token_ids` has those of each
        request afterwards; waits for the step, and polls whether its ranks are alive."""
        num_polls = 0
        while self._event is not None and not self._event.query():
            time.sleep(POLL_SECONDS)
            num_polls += 1
            if num_polls % POLLS_PER_CHECK == 0:
                self._check()
        counts_BJ = self._counts[: len(self.requests)].numpy()
        self.token_ids: list[list[int]] = counts_BJ[:, NUM_COUNTS:].tolist()
        self._columns: list[list[int]] = counts_BJ[:, :NUM_COUNTS].T.tolist()
        return self._columns

    def demands(self) -> list[RowDemand]:
        """The rows that requests needed, in a pass for which some were reserved. After `counts`."""
        needed = zip(self.samples, self._certain, *self._columns[1:5], strict=True)
        return [
            RowDemand(samples, waited > 0, certain, PassRows(fed=num_fed, retained=num_left, head=num_wanted))
            for samples, certain, waited, num_wanted, num_fed, num_left in needed
        ]

    def logprobs(self) -> list[list[TokenLogprob]]:
        """Of all tokens that may have been emitted, by request, [] for one without them; in a pass
        of which one does. After `counts`."""
        values, found = [tensor.tolist() for tensor in self._logprobs], list[list[TokenLogprob]]()
        for b, request in enumerate(self.requests):
            num_top, token_ids = request.params.logprobs, self.token_ids[b]
            found.append([] if num_top is None else _read(num_top, token_ids, [each[b] for each in values]))
        return found

    def prompt_logprobs(self) -> list[tuple[Request, int, list[TokenLogprob]]]:
        """Requests, and log-probabilities of tokens of their prompts, from which position on."""
        rows, found = self.schedule.prompt_rows, []
        assert rows is not None, "no request of the pass has them"
        values, end = [tensor.tolist() for tensor in self._prompt_logprobs], 0
        for request, position, count in zip(self.requests, rows.starts, rows.counts, strict=True):
            own, end = [each[end : end + count] for each in values], end + count
            num_top, token_ids = request.params.prompt_logprobs, request.prompt_ids[position + 1 :][:count]
            if count and num_top is not None:
                found.append((request, position + 1, _read(num_top, token_ids, own)))
        return found


def _mark(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _read(num_top: int, token_ids: list[int], results: list[Any]) -> list[TokenLogprob]:
    """`Logprobs` of these tokens as lists, which may be longer."""
    return [
        TokenLogprob(token_id=token_id, logprob=logprob, top=dict(zip(ids[:num_top], top, strict=False)))
        for token_id, logprob, ids, top in zip(token_ids, *results, strict=False)
    ]
