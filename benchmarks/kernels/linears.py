"""The trunk's linears and small ops on a GPU: share of the read-only stream, against cuBLAS and plain torch.

    python -m benchmarks.linears [rows=1,7,16,28,64,112] [parts=gemm,fixed,fp8,small,step] [sweep=short|full]
                                 [model=qwen3-8b] [rounds=7] [record=true] [results=DIR]

One process measures the stream, then every arm as a replayed graph over copies of the weight that exceed the
L2 cache. An arm with more than 1.5 times the error of cuBLAS against fp64 is shown as WRONG and never chosen.
`step` is the whole chain of a forward (36 layers and head, distinct weights) with the launches chosen before.
R rows, D input width, E output width, F ffn width.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.linears_launches import ROW_BUCKETS, Shape, shortlist
from benchmarks.kernels.linears_small import small_lines
from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows, result_row
from benchmarks.stream import Timer
from idlm.cli import command
from idlm.errors import UserError
from idlm.kernels.linear import (
    Fp8Weight,
    check_rows_agree,
    dequantised,
    linear,
    linear_swiglu,
    quantise_fp8,
)
from idlm.kernels.linear.launch import Launch, Workspace, fixed_launch, make_workspace, with_pdl

BF16 = torch.bfloat16
ROTATED_BYTES = 400 << 20
FIXED_ROWS = (1, 7, 64, 112, 448, 2048)
CHECKED_OUTPUTS = 1024
DEFAULTS = {
    "rows": "1,7,16,28,64,112",
    "parts": "gemm,fixed,fp8,small,step",
    "sweep": "short",
    "model": "qwen3-8b",
    "rounds": "7",
    "record": "true",
    "results": str(RESULTS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Widths of a dense model."""

    layers: int
    width: int
    qkv: int
    o_width: int
    ffn: int
    vocabulary: int

    def linears(self) -> dict[str, tuple[int, int, bool]]:
        """(E, D, gated) of each projection; gate_up includes its SwiGLU."""
        return {
            "qkv": (self.qkv, self.width, False),
            "o": (self.width, self.o_width, False),
            "gate_up": (self.ffn, self.width, True),
            "down": (self.width, self.ffn, False),
            "head": (self.vocabulary, self.width, False),
        }


MODELS = {
    "qwen3-8b": Model(layers=36, width=4096, qkv=6144, o_width=4096, ffn=12288, vocabulary=151_936),
    "qwen3-14b": Model(layers=40, width=5120, qkv=7168, o_width=5120, ffn=17408, vocabulary=151_936),
    "qwen3-32b": Model(layers=64, width=5120, qkv=10240, o_width=8192, ffn=25600, vocabulary=151_936),
    "qwen3-0.6b": Model(layers=28, width=1024, qkv=4096, o_width=2048, ffn=3072, vocabulary=151_936),
    "tiny": Model(layers=2, width=256, qkv=512, o_width=256, ffn=512, vocabulary=1000),
}


@dataclass(slots=True)
class Bench:
    """Options and measured rates of all parts; parts append to `table` and `rows`."""

    timer: Timer
    model: Model
    workspace: Workspace
    full: bool
    table: dict[tuple[str, int], Launch | None]
    rows: list[dict[str, Any]]
    lines: list[str]

    def note(
        self,
        case: dict[str, Any],
        us: float,
        *,
        baseline: float | None,
        num_bytes: float,
        gate: bool,
        exactness: str = "exact",
    ) -> None:
        """Record one time as a result row, with its baseline and the time to stream its bytes."""
        floor = num_bytes / self.timer.bytes_per_us
        row = result_row(
            "linears",
            case,
            "us",
            us,
            "us",
            baseline=baseline,
            floor=floor,
            gate_passed=gate,
            exactness=exactness,
        )
        self.rows.append(row)
        against = "" if baseline is None else f"{baseline:9.2f} {baseline / us:6.3f}x"
        name = " ".join(f"{value}" for value in case.values())
        verdict = "" if gate else "  WRONG"
        self.lines.append(f"{name:58s} {us:9.2f} us {floor / us:6.1%} of stream  {against}{verdict}")
        print(self.lines[-1], flush=True)


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Run the parts, print the table and record the rows; returns the exit status."""
    options = parse_options(arguments, DEFAULTS)
    if not torch.cuda.is_available():
        raise UserError("IDLM-0543", "no CUDA device", fix="run benchmarks.kernels.linears on a GPU")
    torch.manual_seed(0)
    rows_of = [int(rows) for rows in options["rows"].split(",")]
    parts = options["parts"].split(",")
    bench = Bench(
        timer=Timer(rounds=int(options["rounds"])),
        model=MODELS[options["model"]],
        workspace=make_workspace(torch.device("cuda"), num_floats=1 << 25, num_tiles=1 << 15),
        full=options["sweep"] == "full",
        table={},
        rows=[],
        lines=[],
    )
    print(f"read-only stream {bench.timer.bytes_per_us / 1e6:.3f} TB/s", flush=True)
    if {"gemm", "step"} & set(parts):
        for rows in rows_of:
            for name in bench.model.linears():
                _gemm(bench, name, rows)
    if "fixed" in parts:
        _fixed(bench)
    if "fp8" in parts:
        _fp8(bench, rows_of)
    if "small" in parts:
        small_lines(bench.timer, bench.model.width, bench.model.ffn, rows_of, bench.note)
    if "step" in parts:
        for rows in rows_of:
            _step(bench, rows)
    print("\nread-only stream", f"{bench.timer.bytes_per_us / 1e6:.3f} TB/s; time, share, baseline, ratio")
    print("\n".join(bench.lines))
    if options["record"] == "true":
        append_rows("linears", bench.rows, results=Path(options["results"]))
    return 0


def _weights(E: int, D: int, gated: bool) -> list[Tensor]:
    """Copies that together exceed the L2 cache several times."""
    height = 2 * E if gated else E
    copies = max(1, -(-ROTATED_BYTES // (height * D * 2)))
    return [torch.randn(height, D, device="cuda", dtype=BF16) * D**-0.5 for _ in range(copies)]


def _call(
    weight: Tensor | Fp8Weight, launch: Launch | None, gated: bool, space: Workspace, x_RD: Tensor
) -> Tensor:
    """Our call, or cuBLAS alone (without the SwiGLU, which favours cuBLAS)."""
    if launch is None:
        assert isinstance(weight, Tensor)
        return F.linear(x_RD, weight)
    op = linear_swiglu if gated else linear
    return op(x_RD, weight, launch=launch, workspace=space)


def _time(
    bench: Bench, weights: Sequence[Tensor | Fp8Weight], launch: Launch | None, gated: bool, x_RD: Tensor
) -> float:
    """Microseconds per call, over all copies of the weight."""
    calls = [partial(_call, weight, launch, gated, bench.workspace, x_RD) for weight in weights]
    return bench.timer.us_per_call(calls)


def _is_right(
    bench: Bench, weight: Tensor | Fp8Weight, launch: Launch | None, gated: bool, x_RD: Tensor
) -> bool:
    """Whether the error against fp64 is at most 1.5 times that of torch, on the first and last outputs."""
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    picked = torch.arange(outputs, device="cuda")
    if outputs > 2 * CHECKED_OUTPUTS:
        picked = torch.cat((picked[:CHECKED_OUTPUTS], picked[-CHECKED_OUTPUTS:]))
    height = torch.cat((picked, outputs + picked)) if gated else picked
    if isinstance(weight, Fp8Weight):
        few = dequantised(weight.values_ED[height], weight.scale_E[height])
    else:
        few = weight[height]
    true = x_RD.double() @ few.double().T
    plain = F.linear(x_RD, few.to(BF16))
    if gated:
        (gate, up), (plain_gate, plain_up) = true.chunk(2, -1), plain.chunk(2, -1)
        true, plain = gate * torch.sigmoid(gate) * up, F.silu(plain_gate) * plain_up
    ours = _call(weight, launch, gated, bench.workspace, x_RD)[:, picked]
    return bool((ours.double() - true).norm() <= 1.5 * (plain.double() - true).norm())


def _gemm(bench: Bench, name: str, rows: int) -> None:
    """Compare cuBLAS with every candidate; the fastest accurate one goes into the table."""
    E, D, gated = bench.model.linears()[name]
    if rows > ROW_BUCKETS[-1]:
        return
    weights = _weights(E, D, gated)
    x_RD = torch.randn(rows, D, device="cuda", dtype=BF16)
    num_bytes = weights[0].numel() * 2
    library = _time(bench, weights, None, gated, x_RD)
    times: dict[Launch, float] = {}
    for launch in shortlist(Shape(rows=rows, E=E, D=D, gated=gated), full=bench.full):
        if not _is_right(bench, weights[0], launch, gated, x_RD):
            bench.lines.append(f"WRONG {name} {rows} {launch}")
            print(bench.lines[-1], flush=True)
            continue
        times[launch] = _time(bench, weights, launch, gated, x_RD)
    ranked = sorted(times, key=times.__getitem__)
    for launch in ranked[:3]:
        print(f"    {times[launch]:8.2f} us {launch}", flush=True)
    if not ranked:
        return
    best = ranked[0]
    bench.table[name, rows] = best if times[best] < 0.98 * library else None
    case = {"op": "linear", "shape": name, "rows": rows, "launch": _short(best)}
    bench.note(case, times[best], baseline=library, num_bytes=num_bytes, gate=True)


def _short(launch: Launch) -> str:
    """A launch in a few letters."""
    tile = f"{launch.block_e}x{launch.block_r}x{launch.block_d}"
    wait = "p" if launch.pdl else "-"
    return f"{tile}/s{launch.splits}w{launch.warps}g{launch.stages}{wait}"


def _fixed(bench: Bench) -> None:
    """Compare deterministic mode with cuBLAS, from one row to a chunk of a prompt."""
    agrees = check_rows_agree(torch.device("cuda"), BF16)
    for name, (E, D, gated) in bench.model.linears().items():
        if name == "head":
            continue
        weights = _weights(E, D, gated)
        for rows in FIXED_ROWS:
            x_RD = torch.randn(rows, D, device="cuda", dtype=BF16)
            launch = with_pdl(fixed_launch(rows, E, D, BF16, gated=gated), True)
            agrees = agrees and _is_right(bench, weights[0], launch, gated, x_RD)
            times = [_time(bench, weights, choice, gated, x_RD) for choice in (launch, None)]
            case = {"op": "fixed", "shape": name, "rows": rows}
            num_bytes = weights[0].numel() * 2
            bench.note(case, times[0], baseline=times[1], num_bytes=num_bytes, gate=agrees)


def _fp8(bench: Bench, rows_of: list[int]) -> None:
    """Compare fp8 weights with bf16 cuBLAS; bytes are those of fp8."""
    for name, (E, D, gated) in bench.model.linears().items():
        weights = _weights(E, D, gated)
        small = [quantise_fp8(weight) for weight in weights[: 8 if name != "head" else 1]]
        for rows in rows_of:
            if rows > 64:
                continue
            x_RD = torch.randn(rows, D, device="cuda", dtype=BF16)
            shape = Shape(rows=rows, E=E, D=D, gated=gated, is_fp8=True)
            times: dict[Launch, float] = {}
            for launch in shortlist(shape, full=bench.full)[:6]:
                if _is_right(bench, small[0], launch, gated, x_RD):
                    times[launch] = _time(bench, small, launch, gated, x_RD)
            library = _time(bench, weights, None, gated, x_RD)
            if times:
                best = min(times, key=times.__getitem__)
                case = {"op": "fp8", "shape": name, "rows": rows, "launch": _short(best)}
                size = small[0].values_ED.numel()
                bench.note(case, times[best], baseline=library, num_bytes=size, gate=True, exactness="lossy")


def _step(bench: Bench, rows: int) -> None:
    """Measure all linears of a forward: cuBLAS, and ours by the table with and without PDL."""
    model = bench.model
    shapes = model.linears()
    layers = [
        [
            torch.randn(2 * E if gated else E, D, device="cuda", dtype=BF16) * D**-0.5
            for name, (E, D, gated) in shapes.items()
            if name != "head"
        ]
        for _ in range(model.layers)
    ]
    head = torch.randn(model.vocabulary, model.width, device="cuda", dtype=BF16) * model.width**-0.5
    x_RD = torch.randn(rows, model.width, device="cuda", dtype=BF16)
    o_RD = torch.randn(rows, model.o_width, device="cuda", dtype=BF16)
    act_RF = torch.randn(rows, model.ffn, device="cuda", dtype=BF16)
    picked = {name: bench.table.get((name, rows)) for name in shapes}
    space = bench.workspace

    def library() -> None:
        for qkv, o, gate_up, down in layers:
            F.linear(x_RD, qkv), F.linear(o_RD, o), F.linear(x_RD, gate_up), F.linear(act_RF, down)
        F.linear(x_RD, head)

    def ours(pdl: bool) -> None:
        best = {name: None if launch is None else with_pdl(launch, pdl) for name, launch in picked.items()}
        for qkv, o, gate_up, down in layers:
            linear(x_RD, qkv, launch=best["qkv"], workspace=space)
            hidden_RD = linear(o_RD, o, launch=best["o"], workspace=space)
            act = linear_swiglu(hidden_RD, gate_up, launch=best["gate_up"], workspace=space)
            linear(act, down, launch=best["down"], workspace=space)
        linear(x_RD, head, launch=best["head"], workspace=space)

    num_bytes = 2 * (sum(weight.numel() for layer in layers for weight in layer) + head.numel())
    baseline = bench.timer.us_per_call([library])
    for pdl in (False, True):
        us = bench.timer.us_per_call([partial(ours, pdl)])
        case = {"op": "step_linears", "model_rows": rows, "pdl": pdl}
        bench.note(case, us, baseline=baseline, num_bytes=num_bytes, gate=True)


if __name__ == "__main__":
    sys.exit(main())
