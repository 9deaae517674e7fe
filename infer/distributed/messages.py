"""What rank 0 tells the other ranks, as plain data (JSON objects): which engine to build, what each pass is.

Data flows one way; all that comes back is that a rank is ready, what its digest is, or that it failed.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import Any

from idlm.contracts import SamplingParams
from idlm.infer.request import Request
from idlm.infer.state.batch import Schedule, lane_of

Message = dict[str, Any]
LENGTH = struct.Struct("<Q")
PARAMS = ("temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "tau", "decoder_options")
"""The sampling settings that a device sees."""


class Channel:
    """Messages over a local socket, each behind its length."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: Message) -> None:
        """Raises OSError when nobody is there any more."""
        data = json.dumps(message, separators=(",", ":")).encode()
        self._socket.sendall(LENGTH.pack(len(data)) + data)

    def receive(self) -> Message | None:
        """The next message, waiting for it; None when the other end is closed."""
        head = self._read(LENGTH.size)
        data = None if head is None else self._read(LENGTH.unpack(head)[0])
        if data is None:
            return None
        message: Message = json.loads(data)
        return message

    def has_news(self, seconds: float = 0.0) -> bool:
        """Whether `receive` has something to say, at latest after `seconds`."""
        news = select.poll()
        news.register(self._socket, select.POLLIN)
        return bool(news.poll(seconds * 1e3))

    def is_cut(self, seconds: float) -> bool:
        """Whether an end is closed, at latest after `seconds`. Takes nothing that was sent, and may be asked
        from beside.
        """
        number = self._socket.fileno()
        if number < 0:
            return True
        cut = select.poll()
        cut.register(number, select.POLLRDHUP)
        return bool(cut.poll(seconds * 1e3))

    def close(self) -> None:
        """The other end then receives None."""
        self._socket.close()

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except ConnectionError:
                return None
            if not part:
                return None
            data += part
        return bytes(data)


def step_message(schedule: Schedule, pages: list[tuple[int, int, int]]) -> Message:
    """The pass, and before it: who sits down, whose KV pointer moves, which `pages` (lane, place, page) lanes
    got and which are copied.
    """
    return {
        "seated": [_admit(request) for request in schedule.scheduled_new_requests],
        "rewound": [
            [lane_of(request), request.num_computed] for request in (*schedule.preempted, *schedule.resumed)
        ],
        "pages": pages,
        "copies": schedule.copies,
        "lanes": [lane_of(request) for request in schedule.requests],
        "num_feed": schedule.num_feed,
        "num_known": schedule.num_known,
        "samples": schedule.samples,
        "mode": schedule.mode,
    }


def schedule_from_message(order: Message, seats: dict[int, Request]) -> Schedule:
    """The schedule of a pass order. `seats`: who was seated on which lane so far; brought up to date.

    Its requests know what a device is told and nothing else: no answer, no text, no end of it.
    """
    scheduled_new_requests = [_request(*admit) for admit in order["seated"]]
    seats.update({lane_of(request): request for request in scheduled_new_requests})
    for lane, num_computed in order["rewound"]:
        seats[lane].num_computed = num_computed
    return Schedule(
        requests=[seats[lane] for lane in order["lanes"]],
        num_feed=order["num_feed"],
        num_known=order["num_known"],
        samples=order["samples"],
        scheduled_new_requests=scheduled_new_requests,
        resumed=[seats[lane] for lane, _ in order["rewound"]],
        copies=[(source, target) for source, target in order["copies"]],
        mode=order["mode"],
    )


def _admit(request: Request) -> list[Any]:
    return [
        lane_of(request),
        [*request.prompt_ids, *request.token_ids],
        {name: getattr(request.params, name) for name in PARAMS},
        request.index,
        request.max_length,
        request.num_steps,
        request.num_computed,
    ]


def _request(
    lane: int,
    known_ids: list[int],
    params: dict[str, Any],
    index: int,
    max_length: int,
    num_steps: int,
    num_computed: int,
) -> Request:
    return Request(
        request_id="",
        index=index,
        prompt_ids=known_ids,
        params=SamplingParams(**params),
        stop_ids=frozenset(),
        max_length=max_length,
        lane=lane,
        num_steps=num_steps,
        num_computed=num_computed,
    )
