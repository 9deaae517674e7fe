"""What an engine does on a device, all of it: sequences sit down, KV pointers go back, pages are copied,
passes are launched. It decides nothing and reads nothing back.

Alone there is one worker. With tensor parallelism each rank has one, and that of rank 0 (`group.DriverWorker`)
tells the others what to do before it does the same.
Shapes: Z lanes, L tokens of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from idlm.infer.build import EngineParts, build
from idlm.infer.distributed.messages import Message, schedule_from_message
from idlm.infer.models.shards import Shards
from idlm.infer.request import Request
from idlm.infer.runtime.cuda_graphs import StaticStep
from idlm.infer.runtime.model_runner import StepResult
from idlm.infer.state.batch import Schedule, lane_of
from idlm.infer.state.sequence_state import SequenceState

DIGEST_PRIME = 1_000_003


class Worker:
    """Carries schedules out on the device of `parts`."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.device = parts.table.device

    def launch(self, schedule: Schedule) -> StepResult:
        """Do what the schedule says and send its pass on its way."""
        self._admit(schedule)
        return self.parts.step(schedule)

    def check(self) -> None:
        """UserError when passes that are on their way cannot come back; alone, they always can."""

    def free_cached_memory(self) -> None:
        """After a pass that ran out of memory: give back what graphs and the allocator keep."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if isinstance(self.parts.step, StaticStep):
            self.parts.step.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """End what was started for this engine; alone, nothing was."""

    def digest(self) -> int:
        """A number that differs, almost surely, where the tokens or pointers of a sequence do. Waits for all
        passes.
        """
        return digest(self.parts.table)

    def _admit(self, schedule: Schedule) -> None:
        parts, scheduled_new_requests = self.parts, schedule.scheduled_new_requests
        if scheduled_new_requests:
            lanes = [lane_of(request) for request in scheduled_new_requests]
            parts.table.admit(
                lanes,
                [[*request.prompt_ids, *request.token_ids] for request in scheduled_new_requests],
                [request.params for request in scheduled_new_requests],
                [request.index for request in scheduled_new_requests],
                ends=[request.max_length for request in scheduled_new_requests],
                steps=[request.num_steps for request in scheduled_new_requests],
                computed=[request.num_computed for request in scheduled_new_requests],
            )
            parts.decoder.admit(lanes, [request.params.decoder_options for request in scheduled_new_requests])
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
    """Sum over known tokens, each times a number of its place, and over the pointers, modulo 2^64."""
    places_L = torch.arange(table.max_length, device=table.device)
    tokens_ZL = table.tokens_ZL[:, : table.max_length] * (places_L < table.num_known_Z[:, None])
    lines_Z = (tokens_ZL * (DIGEST_PRIME * places_L + 1)).sum(dim=1)
    for column_Z in (table.num_known_Z, table.num_computed_Z, table.steps_Z):
        lines_Z = lines_Z * DIGEST_PRIME + column_Z
    lanes_Z = torch.arange(len(lines_Z), device=table.device)
    return int((lines_Z * (2 * lanes_Z + 1)).sum())


def worker_loop(
    receive: Callable[[], Message | None], send: Callable[[Message], None], shards: Shards
) -> None:
    """A rank's loop: do what rank 0 says until it has nothing more to say. Several engines may live at
    once.
    """
    workers: dict[int, tuple[Worker, dict[int, Request]]] = {}
    while (order := receive()) is not None:
        number = order["engine"]
        match order["do"]:
            case "build":
                parts = build(order["path"], order["decoder"], order["options"], shards)
                workers[number] = Worker(parts), {}
                send({"state": "built"})
            case "pass":
                worker, seats = workers[number]
                worker.parts.pool.follow(order["pages"])
                worker.launch(schedule_from_message(order, seats))
            case "digest":
                send({"digest": workers[number][0].digest()})
            case "drop":
                del workers[number]
