"""Few-query paged attention: our kernel, torch and installed libraries against a read-only stream.

    python -m benchmarks.attention [record=true] [sweep=true] [batches=1,16,64] [contexts=1024,8192,32768]

Checks every arm against float64 first. One CUDA graph runs an arm over as many layers as outgrow the L2 cache
several times, so keys and values come from memory as in a model; medians, the arms of a case in turns. The
stream is a sum over 4 GiB, measured in the same process. `sweep=true` also tries launch parameters one by
one; it compiles them first, in as many processes as there are cores. `rows=2048` is a chunk of a prompt.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.options import parse_options
from benchmarks.results import append_rows, result_row
from benchmarks.stream import stream_rate
from idlm import command
from idlm.errors import UserError
from idlm.kernels.paged_attention import (
    BACKENDS,
    AttentionRows,
    HeadShape,
    paged_attention,
    plan_attention,
    problems,
)

DEFAULTS = {
    "batches": "1,4,16,64",
    "contexts": "1024,4096,8192,32768",
    "rows": "1,7,15,16",
    "heads": "32,8,128",
    "page_size": "16",
    "rounds": "9",
    "sweep": "false",
    "libraries": "true",
    "record": "false",
    "compile_part": "",
}
BRANCH_ROWS = 16
COLD_BYTES = 1 << 28
"""Keys and values of all layers of a graph; five times the L2 cache of an H200."""
MOST_BYTES = 48 << 30
CHECKED_SEQUENCES = 2
SWEPT: dict[str, tuple[Any, ...]] = {
    "block_m": (16, 32, 64, 128),
    "block_n": (32, 64, 128),
    "stages": (2, 3, 4),
    "warps": (4, 8),
    "programs_per_sm": (1, 2, 3, 4),
    "min_blocks": (1, 2, 4),
    "combine": ("kernel", "last"),
    "combine_rows": (1, 4, 16),
    "pdl": (False, True),
}
Attend = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Queries, rows and the caches of all layers of one case."""

    shape: HeadShape
    rows: AttentionRows
    q_RNH: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    is_causal: bool

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    @property
    def layer_bytes(self) -> int:
        """What one layer must read at least: keys and values of all slots, once."""
        num_slots = int(self.rows.own_slots_R[self.rows.cu_rows[1:] - 1].sum()) + len(self.rows.cu_rows) - 1
        return 2 * num_slots * self.shape.num_kv_heads * self.shape.head_dim * self.q_RNH.element_size()


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Print and optionally record all cases."""
    options = parse_options(arguments, DEFAULTS)
    if not torch.cuda.is_available():
        raise UserError("IDLM-0543", "no CUDA device", fix="run benchmarks.attention on a GPU")
    if options["compile_part"]:
        return _compile(options)
    if options["sweep"] == "true":
        _compile_everything(arguments)
    rate = stream_rate()
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for batch in _numbers(options["batches"]):
        for context in _numbers(options["contexts"]):
            times: dict[int, float] = {}
            for num_rows in _numbers(options["rows"]):
                case = {"batch": batch, "context": context, "rows": num_rows}
                step = make_step(options, **case)
                if step is None:
                    continue
                outcome = _measure_case(step, int(options["rounds"]), options["libraries"] == "true")
                times[num_rows] = outcome["triton"][0]
                rows += _rows(case, outcome, step.layer_bytes / rate)
                lines += _lines(case, outcome, step.layer_bytes / rate)
                if options["sweep"] == "true":
                    _sweep(case, step, int(options["rounds"]))
            if 1 in times and 15 in times:
                ratio = times[15] / times[1]
                where = {"batch": batch, "context": context}
                rows.append(result_row("attention", where, "rows15_over_rows1", ratio, "x"))
                lines.append(f"{batch:>5} {context:>7}  15 rows take {ratio:.3f} of the time of 1")
    print(f"\nread-only stream {rate / 1e12:.3f} TB/s")
    print(f"{'batch':>5} {'context':>7} {'rows':>4} {'arm':>10} {'us':>9} {'share of stream':>16}  error/own")
    print("\n".join(lines))
    if options["record"] == "true":
        append_rows("attention", rows)
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def make_step(options: dict[str, str], *, batch: int, context: int, rows: int) -> Step | None:
    """`batch` sequences of `context` slots, the last `rows` of which are fed; None if it does not fit."""
    num_heads, num_kv_heads, head_dim = _numbers(options["heads"])
    shape = HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
    page_size = int(options["page_size"])
    num_pages = -(-context // page_size)
    slot_bytes = 2 * num_kv_heads * head_dim * 2
    layer_bytes = batch * num_pages * page_size * slot_bytes
    num_layers = min(64, max(2, -(-COLD_BYTES // layer_bytes)))
    if num_layers * layer_bytes > MOST_BYTES:
        return None
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda", dtype=torch.bfloat16)

    num_slots = batch * num_pages * page_size
    own = torch.arange(context - rows, context, device="cuda").repeat(batch)
    limits, branches = own + 1, own + 1
    if rows == BRANCH_ROWS:
        picture = _branch_picture(device="cuda")
        limits = context - rows + picture[0].repeat(batch)
        branches = context - rows + picture[1].repeat(batch)
    pages = torch.randperm(batch * num_pages, generator=generator, device="cuda")
    return Step(
        shape=shape,
        rows=AttentionRows(
            cu_rows=torch.arange(batch + 1, device="cuda") * rows,
            block_table=pages.view(batch, num_pages),
            page_size=page_size,
            own_slots_R=own,
            limits_R=limits,
            branch_starts_R=branches,
            max_rows=rows,
            max_slots=context,
        ),
        q_RNH=draw(batch * rows, num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads],
        keys=[draw(num_slots, num_kv_heads, head_dim) for _ in range(num_layers)],
        values=[draw(num_slots, num_kv_heads, head_dim) for _ in range(num_layers)],
        is_causal=rows != BRANCH_ROWS,
    )


def _branch_picture(device: str) -> Tensor:
    """Limits and branch starts of `[pending, d, d, d]` and a group of three masks on each of them."""
    limits = [1, 2, 3, 4] + [g + 1 for g in range(4) for _ in range(3)]
    starts = [1, 2, 3, 4] + [4 + 3 * g for g in range(4) for _ in range(3)]
    return torch.tensor([limits, starts], device=device)


def _attend(step: Step, backend: str, *, deterministic: bool = False, launch: Any = None) -> Attend:
    """All layers of one step with one plan, which is made once."""
    plan = plan_attention(
        step.rows,
        step.shape,
        backend=backend,
        is_causal=step.is_causal,
        deterministic=deterministic,
        launch=launch,
    )
    return lambda: [
        paged_attention(step.q_RNH, k, v, plan, scale=step.scale)
        for k, v in zip(step.keys, step.values, strict=True)
    ]


def _arms(step: Step, *, libraries: bool) -> dict[str, Attend]:
    arms = {"triton": _attend(step, "triton"), "fixed": _attend(step, "triton", deterministic=True)}
    for name in BACKENDS:
        options = {"page_size": step.rows.page_size, "device": torch.device("cuda")}
        if name == "triton" or (name != "torch" and not libraries):
            continue
        if not problems(name, step.shape, is_causal=step.is_causal, **options):  # type: ignore[arg-type]
            arms[name] = _attend(step, name)
    return arms


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
    """Largest error of the checked sequences against float64, over that of torch in bfloat16."""
    truth, own = _dense(step, torch.float64), _dense(step, torch.bfloat16)
    mine = attend()[0][: len(truth)]
    floor = torch.finfo(torch.bfloat16).eps / 2 * truth.abs().max()
    return float((mine - truth).abs().max() / torch.maximum((own - truth).abs().max(), floor))


def _measure_case(step: Step, rounds: int, libraries: bool) -> dict[str, tuple[float, float]]:
    """Arm to (seconds of one layer, error over torch's own)."""
    arms = _arms(step, libraries=libraries)
    errors = {name: _error(step, attend) for name, attend in arms.items()}
    seconds = time_in_turns({name: _captured(attend) for name, attend in arms.items()}, rounds)
    return {name: (seconds[name] / len(step.keys), errors[name]) for name in arms}


def _captured(attend: Attend) -> torch.cuda.CUDAGraph:
    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    return graph


def time_in_turns(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, float]:
    """Median seconds of a replay of each graph; neighbours and clocks hit all alike."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def _variants(step: Step) -> dict[str, Any]:
    """The chosen launch parameters and each with one of them changed."""
    from idlm.kernels.paged_attention.launch import choose_launch

    chosen = choose_launch(step.shape, max_rows=step.rows.max_rows)
    fixed = choose_launch(step.shape, max_rows=step.rows.max_rows, deterministic=True)
    variants = {"chosen": chosen} | {
        f"fixed, split_slots={slots}": dataclasses.replace(fixed, split_slots=slots)
        for slots in (256, 512, 1024, 2048)
    }
    for field, values in SWEPT.items():
        for value in values:
            if value != getattr(chosen, field) and (field != "block_m" or value >= step.shape.group):
                changes = {field: value} | ({"warps": 8} if (field, value) == ("block_m", 128) else {})
                variants[f"{field}={value}"] = dataclasses.replace(chosen, **changes)
    return variants


def _sweep(case: dict[str, Any], step: Step, rounds: int) -> None:
    """Print the time of every variant over that of the chosen one, best first."""
    from triton.runtime.errors import OutOfResources

    graphs = {}
    for name, launch in _variants(step).items():
        try:
            graphs[name] = _captured(_attend(step, "triton", launch=launch))
        except OutOfResources as error:
            print(f"{case}: {name} needs too much: {error}")
    seconds = time_in_turns(graphs, rounds)
    ranked = sorted(seconds, key=lambda name: seconds[name])
    told = ", ".join(f"{name} {seconds[name] / seconds['chosen']:.3f}" for name in ranked)
    print(f"{case}: {told}", flush=True)


def _compile_everything(arguments: list[str]) -> None:
    """Compile all variants into Triton's cache, in parallel: one after the other would take minutes."""
    num_parts = min(16, os.cpu_count() or 1)
    base = [sys.executable, "-m", "benchmarks.attention", *arguments]
    parts = [subprocess.Popen([*base, f"compile_part={i}/{num_parts}"]) for i in range(num_parts)]
    codes = [part.wait() for part in parts]
    assert not any(codes), f"{codes=}"


def _compile(options: dict[str, str]) -> int:
    """Launch this part of the variants once, on little data."""
    from triton.runtime.errors import OutOfResources

    index, num_parts = (int(number) for number in options["compile_part"].split("/"))
    launches = {}
    for num_rows in _numbers(options["rows"]):
        step = make_step(options, batch=1, context=1024, rows=num_rows)
        assert step is not None
        small = dataclasses.replace(step, keys=step.keys[:1], values=step.values[:1])
        launches.update(dict.fromkeys(_variants(small).values(), small))
    for launch, small in list(launches.items())[index::num_parts]:
        try:
            _attend(small, "triton", launch=launch)()
        except OutOfResources:
            continue
    torch.cuda.synchronize()
    return 0


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
        f"{where} {arm:>10} {seconds * 1e6:>9.2f} {floor / seconds:>16.3f}  {error:.2f}"
        + ("" if error <= 2 else "  WRONG")
        for arm, (seconds, error) in outcome.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
