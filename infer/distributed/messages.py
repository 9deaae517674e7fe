"""Messages between rank 0 and the other ranks of a tensor-parallel engine: JSON objects over a
`multiprocessing` connection, which frames them. Nothing is pickled.

Rank 0 sends which engine to build and every pass; a rank answers that it is ready, its digest, or its
failure.
"""

from __future__ import annotations

import dataclasses
import json
from multiprocessing.connection import Connection
from typing import Any

from idlm.contracts import SamplingParams
from idlm.infer.request import Request
from idlm.infer.state.batch import BlockLimits, PassRows, PromptRows, Schedule, lane_of

Message = dict[str, Any]
PARAMS = [
    each.name
    for each in dataclasses.fields(SamplingParams)
    if each.name not in ("stop", "stop_token_ids", "constraint")
]
"""The sampling settings that ranks get: those that a device may need."""


def send(connection: Connection, message: Message) -> None:
    """Raises OSError when the other end is closed."""
    connection.send_bytes(json.dumps(message, separators=(",", ":")).encode())


def receive(connection: Connection) -> Message | None:
    """Wait for the next message and return it; None when the other end is closed."""
    try:
        message: Message = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return message


def step_message(schedule: Schedule, pages: list[tuple[int, int, int]]) -> Message:
    """A pass and what precedes it: admitted requests, moved KV pointers, and `pages` (lane, index, page) that
    lanes received."""
    capacity = schedule.limits.capacity
    return {
        "admitted": [_request_message(request) for request in schedule.scheduled_new_requests],
        "rewound": [
            [lane_of(request), request.num_computed] for request in (*schedule.preempted, *schedule.resumed)
        ],
        "pages": pages,
        "lanes": [lane_of(request) for request in schedule.requests],
        "num_feed": schedule.num_feed,
        "num_known": schedule.num_known,
        "samples": schedule.samples,
        "num_rows": schedule.num_rows,
        "mode": schedule.mode,
        "num_wanted": schedule.limits.num_wanted,
        "capacity": None if capacity is None else dataclasses.asdict(capacity),
        "prompt_rows": None if schedule.prompt_rows is None else dataclasses.asdict(schedule.prompt_rows),
    }


def schedule_from_message(message: Message, requests: dict[int, Request]) -> Schedule:
    """The schedule that `step_message` described. `requests` maps a lane to its last admitted request and is
    updated in place.

    These requests hold only what a device needs: no text, and of the answer what was known at admission."""
    admitted = [
        Request(
            **{
                **fields,
                "params": SamplingParams(**fields["params"]),
                "stop_ids": frozenset(fields["stop_ids"]),
            },
            request_id="",
        )
        for fields in message["admitted"]
    ]
    requests.update({lane_of(request): request for request in admitted})
    for lane, num_computed in message["rewound"]:
        requests[lane].num_computed = num_computed
    return Schedule(
        requests=[requests[lane] for lane in message["lanes"]],
        num_feed=message["num_feed"],
        num_known=message["num_known"],
        samples=message["samples"],
        num_rows=message["num_rows"],
        scheduled_new_requests=admitted,
        resumed=[requests[lane] for lane, _ in message["rewound"]],
        mode=message["mode"],
        limits=BlockLimits(
            num_wanted=message["num_wanted"],
            capacity=None if message["capacity"] is None else PassRows(**message["capacity"]),
        ),
        prompt_rows=None if message["prompt_rows"] is None else PromptRows(**message["prompt_rows"]),
    )


def _request_message(request: Request) -> Message:
    return {
        "lane": lane_of(request),
        "prompt_ids": request.prompt_ids[: request.num_known],
        "token_ids": request.known_ids(
            len(request.prompt_ids), max(request.num_known, len(request.prompt_ids))
        ),
        "stop_ids": sorted(request.stop_ids) if request.params.min_tokens else [],
        "params": {name: getattr(request.params, name) for name in PARAMS},
        "index": request.index,
        "max_length": request.max_length,
        "num_canvases": request.num_canvases,
        "num_steps": request.num_steps,
        "num_computed": request.num_computed,
    }
