"""FOCUS against full blocks on one GPU, each replaying its own trace of what a pass decides.

    python -m benchmarks.eviction [batch=1,16,32,64,128,256] [context=1024,4096] [block=32]
        [commit=clean,unfrozen] [trace=synthetic] [parts=gate,throughput] [rounds=2] [passes=24]
        [warmup=auto] [figures=FOLDER]
    python -m benchmarks.eviction parts=toggles,host_wait batch=16,128 context=1024
    python -m benchmarks.eviction parts=host batch=1,128 context=1024
    python -m benchmarks.eviction parts=selection batch=1,128 context=1024
    python -m benchmarks.eviction parts=mage context=32768 batch=max k=1024

SDAR-8B's shape with random weights and random KV; every sequence is at another step of its block, and blocks
are decided at the same threshold in both arms. `trace` is a file of `benchmarks.decodability`, or `synthetic`
(drawn). All kernels run on real queries and keys; then the trace's deltas and places replace what they found.
First the gate: with a budget of the whole block the logits are those of full blocks. `throughput` measures
full blocks and FOCUS, each after the warm-up of a server (`warmup`: auto, full or off), and compares with the
limit that follows from the trace's rows and the rates of this run. `toggles` leaves out one part at a time,
and all that is not of FOCUS itself. `host_wait` is this engine's FOCUS without graphs and with a wait of the
host in every pass. `host` counts waits of the host and the GPU's idle share. `selection` prints the kernels
of a full pass and one of FOCUS by name. `mage` compares neither, each alone and both over long contexts.
Every cell prints as it ends; a table is last.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.engine.decoding.harness import SAMPLING, random_model
from benchmarks.engine.decoding.host import host_cost
from benchmarks.engine.kernel_profile import kernel_times, lines_of
from benchmarks.engine.unmasking.bench import Bench
from benchmarks.engine.unmasking.figures import draw_eviction
from benchmarks.engine.unmasking.harness import (
    GATE_LIMIT,
    NO_EVICTION,
    EvictionArm,
    SteadyTrace,
    Window,
    implied_rows,
    parity_error,
)
from benchmarks.engine.unmasking.limit import linear_flops
from benchmarks.engine.unmasking.synthetic import SYNTHETIC, synthetic_trace
from benchmarks.engine.unmasking.trace import TRACES, UnmaskTrace, read_trace
from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows
from benchmarks.stream import matmul_rate, stream_rate
from idlm.cli import command
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.infer.models.loader import DTYPES

DEFAULTS = {
    "model": "qwen3-8b",
    "device": "cuda",
    "dtype": "bfloat16",
    "batch": "1,16,32,64,128,256",
    "context": "1024,4096",
    "block": "32",
    "commit": "clean,unfrozen",
    "trace": SYNTHETIC,
    "k": "1024",
    "exact_layers": "2",
    "parts": "gate,throughput",
    "rounds": "2",
    "passes": "24",
    "warmup": "auto",
    "figures": "",
    "record": "true",
    "results": str(RESULTS),
}
COMMITS = ("clean", "unfrozen")
MAX_LOST = 0.05
"""Share of passes in which sequences may store a block or wait, beside those of the trace."""
GATE_CONTEXT = 448
SELECTION_KERNELS = (
    *("importance_kernel", "select_kernel", "spread_kernel", "find_kernel", "count_kernel", "place_kernel"),
    *("gather_kernel", "wanted_kernel"),
)


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Run the parts that the arguments name; returns the exit status, 1 if the gate fails."""
    options = parse_options(arguments, DEFAULTS)
    parts, commits = options["parts"].split(","), options["commit"].split(",")
    if not set(parts) <= set(PARTS) or not set(commits) <= set(COMMITS):
        raise UserError(
            "IDLM-0107",
            f"parts={options['parts']} commit={options['commit']}",
            fix=f"use parts of {', '.join(PARTS)} and commits of {', '.join(COMMITS)}",
        )
    sizes = [int(size) for size in options["block"].split(",")]
    traces = {size: trace_of(options["trace"], size) for size in sizes}
    if options["device"].startswith("cuda") and not torch.cuda.is_available():
        raise UserError("IDLM-0543", "no CUDA device", fix="run benchmarks.eviction on a GPU")
    bench = _bench(options, traces[sizes[0]])
    for size in sizes:
        semantics = replace(bench.model.semantics, block_size=size)
        bench.model, bench.trace = replace(bench.model, semantics=semantics), traces[size]
        bench.gate = None
        describe(bench)
        for context in map(int, options["context"].split(",")):
            bench.context = context
            for part in parts:
                # The gate is the same for all contexts; nothing is measured after one that fails.
                if bench.gate is None or (bench.gate and part != "gate"):
                    PARTS[part](bench)
    print("\n".join(bench.table))
    if options["record"] == "true":
        append_rows("eviction", bench.rows, results=Path(options["results"]))
    if options["figures"]:
        print(*draw_eviction(Path(options["results"]), Path(options["figures"])), sep="\n")
    return int(any(row["gate_passed"] is False for row in bench.rows))


def trace_of(name: str, block_size: int) -> UnmaskTrace:
    """The drawn trace, one of benchmarks/traces, or a file; UserError IDLM-0110."""
    if name == SYNTHETIC:
        return synthetic_trace(block_size)
    path = Path(name) if Path(name).suffix else TRACES / f"{name}.jsonl"
    if not path.is_file():
        known = sorted(found.stem for found in TRACES.glob("*.jsonl"))
        raise UserError("IDLM-0110", f"no trace {name!r}", fix=f"use some of {[SYNTHETIC, *known]} or a file")
    return read_trace(path, block_size)


def _bench(options: dict[str, str], trace: UnmaskTrace) -> Bench:
    """Measure stream and product and create the model."""
    device = options["device"]
    stream, product = stream_rate(device=device), matmul_rate(device=device)
    print(f"read-only stream {stream / 1e12:.3f} TB/s, bf16 product {product / 1e12:.1f} TFLOP/s", flush=True)
    start, dtype = time.perf_counter(), DTYPES[options["dtype"]]
    model = random_model(options["model"], device=device, dtype=dtype, block_size=trace.block_size)
    print(f"random weights of {options['model']} after {time.perf_counter() - start:.1f} s", flush=True)
    return Bench(model=model, stream=stream, product=product, options=options, trace=trace)


def describe(bench: Bench) -> None:
    """Print what the trace implies."""
    trace = bench.trace
    print(f"trace {trace.name}, blocks of {trace.block_size}: {trace.source}, threshold {trace.threshold}")
    for arm in (bench.full, *(bench.focus(commit) for commit in COMMITS)):
        rows = implied_rows(trace, arm)
        print(
            f"    {arm.name} {arm.commit}: {rows.tokens:.3f} tokens a pass; rows a token "
            f"{rows.prefix_per_token:.2f} in layers 0-1, {rows.suffix_per_token:.2f} behind, head "
            f"{rows.head / rows.tokens:.2f}",
            flush=True,
        )


def gate(bench: Bench) -> None:
    """Compare logits at a budget of the whole block with those of full blocks, over a short context."""
    context, bench.context = bench.context, min(GATE_CONTEXT, bench.context)
    load = replace(bench.load(2), sampling=SAMPLING["greedy"])
    error = parity_error(bench.model, bench.full, load, bench.trace)
    free_cached_memory()
    bench.gate = error < GATE_LIMIT
    bench.add(bench.case(2), "full_budget_error", error, "share")
    bench.context = context


def throughput(bench: Bench) -> None:
    """Full blocks, and FOCUS with each kind of commit, for every batch."""
    for batch in bench.batches():
        full = bench.window(bench.warm(bench.full), batch)
        _notes(bench, bench.full, full)
        base, base_limit = bench.speed(bench.full, full), bench.limit(bench.full, batch)
        rows = implied_rows(bench.trace, bench.full)
        share = linear_flops(bench.model, rows, batch=batch) / (full.step_ms / 1e3) / bench.product
        bench.add(bench.case(batch), "full_block_share_of_matmul", share, "share")
        for commit in bench.options["commit"].split(","):
            arm = bench.focus(commit)
            found = bench.window(bench.warm(arm), batch)
            _notes(bench, arm, found)
            ratio, limit = bench.speed(arm, found) / base, bench.limit(arm, batch) / base_limit
            case = bench.case(batch, commit=commit)
            bench.add(case, "throughput_over_full_block", ratio, "x", floor=limit)
            bench.table.append(
                f"block {bench.trace.block_size:3d} context {bench.context:5d} batch {batch:4d} {commit:8s} "
                f"{full.step_ms:8.2f} -> {found.step_ms:7.2f} ms  {ratio:5.2f}x of {limit:5.2f}x "
                f"({ratio / limit:4.2f})  full at {share:4.2f} of matmul  waits "
                f"{100 * found.waiting_share:4.2f} %  padding {100 * found.padding_share:5.1f} %"
            )


def _notes(bench: Bench, arm: EvictionArm, found: Window) -> None:
    """The rows of one arm: speed, tokens of a pass, rows a token by part, waits, padding, graphs."""
    implied, evicts = implied_rows(bench.trace, arm), arm.alpha is not None
    more = {"arm": arm.name} | ({"commit": arm.commit} if evicts else {})
    case = bench.case(found.batch, **more)
    bench.add(
        case, "tokens_per_second", bench.speed(arm, found), "tokens/s", floor=bench.limit(arm, found.batch)
    )
    is_whole = found.traced_share > 1 - MAX_LOST
    traced = found.num_tokens / found.num_traced
    bench.add(case, "tokens_per_pass", found.tokens_per_pass, "tokens", baseline=traced, gate_passed=is_whole)
    bench.add(case, "step_ms", found.step_ms, "ms")
    rows = found.asked if evicts else found.computed
    parts = {
        "prefix": (rows.fed, implied.prefix_per_token),
        "suffix": (rows.kept, implied.suffix_per_token),
        "head": (rows.head, implied.head / implied.tokens),
    }
    for part, (num_rows, expected) in parts.items():
        value = num_rows / found.num_tokens
        bench.add(case | {"part": part}, "rows_per_token", value, "rows", baseline=expected)
    if evicts:
        bench.add(case, "waiting_share", found.waiting_share, "share")
        bench.add(case, "padding_share", found.padding_share, "share")
    bench.add(case, "graphs_captured", found.num_captured, "graphs")
    if found.ahead.num_graphs:
        bench.add(case, "graphs_captured_ahead", found.ahead.num_graphs, "graphs")
        bench.add(case, "graphs_captured_settling", found.num_settling, "graphs")
        bench.add(case, "warm_up_seconds", found.ahead.seconds, "s")
        bench.add(case, "warm_up_memory", found.ahead.num_bytes / 1e9, "GB")


TOGGLES: dict[str, Callable[[EvictionArm], EvictionArm]] = {
    "run_ahead_of_host": lambda arm: replace(arm, num_inflight_steps=0),
    "graphs": lambda arm: replace(arm, graphs=False),
    "kept_row_head": lambda arm: replace(arm, has_head_room=False),
    "dc+": lambda arm: replace(arm, stability="plain"),
    "dc": lambda arm: replace(arm, stability="off"),
    "eviction": lambda arm: replace(arm, alpha=NO_EVICTION),
    "kernels": lambda arm: replace(arm, has_kernels=False),
    "all_of_the_engine": lambda arm: replace(
        arm, graphs=False, num_inflight_steps=0, has_head_room=False, has_kernels=False
    ),
}
"""What each toggle leaves out of FOCUS. `dc+` freezes without regard to neighbours, `dc` nothing."""


def toggles(bench: Bench) -> None:
    """What each toggle is worth, alone: speed with all parts over speed without it."""
    for batch in bench.batches():
        arm = bench.focus()
        base = bench.speed(arm, bench.window(arm, batch))
        for name, without in TOGGLES.items():
            chosen = replace(without(arm), name=f"without {name}")
            gain = base / bench.speed(chosen, bench.window(chosen, batch))
            bench.add(bench.case(batch, toggle=name), "toggle_gain", gain, "x")
            bench.table.append(f"context {bench.context:5d} batch {batch:4d} {name:20s} {gain:5.2f}x")


def host_wait(bench: Bench) -> None:
    """FOCUS over itself without graphs and with a wait of the host in every pass."""
    for batch in bench.batches():
        arm = bench.focus()
        slow = replace(arm, name="host wait", graphs=False, num_inflight_steps=0)
        speeds = [bench.speed(each, bench.window(each, batch)) for each in (arm, slow)]
        bench.add(bench.case(batch), "over_host_wait", speeds[0] / speeds[1], "x")
        bench.table.append(
            f"context {bench.context:5d} batch {batch:4d} over host wait {speeds[0] / speeds[1]:5.2f}x"
        )


def host(bench: Bench) -> None:
    """Passes per wait of the host, and the idle share of the GPU."""
    for batch in bench.batches():
        steady = SteadyTrace(bench.model, bench.focus(), bench.load(batch), bench.trace)
        cost = host_cost(steady, int(bench.options["rounds"]) * bench.passes(batch))
        bench.free(steady)
        bench.add(bench.case(batch), "steps_per_host_sync", cost.passes_per_wait, "steps")
        bench.add(bench.case(batch), "gpu_idle_share", cost.idle_share, "share")


def selection(bench: Bench) -> None:
    """Kernels of both arms by name, and the share of importance, selection and compaction in a pass: their
    kernels, and what small kernels take beyond those of full blocks.
    """
    for batch in bench.batches():
        small, total, chosen = [], 0.0, 0.0
        for arm in (bench.full, bench.focus()):
            steady = SteadyTrace(bench.model, arm, bench.load(batch), bench.trace)
            with steady.toggled():
                steady.reach_steady_state(bench.passes(batch))
                times = kernel_times(steady, int(bench.options["passes"]))
                steady.abort_all()
            bench.free(steady)
            print(f"profile of {arm.name}, batch {batch}, contexts of {bench.context}")
            print("\n".join(lines_of(times, {})), flush=True)
            named = [time for time in times if any(name in time.name for name in SELECTION_KERNELS)]
            chosen, total = sum(time.ms for time in named), sum(time.ms for time in times)
            small.append(sum(time.ms for time in times if time.kind == "small" and time not in named))
        share = (chosen + max(0.0, small[1] - small[0])) / total
        bench.add(bench.case(batch), "selection_share", share, "share")
        bench.table.append(f"batch {batch:4d} selection share {100 * share:5.2f} % of {total:.2f} ms")


def mage(bench: Bench) -> None:
    """Neither, FOCUS, MAGE, and both."""
    k, exact_layers = int(bench.options["k"]), int(bench.options["exact_layers"])
    for batch in bench.batches():
        speeds = {}
        for name, base in (("neither", bench.full), ("focus", bench.focus())):
            for mage_k in (None, k):
                label = name if mage_k is None else f"{name}+mage"
                arm = replace(base, name=label, mage_k=mage_k, exact_layers=exact_layers)
                speeds[label] = bench.speed(arm, bench.window(arm, batch))
                case = bench.case(batch, k=k, arm=label)
                bench.add(case, "tokens_per_second", speeds[label], "tokens/s")
        both, better = speeds["focus+mage"], max(speeds["focus"], speeds["neither+mage"])
        case = bench.case(batch, k=k)
        bench.add(case, "focus_mage_over_better", both / better, "x")
        bench.add(case, "focus_mage_over_neither", both / speeds["neither"], "x")
        bench.table.append(
            f"context {bench.context} batch {batch}: both over the better {both / better:.2f}x, over neither "
            f"{both / speeds['neither']:.2f}x"
        )


PARTS: dict[str, Callable[[Bench], None]] = {
    "gate": gate,
    "throughput": throughput,
    "toggles": toggles,
    "host_wait": host_wait,
    "host": host,
    "selection": selection,
    "mage": mage,
}

if __name__ == "__main__":
    sys.exit(main())
