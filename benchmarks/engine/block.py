"""Block diffusion on one GPU: full blocks against the rate of a matrix product and against linears alone.

    python -m benchmarks.block [batch=1,64,256] [block=32] [context=1024] [traces=p0.53,p0.77]
        [parts=full,commit] [sampling=T1|greedy|qwen3] [rounds=3] [passes=60] [blocks=4] [record=true]

It needs a GPU. One process measures the read-only stream and the matrix product, then runs the whole engine
on random weights of the true shape, in CUDA graphs, with every sequence at another step of its block. A
trace, the same for all arms, says how many positions a pass decides (block_harness.py): pQ decides one
position, and one more with probability Q, and so on. p0.53 and p0.77 need about as many passes per block as
the chats and the mathematics of FOCUS's baseline at threshold 0.9 (15.02 and 7.45 rows for each token).
`full` times steps of the first trace, `commit` decodes whole answers of every one, with and without fused
commits, at the largest batch up to 64.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.engine.block_harness import (
    BlockArm,
    BlockMeasured,
    SteadyBlocks,
    pass_cost,
    whole_answers,
)
from benchmarks.engine.decoding.arms import linears_ms
from benchmarks.engine.decoding.harness import SAMPLING, Load, random_model
from benchmarks.engine.decoding.trace import Trace, trace_of
from benchmarks.results import result_row
from benchmarks.shared import defaults, parse_options, save, start
from benchmarks.stream import matmul_rate, stream_rate
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.infer.models.loader import DTYPES, LoadedModel

DEFAULTS = defaults(
    "model=qwen3-8b device=cuda dtype=bfloat16 batch=1,64,256 block=32 context=1024 "
    "traces=p0.53,p0.77 parts=full,commit sampling=T1 rounds=3 passes=60 blocks=4 "
    "record=true"
)
COMMIT_BATCH = 64
MIN_LARGE_BATCH = 128
"""Rounds of larger batches have a quarter of the passes, because each pass takes a quarter of a second."""
TOLERANCE = 0.02
"""Relative, of tokens per forward against the trace's: a pass cannot always store all clean blocks."""


@dataclass(slots=True, kw_only=True)
class Bench:
    """Model, measured rates and options of all parts; parts append to `rows`."""

    model: LoadedModel
    stream: float
    product: float
    batches: list[int]
    block: int
    context: int
    traces: list[Trace]
    sampling: str
    rounds: int
    num_passes: int
    num_blocks: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    def passes(self, batch: int) -> int:
        """Number of passes of a round."""
        return self.num_passes if batch < MIN_LARGE_BATCH else max(1, self.num_passes // 4)

    def steady(self, batch: int, num_passes: int) -> SteadyBlocks:
        """An engine with room for the tokens that `batch` sequences emit in a round."""
        trace, most = self.traces[0], 2.0 * (1 + sum(self.traces[0].accepted) / len(self.traces[0].accepted))
        load = self.load(batch, self.block * 2 + int(most * num_passes))
        return SteadyBlocks(self.model, BlockArm(name="full", stride=self.block), load, trace, num_passes)

    def load(self, batch: int, num_tokens: int) -> Load:
        """The load of `batch` sequences."""
        return Load(
            concurrency=batch,
            context=self.context,
            num_tokens=num_tokens,
            sampling=SAMPLING[self.sampling],
        )

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> None:
        """Append one result row and print it as a line."""
        case = {"decoder": "block", **case, "block": self.block, "context": self.context}
        case["sampling"] = self.sampling
        self.rows.append(result_row("block", case, metric, value, unit, **more))
        detail = " ".join(f"{key} {value:.4g}" for key, value in more.items())
        name = " ".join(f"{key}={value}" for key, value in case.items())
        print(f"{metric:32s} {value:10.4g} {unit:8s} {detail}  {name}", flush=True)


def measure(arguments: list[str]) -> int:
    """Run the parts that the arguments name; returns the exit status."""
    options = parse_options(arguments, DEFAULTS, needs_gpu="block")
    parts = options["parts"].split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown or options["sampling"] not in SAMPLING:
        raise UserError(
            "IDLM-0107",
            f"parts={options['parts']} sampling={options['sampling']}",
            fix=f"use parts of {sorted(PARTS)} and sampling of {sorted(SAMPLING)}",
        )
    bench = _bench(options)
    for part in parts:
        PARTS[part](bench)
    save("block", bench.rows, options)
    return 0


def _bench(options: dict[str, str]) -> Bench:
    """Measure stream and product, create the model and read the options."""
    device, block = options["device"], int(options["block"])
    stream, product = stream_rate(device=device), matmul_rate(device=device)
    print(f"read-only stream {stream / 1e12:.3f} TB/s, bf16 product {product / 1e12:.1f} TFLOP/s", flush=True)
    start = time.perf_counter()
    dtype = DTYPES[options["dtype"]]
    model = random_model(options["model"], device=device, dtype=dtype, block_size=block)
    print(f"random weights of {options['model']} after {time.perf_counter() - start:.1f} s", flush=True)
    traces = [trace_of(name, block) for name in options["traces"].split(",")]
    for trace in traces:
        mean = 1 + sum(trace.accepted) / len(trace.accepted)
        print(f"unmasking replayed from trace {trace.name}: {mean:.3f} positions a pass, as far as there are")
    return Bench(
        model=model,
        stream=stream,
        product=product,
        batches=[int(number) for number in options["batch"].split(",")],
        block=block,
        context=int(options["context"]),
        traces=traces,
        sampling=options["sampling"],
        rounds=int(options["rounds"]),
        num_passes=int(options["passes"]),
        num_blocks=int(options["blocks"]),
    )


def full(bench: Bench) -> None:
    """Step times of every batch against linears alone, and the share of the product's rate they reach."""
    for batch in bench.batches:
        num_passes = bench.passes(batch)
        steady = bench.steady(batch, num_passes)
        measured = BlockMeasured(arm=steady.arm, load=steady.load, width=bench.block)
        for _ in range(bench.rounds):
            steady.measure(measured)
        del steady
        free_cached_memory()
        _note(bench, batch, measured)


def _note(bench: Bench, batch: int, measured: BlockMeasured) -> None:
    num_rows, num_head_rows = min(measured.rows), batch * bench.block
    floor = linears_ms(bench.model, num_rows, rounds=bench.rounds, num_head_rows=num_head_rows)
    step, rows = measured.step_ms(), measured.rows_per_pass()
    slots = _slots(bench, batch, measured)
    cost = pass_cost(bench.model, num_sequences=batch, rows=rows, slots=slots)
    flops = cost.linears(rows, num_head_rows)
    print(
        f"batch {batch}: {rows:.0f} rows a pass of {sorted(measured.rows)} laid out, {slots:.0f} slots; "
        f"linears {flops / 1e12:.2f} TFLOP, attention {cost.attention_flops / 1e12:.2f} TFLOP",
        flush=True,
    )
    case = {"batch": batch, "trace": bench.traces[0].name}
    seconds = step / 1e3
    bench.add(case, "step_ms", step, "ms", floor=floor)
    share = flops / seconds / bench.product
    bench.add(case, "full_block_share_of_matmul", share, "share")
    whole = (flops + cost.attention_flops) / seconds / bench.product
    bench.add(case, "full_block_share_with_attention", whole, "share")
    bench.add(case, "tokens_per_second", measured.tokens_per_second(), "tokens/s")


def _slots(bench: Bench, batch: int, measured: BlockMeasured) -> float:
    """Mean number of slots that a row sees in a round: context, half of what is emitted, its own block."""
    emitted = sum(measured.tokens) / len(measured.tokens) / batch
    return bench.context + emitted / 2 + bench.block


def commit(bench: Bench) -> None:
    """Tokens per forward of whole answers with fused commits over those without, on the same traces."""
    batch = max((batch for batch in bench.batches if batch <= COMMIT_BATCH), default=min(bench.batches))
    fused = BlockArm(name="fused", stride=bench.block)
    load = bench.load(batch, bench.num_blocks * bench.block)
    for trace in bench.traces:
        found = []
        for arm in (fused, replace(fused, name="separate", fused=False)):
            answers = whole_answers(bench.model, arm, load, trace)
            free_cached_memory()
            found.append(answers)
            print(
                f"{arm.name} commits, trace {trace.name}: {answers.num_tokens} tokens in "
                f"{answers.num_passes} passes (by the trace {answers.num_expected}), {answers.seconds:.2f} s",
                flush=True,
            )
            case = {"batch": batch, "trace": trace.name, "fused_commit": arm.fused}
            detail, expected = answers.tokens_per_forward, answers.expected_tokens_per_forward
            bench.add(case, "tokens_per_forward", detail, "tokens", baseline=expected)
        gain = found[0].tokens_per_forward / found[1].tokens_per_forward
        expected = found[0].expected_tokens_per_forward / found[1].expected_tokens_per_forward
        case = {"batch": batch, "trace": trace.name, "blocks": bench.num_blocks}
        is_met = gain >= (1 - TOLERANCE) * expected
        bench.add(case, "fused_commit_tpf_gain", gain, "x", baseline=expected, gate_passed=is_met)
        bench.add(case, "fused_commit_time_gain", found[1].seconds / found[0].seconds, "x")


PARTS = {"full": full, "commit": commit}

if __name__ == "__main__":
    start(measure, __doc__)
