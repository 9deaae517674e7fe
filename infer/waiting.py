"""Requests that wait for a lane. Those that a failed pass interrupted come first; the others come in turn
over clients, then by priority, in turn over the users of a client, and in turn over calls, one answer at a
time. A new client waits for one turn of each other client, however much that client has queued.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from idlm.infer.request import Request, Turn

PRIORITY_LEVEL = Turn._fields.index("priority")


class Waiting:
    """The queue. Its levels are dicts, by the fields of `Turn`; whose turn it is stands first. The last level
    is the answers of a call."""

    def __init__(self) -> None:
        self._interrupted: deque[Request] = deque()
        self._clients: dict[Any, Any] = {}
        self._num = 0

    def __len__(self) -> int:
        return len(self._interrupted) + self._num

    def __iter__(self) -> Iterator[Request]:
        """All requests, in no order that says who is next."""
        yield from self._interrupted
        levels = [self._clients]
        while levels:
            for below in levels.pop().values():
                if isinstance(below, deque):
                    yield from below
                else:
                    levels.append(below)

    def add(self, request: Request) -> None:
        """Queue a request."""
        *path, last = request.turn
        level = self._clients
        for name in path:
            level = level.setdefault(name, {})
        level.setdefault(last, deque()).append(request)
        self._num += 1

    def first(self) -> Request:
        """Whose turn it is."""
        return self._interrupted[0] if self._interrupted else self._next()

    def pop(self) -> Request:
        """Take the first request out; the next turn is that of others."""
        if self._interrupted:
            return self._interrupted.popleft()
        request = self._next()
        self._take(request, ends_turn=True)
        return request

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        if request in self._interrupted:
            self._interrupted.remove(request)
        else:
            self._take(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        """Queue requests that ran before all others. One that was being admitted may still be here."""
        put = list(requests)
        queued = set(self)
        for request in put:
            if request in queued:
                self.remove(request)
        self._interrupted.extendleft(reversed(put))

    def starved(self, running: Sequence[Request]) -> Request | None:
        """The first waiting request whose client has no lane while another has more than one; likewise of
        users of a client, and of calls of a user. None: there is none."""
        counts: dict[Any, Counter[Any]] = {}
        for one in running:
            path = tuple(one.turn)
            for depth, name in enumerate(path):
                counts.setdefault(path[:depth], Counter())[name] += 1
        return None if self._interrupted else _starved(self._clients, (), counts)

    def prefer(self, request: Request) -> None:
        """Let a waiting request be the first."""
        level = self._clients
        for name in request.turn:
            _move_to_front(level, name)
            level = level[name]

    def _next(self) -> Request:
        return _first(self._clients, 0)

    def _take(self, request: Request, *, ends_turn: bool = False) -> None:
        path = request.turn
        levels: list[Any] = [self._clients]
        for name in path:
            levels.append(levels[-1][name])
        levels.pop().remove(request)
        for level, name in zip(reversed(levels), reversed(path), strict=True):
            below = level[name]
            if not below or ends_turn:
                del level[name]
            if below and ends_turn:
                level[name] = below
        self._num -= 1


def _starved(level: Any, prefix: Any, counts: dict[Any, Counter[Any]]) -> Request | None:
    """The first request below a name that no running request has, if another name has several."""
    beside = counts.get(prefix)
    if beside is None or isinstance(level, deque):
        return None
    depth = len(prefix)
    if max(beside.values()) > 1 and depth != PRIORITY_LEVEL:
        for name, below in level.items():
            if name not in beside:
                return _first(below, depth + 1)
    names = [min(level)] if depth == PRIORITY_LEVEL else list(level)
    found = (_starved(level[name], (*prefix, name), counts) for name in names)
    return next((one for one in found if one is not None), None)


def _first(level: Any, depth: int) -> Request:
    while not isinstance(level, deque):
        level = level[min(level) if depth == PRIORITY_LEVEL else next(iter(level))]
        depth += 1
    request: Request = level[0]
    return request


def _move_to_front(level: dict[Any, Any], name: Any) -> None:
    others = {key: level.pop(key) for key in list(level) if key != name}
    level.update(others)
