"""Block diffusion on one GPU: full blocks against the rate of a matrix product and against linears alone.

    python -m benchmarks.block [batch=1,64,256] [block=32] [context=1024] [traces=p0.53,p0.77]
        [parts=full,commit] [sampling=T1|greedy|qwen3] [rounds=3] [passes=60] [blocks=4] [record=true]

It needs a GPU. One process measures the read-only stream and the matrix product, then runs the whole engine
on random weights of the true shape, in CUDA graphs, with every sequence at another step of its block. A
trace, the same for all arms, sets how many positions a pass decides (block_harness.py): pQ decides one
position, and one more with probability Q, and so on. p0.53 and p0.77 need about as many passes per block as
the chats and the mathematics of FOCUS's baseline at threshold 0.9 (15.02 and 7.45 rows for each token).
`full` times steps of the first trace, `commit` decodes whole answers of every one, with and without fused
commits, at the largest batch up to 64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks import models
from benchmarks.engine.block_harness import BlockArm, BlockMeasured, SteadyBlocks, pass_cost, whole_answers
from benchmarks.engine.decode import linears_ms
from benchmarks.engine.decoding.harness import SAMPLING, Load, fits
from benchmarks.engine.decoding.replay import Trace, trace_of
from benchmarks.shared import chosen, defaults, numbers, parse_options, start
from idlm.devices import free_cached_memory

DEFAULTS = defaults(
    "model=qwen3-8b device=cuda dtype=bfloat16 batch=1,64,256 block=32 context=1024 "
    "traces=p0.53,p0.77 parts=full,commit sampling=T1 rounds=3 passes=60 blocks=4 record=true"
)
COMMIT_BATCH = 64
TOLERANCE = 0.02
"""Relative, of tokens per forward against the trace's: a pass cannot always store all clean blocks."""


@dataclass(slots=True, kw_only=True)
class Bench(models.Bench):
    """What all parts have."""

    traces: list[Trace]

    def load(self, batch: int, num_tokens: int) -> Load:
        sampling, context = SAMPLING[self.options["sampling"]], self.number("context")
        return Load(concurrency=batch, context=context, num_tokens=num_tokens, sampling=sampling)

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> None:
        case = {"decoder": "block", **case, "block": self.number("block"), "context": self.number("context")}
        self.report.add(case | {"sampling": self.options["sampling"]}, metric, value, unit, **more)


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="block")
    parts, block = chosen(options, "parts", PARTS), int(options["block"])
    chosen(options, "sampling", SAMPLING)
    traces = [trace_of(name, block) for name in options["traces"].split(",")]
    bench = Bench(**models.opened("block", options, block_size=block), traces=traces)
    for part in parts:
        PARTS[part](bench)
    return 0


def full(bench: Bench) -> None:
    """Step times of every batch against linears alone, and the share of the product's rate they reach."""
    block, trace = bench.number("block"), bench.traces[0]
    for batch in numbers(bench.options["batch"]):
        # A pass of a large batch takes a quarter of a second.
        num_passes = max(1, bench.number("passes") // (4 if batch >= 2 * COMMIT_BATCH else 1))
        # Twice the tokens that sequences emit in a round on average.
        load = bench.load(batch, block * 2 + int(2.0 * (1 + trace.mean) * num_passes))
        arm = BlockArm(name="full", stride=block)
        if not fits(bench.model, arm, load):
            print(f"{batch} blocks do not fit into the GPU's memory", flush=True)
            continue
        steady = SteadyBlocks(bench.model, arm, load, trace, num_passes)
        measured = BlockMeasured(arm=steady.arm, load=steady.load, width=block)
        for _ in range(bench.number("rounds")):
            steady.measure(measured)
        steady.free()
        _add_step(bench, batch, measured)


def _add_step(bench: Bench, batch: int, measured: BlockMeasured) -> None:
    block, rounds = bench.number("block"), bench.number("rounds")
    num_rows, num_head_rows = min(measured.rows), batch * block
    floor = linears_ms(bench.model, num_rows, rounds=rounds, num_head_rows=num_head_rows)
    step, rows = measured.step_ms(), measured.rows_per_pass()
    # A row sees the context, half of what is emitted in a round, and its own block.
    emitted = sum(measured.tokens) / len(measured.tokens) / batch
    slots = bench.number("context") + emitted / 2 + block
    cost = pass_cost(bench.model, num_sequences=batch, rows=rows, slots=slots)
    flops = cost.linears(rows, num_head_rows)
    case, rate = {"batch": batch, "trace": bench.traces[0].name}, step / 1e3 * bench.rates.product
    bench.add(case, "step_ms", step, "ms", floor=floor)
    bench.add(case, "full_block_share_of_matmul", flops / rate, "share")
    bench.add(case, "full_block_share_with_attention", (flops + cost.attention_flops) / rate, "share")
    bench.add(case, "tokens_per_second", measured.tokens_per_second(), "tokens/s")


def commit(bench: Bench) -> None:
    """Tokens per forward of whole answers with fused commits over those without, on the same traces."""
    batches, block = numbers(bench.options["batch"]), bench.number("block")
    batch = max((batch for batch in batches if batch <= COMMIT_BATCH), default=min(batches))
    arm, num_blocks = BlockArm(name="fused", stride=block), bench.number("blocks")
    load = bench.load(batch, num_blocks * block)
    for trace in bench.traces:
        found = []
        for is_fused in (True, False):
            found.append(answers := whole_answers(bench.model, replace(arm, fused=is_fused), load, trace))
            free_cached_memory()
            case = {"batch": batch, "trace": trace.name, "fused_commit": is_fused}
            expected = answers.expected_tokens_per_forward
            bench.add(case, "tokens_per_forward", answers.tokens_per_forward, "tokens", baseline=expected)
        gain = found[0].tokens_per_forward / found[1].tokens_per_forward
        expected = found[0].expected_tokens_per_forward / found[1].expected_tokens_per_forward
        case = {"batch": batch, "trace": trace.name, "blocks": num_blocks}
        is_met = gain >= (1 - TOLERANCE) * expected
        bench.add(case, "fused_commit_tpf_gain", gain, "x", baseline=expected, gate_passed=is_met)
        bench.add(case, "fused_commit_time_gain", found[1].seconds / found[0].seconds, "x")


PARTS = {"full": full, "commit": commit}

if __name__ == "__main__":
    start(measure, __doc__)
