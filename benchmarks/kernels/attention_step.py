"""One step of attention for the benchmarks: rows, caches of all layers, and the chain of layers to time.

A layer is attention and a norm of its output, which is the next layer's query, so launches overlap as they do
in a model. The norms alone are timed too; the difference is the time of attention.
R rows, N query heads, K KV heads, H head dim, B sequences, P pages, S slots, C listed slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.shared import numbers
from benchmarks.stream import captured, ms_in_turns
from idlm.kernels.paged_attention import (
    AttentionRows,
    BeforeBlock,
    HeadShape,
    paged_attention,
    plan_attention,
)
from idlm.kernels.rms_norm import add_rms_norm

BRANCH_ROWS = 16
MAX_LAYERS = 64
COLD_BYTES = 1 << 28
"""Keys and values of all layers of a graph; five times the L2 cache of an H200."""
MAX_BYTES = 48 << 30
ERROR_LIMIT = 2.0
"""Of the largest error, over that of torch in bfloat16."""
Attend = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Queries, rows and the caches of all layers of one case; `lists_LBKC`: listed slots, None: all."""

    shape: HeadShape
    rows: AttentionRows
    q_RNH: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    ones_D: Tensor
    lists_LBKC: Tensor | None = None

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    @property
    def num_seen(self) -> int:
        return self.rows.max_slots if self.lists_LBKC is None else self.rows.num_listed + self.rows.max_rows

    @property
    def layer_bytes(self) -> int:
        """Bytes that one layer must read at least: keys and values of all slots that are seen, once."""
        num_slots = len(self.rows.block_table) * self.num_seen
        return 2 * num_slots * self.shape.num_kv_heads * self.shape.head_dim * self.q_RNH.element_size()

    @property
    def layer_flops(self) -> int:
        """FLOPs of both products of one layer if every row sees `num_seen` slots."""
        return 4 * len(self.q_RNH) * self.shape.num_heads * self.shape.head_dim * self.num_seen


def make_step(
    options: dict[str, str],
    *,
    batch: int,
    context: int,
    rows: int,
    cold_bytes: int = COLD_BYTES,
    is_block: bool = False,
    k: int | None = None,
    in_order: bool = False,
) -> Step | None:
    """`batch` sequences of `context` slots, the last `rows` of which are fed; None if it does not fit. Rows
    see the slots up to their own, `BRANCH_ROWS` those of a branch, and with `is_block` all of the context,
    or `k` slots of it. `in_order`: the pages of a sequence follow one another."""
    num_heads, num_kv_heads, head_dim = numbers(options["heads"])
    page_size = int(options["page_size"])
    num_pages = -(-context // page_size)
    num_slots, slot_bytes = batch * num_pages * page_size, 4 * num_kv_heads * head_dim
    seen_bytes = slot_bytes * (num_slots if k is None else batch * (k + rows))
    num_layers = min(MAX_LAYERS, max(2, -(-cold_bytes // seen_bytes)))
    if is_block:
        num_layers = max(2, min(num_layers, MAX_BYTES // (num_slots * slot_bytes)))
    if num_layers * num_slots * slot_bytes > MAX_BYTES:
        return None
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda", dtype=torch.bfloat16)

    pages = torch.randperm(batch * num_pages, generator=generator, device="cuda")
    if in_order:
        pages = torch.arange(batch * num_pages, device="cuda")
    table_BP = pages.view(batch, num_pages)
    lists_LBKC = None
    if k is not None:
        sizes = (num_layers, batch, num_kv_heads, context - rows)
        draws = torch.rand(*sizes, generator=generator, device="cuda")
        lists_LBKC = draws.topk(k, dim=-1).indices.sort(dim=-1).values.int()
    return Step(
        shape=HeadShape(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16
        ),
        rows=_rows_of(table_BP, page_size, context, rows, is_block=is_block, k=k),
        q_RNH=draw(batch * rows, num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads],
        keys=[draw(num_slots, num_kv_heads, head_dim) for _ in range(num_layers)],
        values=[draw(num_slots, num_kv_heads, head_dim) for _ in range(num_layers)],
        ones_D=torch.ones(num_heads * head_dim, device="cuda", dtype=torch.bfloat16),
        lists_LBKC=lists_LBKC,
    )


def _rows_of(
    table_BP: Tensor, page_size: int, context: int, rows: int, *, is_block: bool, k: int | None
) -> AttentionRows:
    begin, batch = context - rows, len(table_BP)
    own = torch.arange(begin, context, device="cuda").repeat(batch)
    limits, branches = own + 1, own + 1
    of_block: dict[str, Any] = {}
    if is_block:
        limits = branches = torch.full_like(own, context)
        listed_B = None if k is None else torch.ones(batch, dtype=torch.bool, device="cuda")
        starts_B = torch.full((batch,), begin, device="cuda")
        of_block = {"starts_B": starts_B, "listed_B": listed_B, "num_listed": k or 0}
    elif rows == BRANCH_ROWS:
        limits, branches = (begin + each.repeat(batch) for each in _branch_layout())
    return AttentionRows(
        cu_rows=torch.arange(batch + 1, device="cuda") * rows,
        block_table=table_BP,
        page_size=page_size,
        own_slots_R=own,
        limits_R=limits,
        branch_starts_R=branches,
        max_rows=rows,
        max_slots=context,
        **of_block,
    )


def _branch_layout() -> Tensor:
    """Limits and branch starts of `[pending, d, d, d]` and a group of three masks on each of them."""
    limits = [1, 2, 3, 4] + [g + 1 for g in range(4) for _ in range(3)]
    starts = [1, 2, 3, 4] + [4 + 3 * g for g in range(4) for _ in range(3)]
    return torch.tensor([limits, starts], device="cuda")


def attention_layers(step: Step, backend: str, *, launch: Any = None, before: bool = False) -> Attend:
    """A run of all layers of one step with one plan, which returns the outputs of attention. `before`: the
    sums over the slots before the block are written too."""
    plan = plan_attention(step.rows, step.shape, backend=backend, launch=launch)
    sums = torch.empty(2, *step.q_RNH.shape[:2], device="cuda")
    leaves = BeforeBlock(highest_RN=sums[0], totals_RN=sums[1]) if before else None

    def attend(q: Tensor, k: Tensor, v: Tensor, lists_BKC: Tensor | None) -> Tensor:
        return paged_attention(q, k, v, plan, scale=step.scale, lists_BKC=lists_BKC, before=leaves)

    return layers(step, attend, pdl=launch is not None and launch.pdl)


def layers(step: Step, attend: Callable[..., Tensor], *, pdl: bool = False) -> Attend:
    """A run of all layers, each `attend` of query, keys, values and the layer's lists, then a norm."""
    lists = [None] * len(step.keys) if step.lists_LBKC is None else list(step.lists_LBKC)

    def run() -> list[Tensor]:
        outputs, q_RNH = [], step.q_RNH
        for keys, values, lists_BKC in zip(step.keys, step.values, lists, strict=True):
            outputs.append(attend(q_RNH, keys, values, lists_BKC))
            q_RNH = _norm_of(outputs[-1], step, pdl=pdl)
        return outputs

    return run


def _norms_alone(step: Step, *, pdl: bool) -> Attend:

    def norms() -> list[Tensor]:
        q_RNH = step.q_RNH.contiguous()
        for _ in step.keys:
            q_RNH = _norm_of(q_RNH, step, pdl=pdl)
        return [q_RNH]

    return norms


def _norm_of(x_RNH: Tensor, step: Step, *, pdl: bool) -> Tensor:
    """The next layer's query [R, N, H]: a norm of the output of attention."""
    return add_rms_norm(x_RNH.flatten(1), None, step.ones_D, eps=1e-6, pdl=pdl)[0].view(x_RNH.shape)


def launch_of(step: Step, *, fixed: bool) -> Any:
    """The launch parameters that the back end would choose."""
    from idlm.kernels.paged_attention.choice import choose_launch
    from idlm.kernels.paged_attention.planning import groups_serve

    return choose_launch(
        step.shape,
        max_rows=step.rows.max_rows,
        num_rows=len(step.q_RNH),
        max_slots=min(step.rows.max_slots, step.num_seen),
        num_sequences=len(step.rows.block_table),
        deterministic=fixed,
        has_groups=step.lists_LBKC is None and groups_serve(step.rows, step.shape),
    )


def error_of(step: Step, attend: Attend, sequences: range) -> float:
    """Largest error of `sequences` in the first layer against float64, over that of torch in bfloat16."""
    rows, group, outputs, worst, own = step.rows, step.shape.group, attend()[0], 0.0, 0.0
    for b in sequences:
        fed = slice(b * rows.max_rows, (b + 1) * rows.max_rows)
        limits, starts, indices = (
            row[fed, None] for row in (rows.limits_R, rows.branch_starts_R, rows.own_slots_R)
        )
        for head in range(step.shape.num_kv_heads):
            slots = torch.arange(rows.max_slots, device="cuda")
            if step.lists_LBKC is not None:
                slots = torch.cat((step.lists_LBKC[0, b, head].long(), slots[-rows.max_rows :]))
            sees = (slots < limits) | ((slots >= starts) & (slots <= indices))
            physical = rows.block_table[b, slots // rows.page_size] * rows.page_size + slots % rows.page_size
            heads = slice(head * group, (head + 1) * group)
            q, k, v = step.q_RNH[fed, heads], step.keys[0][physical, head], step.values[0][physical, head]
            truth, rounded = (
                functional.scaled_dot_product_attention(
                    q.to(dtype).transpose(0, 1),
                    k.to(dtype).expand(group, -1, -1),
                    v.to(dtype).expand(group, -1, -1),
                    attn_mask=sees,
                    scale=step.scale,
                ).transpose(0, 1)
                for dtype in (torch.float64, torch.bfloat16)
            )
            # NaN is the largest error there is.
            found = (outputs[fed, heads] - truth).abs().nan_to_num(nan=math.inf)
            floor = torch.finfo(torch.bfloat16).eps / 2 * float(truth.abs().max())
            worst, own = max(worst, float(found.max())), max(own, float((rounded - truth).abs().max()), floor)
    return worst / own


def layer_seconds(arms: dict[str, tuple[Step, Attend, bool]], rounds: int) -> dict[str, float]:
    """Median seconds of one layer of each arm, without norms; the flag of an arm is that of its norms' PDL.
    Arms run in turns."""
    graphs = {name: captured(attend) for name, (_, attend, _) in arms.items()}
    norms = {(id(step), pdl): captured(_norms_alone(step, pdl=pdl)) for step, _, pdl in arms.values()}
    calls = {name: graph.replay for name, graph in graphs.items()}
    calls |= {str(key): graph.replay for key, graph in norms.items()}
    for call in calls.values():
        call()
    ms = ms_in_turns(calls, rounds)
    return {
        name: (ms[name] - ms[str((id(step), pdl))]) / 1e3 / len(step.keys)
        for name, (step, _, pdl) in arms.items()
    }
