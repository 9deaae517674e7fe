"""Milliseconds of one training step by part, from the kernels that a GPU ran."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

Span = tuple[str, float, float]
"""Name, start and end in microseconds."""
PARTS = (
    ("collectives", r"nccl"),
    ("attention", r"forward_kernel|backward_kernel|prepare_kernel|finish_kernel|query_gradient|fmha|flash"),
    ("loss", r"_rows_kernel|_distilled_kernel|_scale_kernel|_overlap_kernel"),
    ("products", r"gemm|nvjet|cutlass|xmma|cublas"),
    ("optimizer", r"adam|multi_tensor"),
    ("copies", r"memcpy|memset|copy_kernel|catarray|direct_copy"),
    ("compiled element-wise", r"^triton_"),
)


NAME_LENGTH, NUM_SHOWN = 48, 10


@dataclass(slots=True)
class StepProfile(TrainerCallback):
    """Profiles the step that follows `after` steps; `ms` is empty before, and where no kernel ran. `lines`
    say which kernels took longest and between which ones the device waited.
    """

    after: int
    ms: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    running: Any = None
    began: float = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == self.after and torch.cuda.is_available():
            self.running = profile(activities=[ProfilerActivity.CUDA])
            self.running.start()
            torch.cuda.synchronize()
            self.began = time.perf_counter()
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.running is not None:
            launched_ms = 1000 * (time.perf_counter() - self.began)
            torch.cuda.synchronize()
            wall_ms = 1000 * (time.perf_counter() - self.began)
            self.running.stop()
            events = [event for event in self.running.events() if "CUDA" in str(event.device_type)]
            spans = [(event.name, event.time_range.start, event.time_range.end) for event in events]
            self.ms = ms_by_part(spans, wall_ms) | {"launched": launched_ms}
            self.lines, self.running = longest(spans), None
        return control


def ms_by_part(spans: Iterable[Span], wall_ms: float) -> dict[str, float]:
    """Summed durations by part; streams overlap, so that the sum may exceed the step. `collectives alone`:
    while no other kernel ran; `idle`: of `wall_ms`, while none did.
    """
    ms: dict[str, float] = {}
    listed = sorted(spans, key=lambda span: span[1])
    for name, start, end in listed:
        part = part_of(name)
        ms[part] = ms.get(part, 0.0) + (end - start) / 1000
    busy = _covered_ms(listed)
    others = _covered_ms([span for span in listed if part_of(span[0]) != "collectives"])
    return ms | {"collectives alone": busy - others, "idle": max(0.0, wall_ms - busy), "step": wall_ms}


def longest(spans: Iterable[Span]) -> list[str]:
    """The kernels, and the pairs of kernels with a gap between them, that took most of a step."""
    kernels, gaps = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    before, reached = "", float("inf")
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        short = re.sub(r"^void |<.*", "", name)[:NAME_LENGTH]
        kernels[short].append(end - start)
        if start > reached:
            gaps[f"{before} .. {short}"].append(start - reached)
        if end > reached or not before:
            before, reached = short, end
    return [
        f"{what} {sum(values) / 1000:9.2f} ms {len(values):6} x {name}"
        for what, found in (("kernel", kernels), ("gap   ", gaps))
        for name, values in sorted(found.items(), key=lambda item: -sum(item[1]))[:NUM_SHOWN]
    ]


def part_of(kernel: str) -> str:
    """The part of a step that a kernel of this name belongs to."""
    found = (part for part, pattern in PARTS if re.search(pattern, kernel, re.IGNORECASE))
    return next(found, "other")


def _covered_ms(spans: list[Span]) -> float:
    """Length of the union of spans in the order of their starts."""
    covered, reached = 0.0, float("-inf")
    for _, start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / 1000
