"""One step of attention for the benchmarks: rows, caches of all layers, and the chain of layers to time.

A layer is attention and a norm of its output, which is the next layer's query, so launches overlap as they do
in a model. The norms alone are timed too; the difference is the time of attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.shared import numbers
from idlm.kernels.paged_attention import AttentionRows, HeadShape, paged_attention, plan_attention
from idlm.kernels.rms_norm import add_rms_norm

BRANCH_ROWS = 16
COLD_BYTES = 1 << 28
"""Keys and values of all layers of a graph; five times the L2 cache of an H200."""
MAX_BYTES = 48 << 30
Attend = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Queries, rows and the caches of all layers of one case."""

    shape: HeadShape
    rows: AttentionRows
    q_RNH: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    ones_D: Tensor
    is_causal: bool

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    @property
    def layer_bytes(self) -> int:
        """Bytes that one layer must read at least: keys and values of all slots, once."""
        num_slots = int(self.rows.own_slots_R[self.rows.cu_rows[1:] - 1].sum()) + len(self.rows.cu_rows) - 1
        return 2 * num_slots * self.shape.num_kv_heads * self.shape.head_dim * self.q_RNH.element_size()


def make_step(
    options: dict[str, str], *, batch: int, context: int, rows: int, layers: int = 64
) -> Step | None:
    """`batch` sequences of `context` slots, the last `rows` of which are fed; None if it does not fit."""
    num_heads, num_kv_heads, head_dim = numbers(options["heads"])
    shape = HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
    page_size = int(options["page_size"])
    num_pages = -(-context // page_size)
    slot_bytes = 2 * num_kv_heads * head_dim * 2
    layer_bytes = batch * num_pages * page_size * slot_bytes
    num_layers = min(layers, max(2, -(-COLD_BYTES // layer_bytes)))
    if num_layers * layer_bytes > MAX_BYTES:
        return None
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda", dtype=torch.bfloat16)

    num_slots = batch * num_pages * page_size
    own = torch.arange(context - rows, context, device="cuda").repeat(batch)
    limits, branches = own + 1, own + 1
    if rows == BRANCH_ROWS:
        layout = _branch_layout(device="cuda")
        limits = context - rows + layout[0].repeat(batch)
        branches = context - rows + layout[1].repeat(batch)
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
        ones_D=torch.ones(num_heads * head_dim, device="cuda", dtype=torch.bfloat16),
        is_causal=rows != BRANCH_ROWS,
    )


def _branch_layout(device: str) -> Tensor:
    """Limits and branch starts of `[pending, d, d, d]` and a group of three masks on each of them."""
    limits = [1, 2, 3, 4] + [g + 1 for g in range(4) for _ in range(3)]
    starts = [1, 2, 3, 4] + [4 + 3 * g for g in range(4) for _ in range(3)]
    return torch.tensor([limits, starts], device=device)


def attention_layers(step: Step, backend: str, *, deterministic: bool = False, launch: Any = None) -> Attend:
    """A run of all layers of one step with one plan, which returns the outputs of attention."""
    plan = plan_attention(step.rows, step.shape, backend=backend, deterministic=deterministic, launch=launch)
    pdl = launch is not None and launch.pdl
    return layers(step, lambda q, k, v: paged_attention(q, k, v, plan, scale=step.scale), pdl=pdl)


def layers(step: Step, attend: Callable[[Tensor, Tensor, Tensor], Tensor], *, pdl: bool = False) -> Attend:
    """A run of all layers, each `attend` of query, keys and values, then a norm."""

    def run() -> list[Tensor]:
        outputs, q_RNH = [], step.q_RNH
        for keys, values in zip(step.keys, step.values, strict=True):
            outputs.append(attend(q_RNH, keys, values))
            q_RNH = norm_of(outputs[-1], step, pdl=pdl)
        return outputs

    return run


def norms_alone(step: Step, *, pdl: bool) -> Attend:
    """The same layers without attention."""

    def norms() -> list[Tensor]:
        q_RNH = step.q_RNH.contiguous()
        for _ in step.keys:
            q_RNH = norm_of(q_RNH, step, pdl=pdl)
        return [q_RNH]

    return norms


def norm_of(x_RNH: Tensor, step: Step, *, pdl: bool) -> Tensor:
    """The next layer's query [R, N, H]: a norm of the output of attention."""
    return add_rms_norm(x_RNH.flatten(1), None, step.ones_D, eps=1e-6, pdl=pdl)[0].view(x_RNH.shape)


def launch_of(step: Step, *, fixed: bool) -> Any:
    """The launch parameters that the back end would choose."""
    from idlm.kernels.paged_attention.choice import choose_launch

    return choose_launch(
        step.shape,
        max_rows=step.rows.max_rows,
        num_rows=len(step.q_RNH),
        max_slots=min(step.rows.max_slots, step.rows.num_listed + step.rows.max_rows)
        if step.rows.num_listed
        else step.rows.max_slots,
        num_sequences=len(step.rows.block_table),
        deterministic=fixed,
    )


def captured(attend: Attend) -> torch.cuda.CUDAGraph:
    """Capture the call as a CUDA graph, after a run that compiles."""
    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def time_in_turns(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, float]:
    """Median seconds of a replay of each graph, in turns, so that clocks affect all equally."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    for _ in range(rounds):
        for name, graph in graphs.items():
            samples[name].append(replay_seconds(graph))
    return {name: statistics.median(values) for name, values in samples.items()}
