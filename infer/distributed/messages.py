"""Messages between rank 0 and the other ranks of a tensor-parallel engine: JSON objects over a
`multiprocessing` connection, which frames them. Nothing is pickled.

Rank 0 sends which engine to build and every pass; a rank answers that it is ready, its digest, or its
failure."""

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
REQUEST = ("index", "max_length", "num_canvases", "num_steps", "num_computed")
SCHEDULE = ("num_feed", "num_known", "samples", "num_rows", "mode")
"""Fields of a request, and of a schedule, that ranks get as they are."""


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
    return {
        **{name: getattr(schedule, name) for name in SCHEDULE},
        "admitted": [_request_message(request) for request in schedule.scheduled_new_requests],
        "rewound": [
            [lane_of(request), request.num_computed] for request in (*schedule.preempted, *schedule.resumed)
        ],
        "pages": pages,
        "lanes": [lane_of(request) for request in schedule.requests],
        "limits": dataclasses.asdict(schedule.limits),
        "prompt_rows": None if schedule.prompt_rows is None else dataclasses.asdict(schedule.prompt_rows),
    }


def schedule_from_message(message: Message, requests: dict[int, Request]) -> Schedule:
    """The schedule that `step_message` described. `requests` maps a lane to its last admitted request and is
    updated in place.

    These requests hold only what a device needs: no text, and of the answer what was known at admission."""
    admitted = [_request(fields) for fields in message["admitted"]]
    requests.update({lane_of(request): request for request in admitted})
    for lane, num_computed in message["rewound"]:
        requests[lane].num_computed = num_computed
    num_wanted, capacity = message["limits"]["num_wanted"], message["limits"]["capacity"]
    return Schedule(
        **{name: message[name] for name in SCHEDULE},
        requests=[requests[lane] for lane in message["lanes"]],
        scheduled_new_requests=admitted,
        resumed=[requests[lane] for lane, _ in message["rewound"]],
        limits=BlockLimits(
            num_wanted=num_wanted, capacity=None if capacity is None else PassRows(**capacity)
        ),
        prompt_rows=None if message["prompt_rows"] is None else PromptRows(**message["prompt_rows"]),
    )


def _request_message(request: Request) -> Message:
    return {
        **{name: getattr(request, name) for name in REQUEST},
        "lane": lane_of(request),
        "prompt_ids": request.prompt_ids[: request.num_known],
        "token_ids": request.known_ids(
            len(request.prompt_ids), max(request.num_known, len(request.prompt_ids))
        ),
        "stop_ids": sorted(request.stop_ids) if request.params.min_tokens else [],
        "params": {name: getattr(request.params, name) for name in PARAMS},
    }


def _request(fields: Message) -> Request:
    params, stop_ids = SamplingParams(**fields["params"]), frozenset(fields["stop_ids"])
    return Request(**{**fields, "params": params, "stop_ids": stop_ids}, request_id="")
