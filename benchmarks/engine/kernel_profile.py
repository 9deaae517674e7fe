"""Kernel times of decoding passes, by name and by kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from idlm.infer.engine import Engine

KINDS = (
    ("experts", r"route_kernel|plan_kernel|grouped_kernel|add_experts"),
    ("attention", r"attend_kernel|combine_kernel|tile_kernel|item_kernel"),
    ("ranking", r"share_kernel|select_kernel"),
    ("bounds", r"bounds_kernel|score_kernel"),
    ("norms", r"norm"),
    ("rope", r"rope"),
    ("swiglu", r"swiglu"),
    ("adapter", r"expand_kernel"),
    ("sampling", r"stats_kernel|probs_kernel|draw|judge|probability|uniforms|softmax|Entr"),
    ("rows", r"pack_|map_slots|commit|unmask|choose"),
    ("linears", r"gemm|cutlass|nvjet|cublas|splitK|split_kernel|linear|mm\b|addmm"),
)
"""The first pattern that matches a kernel's name gives its kind; kernels without a match are `small`."""
NUM_SHOWN = 40
NAME_WIDTH = 76


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Time and calls of a kernel per pass."""

    name: str
    ms: float
    calls: float

    @property
    def kind(self) -> str:
        """Kind of the kernel by `KINDS`."""
        return next((kind for kind, pattern in KINDS if re.search(pattern, self.name)), "small")


class Profiled(Protocol):
    """An engine with work, such as `SteadyEngine`."""

    @property
    def engine(self) -> Engine:
        """The engine."""
        ...

    def run_passes(self, num_passes: int) -> Any:
        """Launch passes."""
        ...

    def drain(self) -> Any:
        """Wait for all passes."""
        ...


def kernel_times(steady: Profiled, num_passes: int) -> list[KernelTime]:
    """Kernels (on a CPU: operations) of `num_passes` passes, longest first."""
    from torch.profiler import ProfilerActivity, profile

    is_cuda = steady.engine.table.device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as record:
        steady.run_passes(num_passes)
        steady.drain()
        if is_cuda:
            torch.cuda.synchronize()
    found = [_time(event, num_passes, is_cuda) for event in record.key_averages()]
    return sorted((time for time in found if time.ms > 0), key=lambda time: -time.ms)


def _time(event: Any, num_passes: int, is_cuda: bool) -> KernelTime:
    us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
    return KernelTime(name=event.key, ms=us / 1e3 / num_passes, calls=event.count / num_passes)


def lines_of(times: list[KernelTime], expected: Mapping[str, float]) -> list[str]:
    """A line per kind with its expected time, then one per kernel."""
    lines = [f"    {'kind':<12s} {'ms/pass':>9s} {'calls':>7s} {'expected':>9s}"]
    kinds = {kind: [time for time in times if time.kind == kind] for kind in _kinds(times)}
    for kind, members in kinds.items():
        ms, calls = sum(time.ms for time in members), sum(time.calls for time in members)
        detail = f"{expected[kind]:9.3f}" if kind in expected else ""
        lines.append(f"    {kind:<12s} {ms:9.3f} {calls:7.1f} {detail}")
    lines.append(f"    {'all':<12s} {sum(time.ms for time in times):9.3f}")
    for time in times[:NUM_SHOWN]:
        lines.append(f"      {time.ms:9.4f} {time.calls:7.1f}  {time.kind:<10s} {time.name[:NAME_WIDTH]}")
    return lines


def _kinds(times: list[KernelTime]) -> list[str]:
    return list(dict.fromkeys(time.kind for time in times))
