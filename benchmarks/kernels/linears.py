"""The linears of a decoding step on a GPU: share of the read-only stream, against cuBLAS.

    python -m benchmarks.linears [rows=1,7,16,28] [model=qwen3-8b] [rounds=7] [record=true] [results=DIR]

It needs a GPU. One process measures the stream, then every arm as a replayed graph over copies of the weight
that exceed the L2 cache: `linear` with the launch that the engine chooses, `fixed` with that of deterministic
mode. Gate: at most 1.5 times the error of cuBLAS against fp64.
R rows, D input width, E output width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.models import MODELS
from benchmarks.shared import Report, defaults, numbers, parse_options, start
from benchmarks.stream import Timer
from idlm.kernels.linear import check_rows_agree, linear, linear_swiglu
from idlm.kernels.linear.launch import (
    LinearLaunch,
    Workspace,
    few_rows_launch,
    fixed_launch,
    make_workspace,
    with_pdl,
)

BF16 = torch.bfloat16
ROTATED_BYTES = 400 << 20
FIXED_ROWS = (1, 7, 64, 112, 448, 2048)
CHECKED_OUTPUTS = 1024
DEFAULTS = defaults("rows=1,7,16,28 model=qwen3-8b rounds=7 record=true")


@dataclass(slots=True)
class Bench:
    """Measured rate, shapes (E, D, gated) of the projections by name, and the rows."""

    timer: Timer
    shapes: dict[str, tuple[int, int, bool]]
    workspace: Workspace
    report: Report

    def compare(self, op: str, name: str, rows: int, weights: Sequence[Tensor], launch: LinearLaunch) -> None:
        """Time our launch and cuBLAS in turns, and check ours on the first copy."""
        gated, space = self.shapes[name][2], self.workspace
        x_RD = torch.randn(rows, weights[0].shape[1], device="cuda", dtype=BF16)
        us = self.timer.us_per_call([partial(_call, each, launch, gated, space, x_RD) for each in weights])
        baseline = self.timer.us_per_call([partial(F.linear, x_RD, each) for each in weights])
        self.report.add(
            {"op": op, "shape": name, "rows": rows},
            "us",
            us,
            "us",
            baseline=baseline,
            floor=weights[0].nbytes / self.timer.bytes_per_us,
            gate_passed=_is_right(weights[0], launch, gated, space, x_RD),
        )


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="linears")
    torch.manual_seed(0)
    bench = Bench(
        timer=Timer(rounds=int(options["rounds"])),
        shapes=shapes_of(MODELS[options["model"]]),
        workspace=make_workspace(torch.device("cuda"), num_floats=1 << 25, num_tiles=1 << 15),
        report=Report("linears", options),
    )
    agrees = check_rows_agree(torch.device("cuda"), BF16)
    print(f"rows agree: {agrees}", flush=True)
    for name, (E, D, gated) in bench.shapes.items():
        height = 2 * E if gated else E
        num_copies = max(1, -(-ROTATED_BYTES // (height * D * 2)))
        plain = [torch.randn(height, D, device="cuda", dtype=BF16) * D**-0.5 for _ in range(num_copies)]
        for rows in numbers(options["rows"]):
            launch = few_rows_launch(rows, E, D, BF16, gated=gated)
            if launch is not None:
                bench.compare("linear", name, rows, plain, with_pdl(launch, True))
        for rows in FIXED_ROWS if name != "head" else ():
            launch = with_pdl(fixed_launch(rows, E, D, BF16, gated=gated), True)
            bench.compare("fixed", name, rows, plain, launch)
    return bench.report.status or int(not agrees)


def shapes_of(model: dict[str, Any]) -> dict[str, tuple[int, int, bool]]:
    """(E, D, gated) of each projection; gate_up includes its SwiGLU."""
    width, head_dim = model["hidden_size"], model["head_dim"]
    o_width = model["num_attention_heads"] * head_dim
    return {
        "qkv": (o_width + 2 * model["num_key_value_heads"] * head_dim, width, False),
        "o": (width, o_width, False),
        "gate_up": (model["intermediate_size"], width, True),
        "down": (width, model["intermediate_size"], False),
        "head": (model["vocab_size"], width, False),
    }


def _call(weight: Tensor, launch: LinearLaunch, gated: bool, space: Workspace, x_RD: Tensor) -> Tensor:
    op = linear_swiglu if gated else linear
    return op(x_RD, weight, launch=launch, workspace=space)


def _is_right(weight: Tensor, launch: LinearLaunch, gated: bool, space: Workspace, x_RD: Tensor) -> bool:
    """Whether the error against fp64 is at most 1.5 times that of torch, on the first and last outputs."""
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    picked = torch.arange(outputs, device="cuda")
    if outputs > 2 * CHECKED_OUTPUTS:
        picked = torch.cat((picked[:CHECKED_OUTPUTS], picked[-CHECKED_OUTPUTS:]))
    height = torch.cat((picked, outputs + picked)) if gated else picked
    few = weight[height]
    true = x_RD.double() @ few.double().T
    plain = F.linear(x_RD, few)
    if gated:
        (gate, up), (plain_gate, plain_up) = true.chunk(2, -1), plain.chunk(2, -1)
        true, plain = gate * torch.sigmoid(gate) * up, F.silu(plain_gate) * plain_up
    ours = _call(weight, launch, gated, space, x_RD)[:, picked]
    return bool((ours.double() - true).norm() <= 1.5 * (plain.double() - true).norm())


if __name__ == "__main__":
    start(measure, __doc__)
