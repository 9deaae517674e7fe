"""Times on a device, and the machine's limits: read-only stream and matrix product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

STREAM_BYTES = 4 << 30
CPU_STREAM_BYTES = 64 << 20
STREAM_ROUNDS = 9
MATMUL_SIZE = 8192
CPU_MATMUL_SIZE = 256
MATMUL_REPEATS = 20
MIN_US = 3000.0
"""Minimum work of a graph, so that the time of its launch does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second of the read-only stream, FLOP/s of the matrix product."""

    stream: float
    product: float


def measure_rates(device: str = "cuda") -> Rates:
    rates = Rates(stream=stream_rate(device=device), product=matmul_rate(device=device))
    print(
        f"read-only stream {rates.stream / 1e12:.3f} TB/s, bf16 product {rates.product / 1e12:.1f} TFLOP/s",
        flush=True,
    )
    return rates


def stream_rate(*, rounds: int = STREAM_ROUNDS, device: str = "cuda") -> float:
    """Bytes per second of a sum over more memory than any cache holds, which only reads."""
    num_bytes = STREAM_BYTES if device.startswith("cuda") else CPU_STREAM_BYTES
    buffer = torch.ones(num_bytes // 4, device=device)
    if not buffer.is_cuda:
        return num_bytes / statistics.median(_seconds(buffer.sum) for _ in range(rounds))
    return num_bytes / (Timer(rounds=rounds, bytes_per_us=0.0).us_per_call([buffer.sum]) * 1e-6)


def matmul_rate(*, device: str = "cuda") -> float:
    """Median FLOP/s of a large bf16 product of random matrices, the ceiling of this machine."""
    is_cuda = device.startswith("cuda")
    size = MATMUL_SIZE if is_cuda else CPU_MATMUL_SIZE
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = [
        device_ms(lambda: a @ b) / 1e3 if is_cuda else _seconds(lambda: a @ b) for _ in range(MATMUL_REPEATS)
    ]
    # The first products run before the clock and the library's choice of a kernel have settled.
    return 2 * size**3 / statistics.median(seconds[MATMUL_REPEATS // 4 :])


def device_ms(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def ms_in_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, *, before: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """Median milliseconds of each call on the GPU; all run in turn within a round, so that clocks affect them
    equally, each after `before`, which is not timed."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            before()
            samples[name].append(device_ms(call))
    return {name: statistics.median(values) for name, values in samples.items()}


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture the call as a CUDA graph, after a run that compiles."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Timer:
    """Median of `rounds` replays. Measures the stream when it is created, unless the rate is given."""

    def __init__(self, *, rounds: int, bytes_per_us: float | None = None) -> None:
        self.rounds = rounds
        self.bytes_per_us = stream_rate(rounds=rounds) / 1e6 if bytes_per_us is None else bytes_per_us

    def us_per_call(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Microseconds per call of a graph that holds `calls` in turn, repeated to at least `MIN_US`."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = self._captured(calls, 1)
        times = 1 + int(MIN_US / max(1.0, self._replayed(graph)))
        if times > 1:
            graph = self._captured(calls, times)
        replays = (self._replayed(graph) for _ in range(self.rounds))
        return statistics.median(replays) / (times * len(calls))

    def _captured(self, calls: Sequence[Callable[[], Any]], times: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                for call in calls:
                    call()
        graph.replay()
        return graph

    def _replayed(self, graph: torch.cuda.CUDAGraph) -> float:
        return 1000 * device_ms(graph.replay)
