"""Few-query paged attention: our kernel, torch and FlashAttention against a read-only stream.

    python -m benchmarks.attention [record=true] [batches=1,16,64] [contexts=1024,8192,32768]

Checks every arm against float64 first. One CUDA graph runs an arm over as many layers as outgrow the L2 cache
several times, so keys and values come from memory as in a model; medians, the arms of a case in turns.
A norm runs between two layers (attention_step.py), and its own time is subtracted. "pdl": programmatic
dependent launch. The stream is a sum over 4 GiB, measured in the same process. `rows=2048` is a chunk of a
prompt. It needs a GPU. A library that is absent or fails is named with the reason; "flash_attn 4" is
FlashAttention 4 (pip install -e '.[flash-attn]'), which on Hopper does not split the cache of a sequence over
programs. R rows of this pass, N query heads, K KV heads, H head dim, S physical KV slots, B sequences."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.attention_step import (
    BRANCH_ROWS,
    ERROR_LIMIT,
    Attend,
    Step,
    attention_layers,
    error_of,
    launch_of,
    layer_seconds,
    layers,
    make_step,
)
from benchmarks.shared import Report, defaults, numbers, parse_options, print_absent, run_arms, start
from benchmarks.stream import captured, measure_rates
from idlm.kernels.paged_attention import AttentionRows, HeadShape

DEFAULTS = defaults(
    "batches=1,4,16,64 contexts=1024,4096,8192,32768 rows=1,7,15,16 heads=32,8,128 page_size=16 "
    "rounds=9 record=false"
)
CHECKED_SEQUENCES = 2
OURS = ("triton", "fixed", "torch")


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="attention")
    rate, report, absent = measure_rates().stream, Report("attention", options), dict[str, str]()
    for batch in numbers(options["batches"]):
        for context in numbers(options["contexts"]):
            times: dict[int, float] = {}
            for num_rows in numbers(options["rows"]):
                case = {"batch": batch, "context": context, "rows": num_rows}
                step = make_step(options, batch=batch, context=context, rows=num_rows)
                if step is not None:
                    seconds = _measure_case(report, case, step, absent, rate)
                    times[num_rows] = seconds["triton pdl"]
            if 1 in times and 15 in times:
                where = {"batch": batch, "context": context}
                report.add(where, "rows15_over_rows1", times[15] / times[1], "x")
    print_absent(absent)
    return 0


def _arms(step: Step, absent: dict[str, str]) -> dict[str, Attend]:
    """The arms of a case; `absent` gets the reason for each library that cannot serve it."""
    launches = {name: launch_of(step, fixed=name == "fixed") for name in ("triton", "fixed")}
    arms = {}
    for name, launch in launches.items():
        arms[name] = attention_layers(step, "triton", launch=launch)
        arms[name + " pdl"] = attention_layers(step, "triton", launch=replace(launch, pdl=True))
    arms["torch"] = attention_layers(step, "torch")
    if step.rows.max_rows != BRANCH_ROWS:
        if obstacle := flash_obstacle(step.shape):
            absent["flash_attn 4"] = obstacle
        else:
            attend = flash_attend(step.rows, step.scale)
            arms["flash_attn 4"] = layers(step, lambda q, k, v, lists: attend(q, k, v))
    return arms


def _measure_case(
    report: Report, case: dict[str, int], step: Step, absent: dict[str, str], rate: float
) -> dict[str, float]:
    """Share of the stream of every arm; gate: twice torch's own error. Returns the seconds of a layer."""
    arms = _arms(step, absent)

    def checked(attend: Attend) -> float:
        captured(attend)
        return error_of(step, attend, range(min(CHECKED_SEQUENCES, case["batch"])))

    required = {name for name in arms if name.startswith(OURS)}
    errors = run_arms(arms, checked, required=required, absent=absent)
    rounds = int(report.options["rounds"])
    seconds = layer_seconds({name: (step, arms[name], "pdl" in name) for name in errors}, rounds)
    floor = step.layer_bytes / rate
    for arm, error in errors.items():
        share = floor / seconds[arm]
        report.add({**case, "arm": arm}, "share_of_stream", share, "share", gate_passed=error <= ERROR_LIMIT)
    return seconds


CAPABILITIES = (9, 10, 11)
"""Major compute capabilities whose kernels take pages."""
MAX_HEAD_DIM = 128
"""With larger heads a block has fewer slots than the threads that look up their pages."""


def flash_obstacle(shape: HeadShape) -> str:
    """Why FlashAttention 4 cannot run here; empty if it can. It serves rows that see exactly the slots up to
    their own."""
    if any(importlib.util.find_spec(name) is None for name in ("flash_attn", "flash_attn.cute")):
        return "flash-attn-4 is not installed (pip install -e '.[flash-attn]')"
    if shape.head_dim > MAX_HEAD_DIM:
        return f"flash-attn-4 takes pages with head dims up to {MAX_HEAD_DIM}, got {shape.head_dim}"
    major = torch.cuda.get_device_capability()[0]
    if major not in CAPABILITIES:
        return f"flash-attn-4 takes pages on compute capability 9 to 11, got {major}"
    return ""


def flash_attend(rows: AttentionRows, scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of q [R, N, H] and the caches [S, K, H] that returns the output [R, N, H].

    Computes lengths on the device, without waiting for it."""
    attention: Callable[..., Any] = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    num_slots_B = torch.where(rows.cu_rows.diff() > 0, rows.own_slots_R[rows.cu_rows[1:] - 1] + 1, 0).int()
    cu_rows, block_table = rows.cu_rows.int(), rows.block_table.int()

    def attend(q_RNH: Tensor, k_cache_SKH: Tensor, v_cache_SKH: Tensor) -> Tensor:
        caches = (cache.view(-1, rows.page_size, *cache.shape[1:]) for cache in (k_cache_SKH, v_cache_SKH))
        result = attention(
            q_RNH,
            *caches,
            cu_seqlens_q=cu_rows,
            max_seqlen_q=rows.max_rows,
            softmax_scale=scale,
            causal=True,
            seqused_k=num_slots_B,
            page_table=block_table,
            max_seqlen_k=rows.max_slots,
        )
        o_RNH: Tensor = result[0] if isinstance(result, tuple) else result
        return o_RNH

    return attend


if __name__ == "__main__":
    start(measure, __doc__)
