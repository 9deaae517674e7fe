"""Times of graph replays, and the read-only stream of the same process that they are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

STREAM_BYTES = 4 << 30
CPU_STREAM_BYTES = 64 << 20
STREAM_ROUNDS = 9
LEAST_US = 3000.0
"""A graph holds so much work that its own launch does not count."""


def stream_rate(*, rounds: int = STREAM_ROUNDS, device: str = "cuda") -> float:
    """Bytes per second of a sum over more than any cache holds: what only reading takes."""
    num_bytes = STREAM_BYTES if device.startswith("cuda") else CPU_STREAM_BYTES
    buffer = torch.ones(num_bytes // 4, device=device)
    if not buffer.is_cuda:
        return num_bytes / statistics.median(_seconds(buffer.sum) for _ in range(rounds))
    return num_bytes / (Timer(rounds=rounds, bytes_per_us=0.0).us_per_call([buffer.sum]) * 1e-6)


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


class Timer:
    """Median of `rounds` replays; measures the stream when it is made, unless it is given."""

    def __init__(self, *, rounds: int, bytes_per_us: float | None = None) -> None:
        self.rounds = rounds
        self.bytes_per_us = stream_rate(rounds=rounds) / 1e6 if bytes_per_us is None else bytes_per_us

    def us_per_call(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Microseconds per call of a graph that holds all `calls` in turn, as often as it takes."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = self._captured(calls, 1)
        times = 1 + int(LEAST_US / max(1.0, self._replayed(graph)))
        if times > 1:
            graph = self._captured(calls, times)
        return statistics.median(self._replayed(graph) for _ in range(self.rounds)) / (times * len(calls))

    def _captured(self, calls: Sequence[Callable[[], Any]], times: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                for call in calls:
                    call()
        graph.replay()
        return graph

    def _replayed(self, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds of one replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return 1000 * start.elapsed_time(end)
