"""Attention of diffusion blocks: 32 rows a sequence over the whole context, or over lists of slots.

    python -m benchmarks.block_attention [record=true]
        [exact=131072x6,65536x13,131072x1,32768x1] [lists=1,16] [k=1024] [rows=32] [results=DIR]

Rows of the bench `sparse_attention`. The floor of exact attention is the larger of its bytes at the rate of
a read-only stream and its products at the rate of a matrix product, both measured in the same process. Lists
are slots scattered over a context of shuffled pages, drawn anew for each layer and KV head; what they are
compared with is the exact kernel over a context of k slots in pages in order. `gather`: lists of runs of
slots, over lists of the same length that are one run. Every arm is checked against float64 first. One CUDA
graph runs an arm over as many layers as outgrow the L2 cache, with a norm between two layers whose own time
is subtracted; medians, the arms of a case in turns. `lists=` leaves lists out. It needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.attention_step import (
    COLD_BYTES,
    Attend,
    Step,
    captured,
    launch_of,
    norm_of,
    norms_alone,
    time_in_turns,
)
from benchmarks.results import result_row
from benchmarks.shared import defaults, numbers, parse_options, save, start
from benchmarks.stream import matmul_rate, stream_rate
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


DEFAULTS = defaults(
    "exact=131072x6,65536x13,131072x1,32768x1 lists=1,16 k=1024 rows=32 context=32768 "
    "gather_k=8192 heads=32,8,128 page_size=16 rounds=9 record=false"
)
BENCH = "sparse_attention"
RUNS = (1, 16, 64, 128)


def measure(arguments: list[str]) -> int:
    """Print and optionally record all cases."""
    options = parse_options(arguments, DEFAULTS, needs_gpu="block_attention")
    stream, products = stream_rate(), matmul_rate()
    rounds, rows = int(options["rounds"]), list[dict[str, Any]]()
    print(f"read-only stream {stream / 1e12:.3f} TB/s, product {products / 1e12:.0f} TFLOP/s", flush=True)
    for context, batch in cases_of(options["exact"]):
        rows += _exact(options, batch, context, (stream, products), rounds)
    batches = numbers(options["lists"]) if options["lists"] else ()
    for batch in batches:
        rows += _listed(options, batch, (stream, products), rounds)
    if batches:
        rows += _gather(options, max(batches), rounds)
    save(BENCH, rows, options)
    return 0


row_of = partial(result_row, BENCH, command="python -m benchmarks.block_attention")


def cases_of(text: str) -> list[tuple[int, int]]:
    """Contexts and batches of "131072x6,32768x1"."""
    return [(int(case.split("x")[0]), int(case.split("x")[1])) for case in text.split(",")]


def layer_seconds(arms: dict[str, tuple[BlockStep, Attend]], rounds: int) -> dict[str, float]:
    """Median seconds of one layer of each arm, without norms."""
    graphs = {name: captured(attend) for name, (_, attend) in arms.items()}
    graphs |= {
        f"{name} norms": captured(norms_alone(block.step, pdl=True)) for name, (block, _) in arms.items()
    }
    seconds = time_in_turns(graphs, rounds)
    return {
        name: (seconds[name] - seconds[f"{name} norms"]) / len(block.step.keys)
        for name, (block, _) in arms.items()
    }


def _us(
    arm: str, case: dict[str, Any], block: BlockStep, seconds: float, error: float, rates: tuple[float, float]
) -> list[dict[str, Any]]:
    """Rows of one arm, which are printed too."""
    floor, gate = block.floor(*rates), error <= 2
    print(
        f"{arm:>8} {case}: {seconds * 1e6:8.2f} us, {floor / seconds:.3f} of the floor, error {error:.2f}"
        + ("" if gate else "  WRONG"),
        flush=True,
    )
    where = {"arm": arm} | case
    return [
        row_of(where, "us", seconds * 1e6, "us", floor=floor * 1e6, gate_passed=gate),
        *(
            [row_of(case, "exact_share_of_floor", floor / seconds, "share", gate_passed=gate)]
            if arm == "exact"
            else []
        ),
    ]


def _exact(
    options: dict[str, str], batch: int, context: int, rates: tuple[float, float], rounds: int
) -> list[dict[str, Any]]:
    """Exact attention of one case, and what the sums before the block cost."""
    block = make_block_step(options, batch=batch, context=context)
    arms = {"exact": (block, block_layers(block)), "ranking": (block, block_layers(block, before=True))}
    errors = {name: block_error(block, attend) for name, (_, attend) in arms.items()}
    seconds = layer_seconds(arms, rounds)
    case = {"rows": int(options["rows"]), "batch": batch, "context": context, "k": 0}
    return [row for arm in arms for row in _us(arm, case, block, seconds[arm], errors[arm], rates)]


def _listed(
    options: dict[str, str], batch: int, rates: tuple[float, float], rounds: int
) -> list[dict[str, Any]]:
    """Attention over lists, against exact attention over a context as long as they are."""
    k, context = int(options["k"]), int(options["context"])
    lists = make_block_step(options, batch=batch, context=context, k=k)
    short = make_block_step(options, batch=batch, context=k, in_order=True)
    arms = {"listed": (lists, block_layers(lists)), "exact": (short, block_layers(short))}
    errors = {name: block_error(block, attend) for name, (block, attend) in arms.items()}
    seconds = layer_seconds(arms, rounds)
    case = {"rows": int(options["rows"]), "batch": batch}
    rows = _us(
        "listed", case | {"context": context, "k": k}, lists, seconds["listed"], errors["listed"], rates
    )
    rows += _us("exact", case | {"context": k, "k": 0}, short, seconds["exact"], errors["exact"], rates)
    ratio, gate = seconds["listed"] / seconds["exact"], max(errors.values()) <= 2
    print(f"listed over short exact, {batch=} {k=}: {ratio:.3f}", flush=True)
    where = {"batch": batch, "k": k}
    return [*rows, row_of(where, "listed_over_short_exact", ratio, "x", gate_passed=gate)]


def _gather(options: dict[str, str], batch: int, rounds: int) -> list[dict[str, Any]]:
    """Time of lists that are one run over the time of lists of short runs."""
    k, context = int(options["gather_k"]), int(options["context"])
    blocks = {
        run: make_block_step(options, batch=batch, context=context, k=k, run=run, layers=2)
        for run in (*RUNS, k)
    }
    arms: dict[str, tuple[BlockStep, Callable[[], list[Tensor]]]] = {
        str(run): (block, block_layers(block)) for run, block in blocks.items()
    }
    gate = all(block_error(*arm) <= 2 for arm in arms.values())
    seconds = layer_seconds(arms, rounds)
    rows = []
    for run in RUNS:
        share = seconds[str(k)] / seconds[str(run)]
        print(f"gather, runs of {run:>3} slots, {batch=} {k=}: {share:.3f} of one run", flush=True)
        case = {"batch": batch, "k": k, "run": run}
        rows.append(row_of(case, "gather_efficiency", share, "share", gate_passed=gate))
    return rows


if __name__ == "__main__":
    start(measure, __doc__)
