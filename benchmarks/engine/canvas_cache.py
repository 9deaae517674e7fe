"""Caches of full diffusion on one GPU: a block pass against its floor, and answers against no cache.

    python -m benchmarks.canvas_cache [model=llada-8b] [canvas=8192] [answer=512] [block=32] [passes=10]
        [blocks=4] [caches=dual,prefix] [rounds=3] [graphs=true] [record=true]

One process measures the read-only stream, then runs the whole engine on random weights of the true shape with
one sequence, in CUDA graphs. The arm without a cache decides; the others replay its decisions
(canvas/harness.py). The floor of a block pass is the time to stream all weights and the KV of the canvas.
`speedup_over_none` compares the passes of the first `blocks` blocks, refreshes included; its limit has block
passes at their floor. `agreement_with_none`: share of the decided tokens that the arm itself would have
proposed, which on random weights says little about trained ones.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from benchmarks.engine.canvas.harness import (
    MODELS,
    CanvasEngine,
    CanvasLoad,
    CanvasMeasured,
    Decisions,
    random_canvas_model,
)
from benchmarks.engine.decoding.harness import slot_bytes, weights_of
from benchmarks.results import result_row
from benchmarks.shared import defaults, parse_options, save, start
from benchmarks.stream import stream_rate
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.infer.decoders.full_rows import CACHES
from idlm.infer.models.loader import DTYPES, LoadedModel

DEFAULTS = defaults(
    "model=llada-8b device=cuda dtype=bfloat16 canvas=8192 answer=512 block=32 passes=10 "
    "blocks=4 caches=dual,prefix rounds=3 graphs=true record=true"
)


def measure(arguments: list[str]) -> int:
    """Measure every cache beside none; returns the exit status."""
    options = parse_options(arguments, DEFAULTS)
    caches, load = options["caches"].split(","), _load(options)
    unknown = [cache for cache in caches if cache not in CACHES.names()]
    if unknown or options["model"] not in MODELS:
        raise UserError(
            "IDLM-0107",
            f"caches={options['caches']} model={options['model']}",
            fix=f"use caches of {CACHES.names()} and a model of {sorted(MODELS)}",
        )
    device = options["device"]
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            "IDLM-0543",
            "no CUDA device",
            fix="run benchmarks.engine.canvas_cache on a GPU, or give device=cpu",
        )
    stream, start = stream_rate(device=device), time.perf_counter()
    model = random_canvas_model(options["model"], device=device, dtype=DTYPES[options["dtype"]])
    seconds = time.perf_counter() - start
    print(f"read-only stream {stream / 1e12:.3f} TB/s; random weights after {seconds:.1f} s", flush=True)
    decisions = Decisions(load, model.device)
    rows: list[dict[str, Any]] = []
    none: CanvasMeasured | None = None
    for cache in (None, *caches):
        measured = _measured(model, load, cache, decisions, options)
        none = none or measured
        case = {"model": options["model"], "cache": cache or "none", "canvas": load.canvas}
        rows += _rows({**case, "block": load.block}, measured, none, floor_ms(model, load, stream))
    save("canvas_cache", rows, options)
    return 0


def _load(options: dict[str, str]) -> CanvasLoad:
    """UserError IDLM-0107 for an answer that has not so many blocks, or leaves no prompt."""
    load = CanvasLoad(
        canvas=int(options["canvas"]),
        answer=int(options["answer"]),
        block=int(options["block"]),
        passes=int(options["passes"]),
        num_blocks=int(options["blocks"]),
    )
    has_blocks = load.answer % load.block == 0 and load.num_blocks * load.block <= load.answer < load.canvas
    if not has_blocks or not 1 <= load.passes <= load.block:
        raise UserError(
            "IDLM-0107",
            f"canvas={load.canvas} answer={load.answer} block={load.block} passes={load.passes} "
            f"blocks={load.num_blocks}",
            fix="use an answer of whole blocks, at least `blocks` of them, shorter than the canvas, and at "
            "most one pass for each place of a block",
        )
    return load


def _measured(
    model: LoadedModel, load: CanvasLoad, cache: str | None, decisions: Decisions, options: dict[str, str]
) -> CanvasMeasured:
    """All rounds of one arm, after one that captures the graphs."""
    engine = CanvasEngine(model, load, cache, decisions, graphs=options["graphs"] == "true")
    measured = CanvasMeasured(load=load, reuse=engine.engine.decoder.kv_policy.reuse)
    engine.run()
    for _ in range(int(options["rounds"])):
        engine.measure(measured)
    del engine
    free_cached_memory()
    return measured


def floor_ms(model: LoadedModel, load: CanvasLoad, bytes_per_second: float) -> float:
    """Time to stream all weights and the KV of the canvas."""
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights_of(model))
    return 1e3 * (num_bytes + load.canvas * slot_bytes(model)) / bytes_per_second


def _rows(
    case: dict[str, Any], measured: CanvasMeasured, none: CanvasMeasured, floor: float
) -> list[dict[str, Any]]:
    """Result rows of one arm; printed as well."""
    load = measured.load
    num_passes = load.num_blocks * load.passes
    total, total_none = (median(sum(each) for each in one.rounds) for one in (measured, none))
    step_none = 1e3 * total_none / num_passes
    rows = []

    def add(metric: str, value: float, unit: str, **more: Any) -> None:
        exactness = "exact" if measured is none else "lossy"
        rows.append(result_row("canvas_cache", case, metric, value, unit, exactness=exactness, **more))
        detail = " ".join(f"{key} {number:.4g}" for key, number in more.items())
        print(f"{metric:20s} {value:10.4g} {unit:6s} {detail}  {case}", flush=True)

    if measured is none:
        add("step_ms", step_none, "ms")
        return rows
    block_passes, refreshes = _passes_of(measured)
    add("step_ms", 1e3 * median(block_passes), "ms", floor=floor)
    add("refresh_ms", 1e3 * median(refreshes), "ms", baseline=step_none)
    share = len(refreshes) / (len(refreshes) + len(block_passes))
    add("speedup_over_none", total_none / total, "x", floor=1 / (share + (1 - share) * floor / step_none))
    add("agreement_with_none", measured.num_equal / measured.num_replayed, "share")
    return rows


def _passes_of(measured: CanvasMeasured) -> tuple[list[float], list[float]]:
    """Seconds of the passes between refreshes, and of refreshes, over all rounds. Passes of an engine with a
    cache are not launched ahead.
    """
    passes, reuse = measured.load.passes, measured.reuse
    assert reuse is not None
    block_passes, refreshes = list[float](), list[float]()
    for seconds in measured.rounds:
        assert len(seconds) == measured.load.num_blocks * passes, f"{len(seconds)=}"
        for number, each in enumerate(seconds):
            (refreshes if reuse.refreshes(number % passes) else block_passes).append(each)
    return block_passes, refreshes


if __name__ == "__main__":
    start(measure, __doc__)
