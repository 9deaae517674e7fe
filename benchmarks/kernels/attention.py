"""Few-query paged attention: our kernel, torch and FlashAttention against a read-only stream.

    python -m benchmarks.attention [record=true] [batches=1,16,64] [contexts=1024,8192,32768]

Checks every arm against float64 first. One CUDA graph runs an arm over as many layers as outgrow the L2 cache
several times, so keys and values come from memory as in a model; medians, the arms of a case in turns.
A norm runs between two layers (attention_step.py), and its own time is subtracted. "pdl": programmatic
dependent launch. The stream is a sum over 4 GiB, measured in the same process. `rows=2048` is a chunk of a
prompt. It needs a GPU. A library that is absent or fails is named with the reason; "flash_attn 4" is
FlashAttention 4 (pip install -e '.[flash-attn]').
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels import flash_attention
from benchmarks.kernels.attention_step import (
    Attend,
    Step,
    attention_layers,
    captured,
    launch_of,
    layers,
    make_step,
    norms_alone,
    time_in_turns,
)
from benchmarks.results import result_row
from benchmarks.shared import defaults, numbers, parse_options, print_absent, run_arms, save, start
from benchmarks.stream import stream_rate

DEFAULTS = defaults(
    "batches=1,4,16,64 contexts=1024,4096,8192,32768 rows=1,7,15,16 heads=32,8,128 page_size=16 "
    "rounds=9  libraries=true record=false "
    "compile_part="
)
CHECKED_SEQUENCES = 2
OURS = ("triton", "fixed", "torch")


def measure(arguments: list[str]) -> int:
    """Print and optionally record all cases."""
    options = parse_options(arguments, DEFAULTS, needs_gpu="attention")
    rate = stream_rate()
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    absent: dict[str, str] = {}
    for batch in numbers(options["batches"]):
        for context in numbers(options["contexts"]):
            times: dict[int, float] = {}
            for num_rows in numbers(options["rows"]):
                case = {"batch": batch, "context": context, "rows": num_rows}
                step = make_step(options, **case)
                if step is None:
                    continue
                arms, reasons = _arms(step, libraries=options["libraries"] == "true")
                outcome = _measure_case(step, arms, reasons, int(options["rounds"]))
                absent |= reasons
                times[num_rows] = outcome["triton pdl"][0]
                rows += _rows(case, outcome, step.layer_bytes / rate)
                lines += _lines(case, outcome, step.layer_bytes / rate)
            if 1 in times and 15 in times:
                ratio = times[15] / times[1]
                where = {"batch": batch, "context": context}
                rows.append(result_row("attention", where, "rows15_over_rows1", ratio, "x"))
                lines.append(f"{batch:>5} {context:>7}  15 rows take {ratio:.3f} of the time of 1")
    print(f"\nread-only stream {rate / 1e12:.3f} TB/s")
    print(f"{'batch':>5} {'context':>7} {'rows':>4} {'arm':>12} {'us':>9} {'share of stream':>16}  error/own")
    print("\n".join(lines))
    print_absent(absent)
    save("attention", rows, options)
    return 0


def _arms(step: Step, *, libraries: bool) -> tuple[dict[str, Attend], dict[str, str]]:
    """The arms of a case, and the reason for each library that cannot serve it."""
    reasons = {}
    launches = {name: launch_of(step, fixed=name.startswith("fixed")) for name in ("triton", "fixed")}
    arms = {}
    for name, launch in launches.items():
        arms[name] = attention_layers(step, "triton", launch=launch)
        arms[name + " pdl"] = attention_layers(step, "triton", launch=replace(launch, pdl=True))
    arms["torch"] = attention_layers(step, "torch")
    if libraries and step.is_causal:
        where: dict[str, Any] = {"page_size": step.rows.page_size, "device": torch.device("cuda")}
        version = flash_attention.version(step.shape, **where)
        if version is None:
            reasons["flash_attn"] = "; ".join(flash_attention.obstacles(step.shape, **where).values())
        else:
            attend = flash_attention.make_attend(step.rows, version, step.scale)
            arms[f"flash_attn {version}"] = layers(step, attend)
    return arms, reasons


def _dense(step: Step, dtype: torch.dtype) -> Tensor:
    """The first sequences of the first layer by torch, in `dtype`."""
    rows, outputs = step.rows, []
    for b in range(min(CHECKED_SEQUENCES, len(rows.cu_rows) - 1)):
        fed = slice(int(rows.cu_rows[b]), int(rows.cu_rows[b + 1]))
        slots_S = torch.arange(rows.max_slots, device="cuda")
        physical_S = rows.block_table[b, slots_S // rows.page_size] * rows.page_size
        physical_S += slots_S % rows.page_size
        own, limits, starts = (
            row[fed, None] for row in (rows.own_slots_R, rows.limits_R, rows.branch_starts_R)
        )
        mask = (slots_S < limits) | ((slots_S >= starts) & (slots_S <= own))
        q, k, v = (
            tensor.to(dtype).transpose(0, 1)[None]
            for tensor in (step.q_RNH[fed], step.keys[0][physical_S], step.values[0][physical_S])
        )
        k, v = (tensor.repeat_interleave(step.shape.group, dim=1) for tensor in (k, v))
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=step.scale)
        outputs.append(o[0].transpose(0, 1))
    return torch.cat(outputs)


def _error(step: Step, attend: Attend) -> float:
    """Largest error of the checked sequences against float64, divided by that of torch in bfloat16."""
    truth, own = _dense(step, torch.float64), _dense(step, torch.bfloat16)
    mine = attend()[0][: len(truth)]
    floor = torch.finfo(torch.bfloat16).eps / 2 * truth.abs().max()
    return float((mine - truth).abs().max() / torch.maximum((own - truth).abs().max(), floor))


def _measure_case(
    step: Step, arms: dict[str, Attend], absent: dict[str, str], rounds: int
) -> dict[str, tuple[float, float]]:
    """Per arm the seconds of one layer and the error relative to torch's."""
    norms = {"norms": norms_alone(step, pdl=False), "norms pdl": norms_alone(step, pdl=True)}

    def checked_and_captured(attend: Attend) -> tuple[float, torch.cuda.CUDAGraph]:
        return _error(step, attend), captured(attend)

    required = {name for name in arms if name.startswith(OURS)}
    ready = run_arms(arms, checked_and_captured, required=required, absent=absent)
    graphs = {name: graph for name, (_, graph) in ready.items()}
    graphs |= {name: captured(attend) for name, attend in norms.items()}
    seconds = time_in_turns(graphs, rounds)
    return {
        name: ((seconds[name] - seconds["norms pdl" if "pdl" in name else "norms"]) / len(step.keys), error)
        for name, (error, _) in ready.items()
    }


def _rows(
    case: dict[str, Any], outcome: dict[str, tuple[float, float]], floor: float
) -> list[dict[str, Any]]:
    """Share of the stream and microseconds of every arm; gate: twice torch's own error."""
    rows = []
    for arm, (seconds, error) in outcome.items():
        where = case | {"arm": arm}
        baseline = outcome["torch"][0]
        rows += [
            result_row(
                "attention", where, "share_of_stream", floor / seconds, "share", gate_passed=error <= 2
            ),
            result_row(
                "attention",
                where,
                "us",
                seconds * 1e6,
                "us",
                baseline=baseline * 1e6,
                floor=floor * 1e6,
                gate_passed=error <= 2,
            ),
        ]
    return rows


def _lines(case: dict[str, Any], outcome: dict[str, tuple[float, float]], floor: float) -> list[str]:
    where = f"{case['batch']:>5} {case['context']:>7} {case['rows']:>4}"
    return [
        f"{where} {arm:>12} {seconds * 1e6:>9.2f} {floor / seconds:>16.3f}  {error:.2f}"
        + ("" if error <= 2 else "  WRONG")
        for arm, (seconds, error) in outcome.items()
    ]


if __name__ == "__main__":
    start(measure, __doc__)
