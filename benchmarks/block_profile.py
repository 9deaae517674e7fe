"""Where the time of a pass goes: kernels by name and by kind, beside what FLOPs and bytes say it should be.

R rows laid out, X rows whose logits are wanted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.block_harness import BlockSeats
from benchmarks.decode_harness import slot_bytes, weights_of
from idlm.infer.models.loader import LoadedModel

KINDS = (
    ("attention", r"attend_kernel|combine_kernel|tile_kernel|item_kernel"),
    ("norms", r"norm"),
    ("rope", r"rope"),
    ("swiglu", r"swiglu"),
    ("sampling", r"stats_kernel|law_kernel|draw|judge|probability|uniforms|softmax|Entr"),
    ("rows", r"pack_|map_slots|commit|unmask|choose"),
    ("linears", r"gemm|cutlass|nvjet|cublas|splitK|split_kernel|linear|mm\b|addmm"),
)
"""The first that matches a kernel's name; what matches none is `small`."""
NUM_SHOWN = 40
NAME_WIDTH = 76


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs of one pass. `row_flops`, `head_flops`: of the linears, per row and per row with logits."""

    row_flops: float
    head_flops: float
    attention_flops: float
    kv_bytes: float

    def linears(self, num_rows: float, num_head_rows: float) -> float:
        """Of all linears."""
        return self.row_flops * num_rows + self.head_flops * num_head_rows


def work_of(model: LoadedModel, *, num_sequences: int, rows: float, slots: float) -> Work:
    """Of a pass over `rows` rows that see `slots` slots each."""
    *weights, head = weights_of(model)
    spec = model.local
    return Work(
        row_flops=2.0 * sum(weight.numel() for weight in weights),
        head_flops=2.0 * head.numel(),
        attention_flops=4.0 * spec.num_layers * spec.num_heads * spec.head_dim * rows * slots,
        kv_bytes=float(num_sequences * slots * slot_bytes(model)),
    )


def expected_ms(
    model: LoadedModel, work: Work, *, num_rows: int, num_head_rows: int, stream: float, rate: float
) -> dict[str, float]:
    """Per kind of kernel, at the measured rates, by arithmetic or bytes, whichever takes longer. `num_rows`:
    laid out, padding included, which linears and small kernels compute and attention does not.
    """
    spec, item = model.local, model.dtype.itemsize
    row_bytes = {
        # Two norms a layer: input, residual in and out, output.
        "norms": 8 * spec.width * spec.num_layers,
        "rope": 2 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * spec.num_layers,
        "swiglu": 3 * spec.ffn_width * spec.num_layers,
    }
    weight_bytes = sum(weight.numel() for weight in weights_of(model)) * item
    flops = work.linears(num_rows, num_head_rows)
    return {
        "linears": 1e3 * max(flops / rate, weight_bytes / stream),
        "attention": 1e3 * max(work.attention_flops / rate, work.kv_bytes / stream),
        **{name: 1e3 * num_rows * size * item / stream for name, size in row_bytes.items()},
        "sampling": 1e3 * num_head_rows * spec.vocab_size * item / stream,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Per pass."""

    name: str
    ms: float
    calls: float

    @property
    def kind(self) -> str:
        """By `KINDS`."""
        return next((kind for kind, pattern in KINDS if re.search(pattern, self.name)), "small")


def profiled(seats: BlockSeats, num_passes: int) -> list[KernelTime]:
    """Kernels (on a CPU: operations) of so many passes in steady decoding, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    is_cuda = seats.engine.table.device.type == "cuda"
    with seats._toggles():
        seats.settle()
        activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
        with profile(activities=[activity]) as record:
            seats.run_passes(num_passes)
            seats.drain()
            if is_cuda:
                torch.cuda.synchronize()
        seats.leave()
    found = [_time(event, num_passes, is_cuda) for event in record.key_averages()]
    return sorted((time for time in found if time.ms > 0), key=lambda time: -time.ms)


def _time(event: Any, num_passes: int, is_cuda: bool) -> KernelTime:
    us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
    return KernelTime(name=event.key, ms=us / 1e3 / num_passes, calls=event.count / num_passes)


def lines_of(times: list[KernelTime], expected: Mapping[str, float]) -> list[str]:
    """A line per kind, with what it should take, then one per kernel."""
    lines = [f"    {'kind':<12s} {'ms/pass':>9s} {'calls':>7s} {'expected':>9s}"]
    kinds = {kind: [time for time in times if time.kind == kind] for kind in _kinds(times)}
    for kind, members in kinds.items():
        ms, calls = sum(time.ms for time in members), sum(time.calls for time in members)
        told = f"{expected[kind]:9.3f}" if kind in expected else ""
        lines.append(f"    {kind:<12s} {ms:9.3f} {calls:7.1f} {told}")
    lines.append(f"    {'all':<12s} {sum(time.ms for time in times):9.3f}")
    for time in times[:NUM_SHOWN]:
        lines.append(f"      {time.ms:9.4f} {time.calls:7.1f}  {time.kind:<10s} {time.name[:NAME_WIDTH]}")
    return lines


def _kinds(times: list[KernelTime]) -> list[str]:
    return list(dict.fromkeys(time.kind for time in times))
