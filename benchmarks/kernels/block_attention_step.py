"""A step of diffusion blocks for the benchmark: rows, caches of all layers, lists, and the layers to time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.attention_step import COLD_BYTES, Attend, Step, launch_of, norm_of
from benchmarks.shared import numbers
from idlm.kernels.paged_attention import (
    AttentionRows,
    BeforeBlock,
    HeadShape,
    paged_attention,
    plan_attention,
)

CHAIN_BYTES = 4 * COLD_BYTES
"""Of a chain of layers: no kernel before the first one hides its beginning."""
MAX_LAYERS = 64
MAX_BYTES = 40 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStep:
    """A step of blocks; `lists_LBKC`: lists of each layer, None: exact."""

    step: Step
    lists_LBKC: Tensor | None
    num_seen: int
    """Slots that a row sees."""

    def floor(self, stream: float, products: float) -> float:
        """Seconds of a layer by its bytes or by its products."""
        shape, batch = self.step.shape, len(self.step.rows.block_table)
        num_bytes = 2 * batch * self.num_seen * shape.num_kv_heads * shape.head_dim * 2
        flops = 4 * len(self.step.q_RNH) * shape.num_heads * shape.head_dim * self.num_seen
        return max(num_bytes / stream, flops / products)


def make_block_step(
    options: dict[str, str],
    *,
    batch: int,
    context: int,
    k: int | None = None,
    run: int = 1,
    layers: int = MAX_LAYERS,
    in_order: bool = False,
) -> BlockStep:
    """Blocks at the end of `batch` contexts. `k`: length of lists, whose slots come in runs of `run`;
    `in_order`: the pages of a sequence follow one another.
    """
    num_heads, num_kv_heads, head_dim = numbers(options["heads"])
    num_rows, page_size = int(options["rows"]), int(options["page_size"])
    shape = HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
    num_pages = -(-context // page_size)
    num_seen = context if k is None else k + num_rows
    slot_bytes = 2 * num_kv_heads * head_dim * 2
    num_layers = min(layers, max(2, -(-CHAIN_BYTES // (batch * num_seen * slot_bytes))))
    num_layers = max(2, min(num_layers, MAX_BYTES // (batch * num_pages * page_size * slot_bytes)))
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda", dtype=torch.bfloat16)

    pages = torch.randperm(batch * num_pages, generator=generator, device="cuda")
    if in_order:
        pages = torch.arange(batch * num_pages, device="cuda")
    start = context - num_rows
    rows = AttentionRows(
        cu_rows=torch.arange(batch + 1, device="cuda") * num_rows,
        block_table=pages.view(batch, num_pages),
        page_size=page_size,
        own_slots_R=torch.arange(start, context, device="cuda").repeat(batch),
        limits_R=torch.full((batch * num_rows,), context, device="cuda"),
        branch_starts_R=torch.full((batch * num_rows,), context, device="cuda"),
        max_rows=num_rows,
        max_slots=context,
        starts_B=torch.full((batch,), start, device="cuda"),
        listed_B=None if k is None else torch.ones(batch, dtype=torch.bool, device="cuda"),
        num_listed=0 if k is None else k,
    )
    lists_LBKC = None
    if k is not None:
        draws = torch.rand(num_layers, batch, num_kv_heads, start // run, generator=generator, device="cuda")
        firsts = draws.topk(k // run, dim=-1).indices.sort(dim=-1).values * run
        each = torch.arange(run, device="cuda")
        lists_LBKC = (firsts[..., None] + each).flatten(-2).int().contiguous()
    num_slots = batch * num_pages * page_size
    step = Step(
        shape=shape,
        rows=rows,
        q_RNH=draw(batch * num_rows, num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads],
        keys=[draw(num_slots, num_kv_heads, head_dim) for _ in range(num_layers)],
        values=[draw(num_slots, num_kv_heads, head_dim) for _ in range(num_layers)],
        ones_D=torch.ones(num_heads * head_dim, device="cuda", dtype=torch.bfloat16),
        is_causal=False,
    )
    return BlockStep(step=step, lists_LBKC=lists_LBKC, num_seen=num_seen)


def block_layers(block: BlockStep, *, launch: Any = None, before: bool = False) -> Attend:
    """A run of all layers with one plan, a norm between two; returns the outputs of attention."""
    step = block.step
    if launch is None:
        launch = replace(launch_of(step, fixed=False), pdl=True)
    plan = plan_attention(step.rows, step.shape, backend="triton", launch=launch)
    sums = torch.empty(2, *step.q_RNH.shape[:2], device="cuda")
    leaves = BeforeBlock(highest_RN=sums[0], totals_RN=sums[1]) if before else None
    lists = [None] * len(step.keys) if block.lists_LBKC is None else list(block.lists_LBKC)

    def run() -> list[Tensor]:
        outputs, q_RNH = [], step.q_RNH
        for keys, values, lists_BKC in zip(step.keys, step.values, lists, strict=True):
            arguments = (q_RNH, keys, values, plan)
            o_RNH = paged_attention(*arguments, scale=step.scale, lists_BKC=lists_BKC, before=leaves)
            outputs.append(o_RNH)
            q_RNH = norm_of(o_RNH, step, pdl=launch.pdl)
        return outputs

    return run


def block_error(block: BlockStep, attend: Attend) -> float:
    """Largest error of the last sequence in the first layer, over that of torch in bfloat16."""
    step = block.step
    rows, num_rows, b = step.rows, step.rows.max_rows, len(step.rows.block_table) - 1
    fed = slice(b * num_rows, (b + 1) * num_rows)
    mine, worst, own = attend()[0][fed], 0.0, 0.0
    context, group = rows.max_slots, step.shape.group
    for head in range(step.shape.num_kv_heads):
        slots = torch.arange(context, device="cuda")
        if block.lists_LBKC is not None:
            slots = torch.cat((block.lists_LBKC[0, b, head].long(), slots[context - num_rows :]))
        physical = rows.block_table[b, slots // rows.page_size] * rows.page_size + slots % rows.page_size
        heads = slice(head * group, (head + 1) * group)
        q, k, v = step.q_RNH[fed, heads], step.keys[0][physical, head], step.values[0][physical, head]
        truth, rounded = (
            functional.scaled_dot_product_attention(
                q.to(dtype).transpose(0, 1),
                k.to(dtype).expand(group, -1, -1),
                v.to(dtype).expand(group, -1, -1),
                scale=step.scale,
            ).transpose(0, 1)
            for dtype in (torch.float64, torch.bfloat16)
        )
        # NaN is the largest error there is.
        worst = max(worst, float((mine[:, heads] - truth).abs().nan_to_num(nan=math.inf).max()))
        own = max(own, float((rounded - truth).abs().max()), 2**-9 * float(truth.abs().max()))
    return worst / own
