"""Executes schedules on one device: fills lanes, rewinds KV pointers, copies pages and launches steps.

A worker takes no decisions and reads no results back. With tensor parallelism each rank has one, and that of
rank 0 (`launcher.DriverWorker`) broadcasts each schedule to the others before it executes it.
Shapes: Z lanes, L tokens of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from idlm.infer.build import EngineParts, build
from idlm.infer.distributed.messages import Message, schedule_from_message
from idlm.infer.models.shards import Shards
from idlm.infer.options import check_options
from idlm.infer.request import Request
from idlm.infer.runtime.cuda_graphs import StaticStep
from idlm.infer.runtime.model_runner import StepResult
from idlm.infer.state.batch import Schedule, lane_of
from idlm.infer.state.sequence_state import SequenceState

DIGEST_PRIME = 1_000_003


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

    def digest(self) -> int:
        """A checksum of tokens and pointers of all sequences, equal on all ranks. Waits for all steps."""
        return digest(self.parts.table)

    def _admit(self, schedule: Schedule) -> None:
        """Fill the lanes of new requests, and rewind those that were preempted or resumed."""
        parts, new = self.parts, schedule.scheduled_new_requests
        if new:
            lanes = [lane_of(request) for request in new]
            parts.table.admit(
                lanes,
                [[*request.prompt_ids, *request.token_ids] for request in new],
                [request.params for request in new],
                [request.index for request in new],
                ends=[request.max_length for request in new],
                steps=[request.num_steps for request in new],
                computed=[request.num_computed for request in new],
            )
            parts.decoder.admit(lanes, [request.params for request in new])
            parts.stack.reset(lanes)
        rewound = (*schedule.preempted, *schedule.resumed)
        for request in rewound:
            parts.table.rewind(lane_of(request), request.num_computed)
        if rewound:
            lanes = [lane_of(request) for request in rewound]
            parts.decoder.rewind(lanes)
            parts.stack.reset(lanes)
        parts.runner.copy_pages(schedule.copies)


@torch.inference_mode()
def digest(table: SequenceState) -> int:
    """Sum of known tokens, weighted by position and lane, and of the pointers, modulo 2^64."""
    positions_L = torch.arange(table.max_length, device=table.device)
    tokens_ZL = table.tokens_ZL[:, : table.max_length] * (positions_L < table.num_known_Z[:, None])
    sums_Z = (tokens_ZL * (DIGEST_PRIME * positions_L + 1)).sum(dim=1)
    for column_Z in (table.num_known_Z, table.num_computed_Z, table.steps_Z):
        sums_Z = sums_Z * DIGEST_PRIME + column_Z
    lanes_Z = torch.arange(len(sums_Z), device=table.device)
    return int((sums_Z * (2 * lanes_Z + 1)).sum())


def worker_loop(
    receive: Callable[[], Message | None], send: Callable[[Message], None], shards: Shards
) -> None:
    """The loop of a rank other than 0: execute messages until there are none. Serves several engines."""
    workers: dict[int, tuple[Worker, dict[int, Request]]] = {}
    while (message := receive()) is not None:
        number = message["engine"]
        match message["do"]:
            case "build":
                parts = build(message["path"], check_options(message["decoder"], message["options"]), shards)
                workers[number] = Worker(parts), {}
                send({"state": "built"})
            case "pass":
                worker, requests = workers[number]
                worker.parts.pool.follow(message["pages"])
                worker.launch(schedule_from_message(message, requests))
            case "digest":
                send({"digest": workers[number][0].digest()})
            case "drop":
                del workers[number]
