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

from statistics import median

from benchmarks.engine.canvas.harness import CanvasEngine, CanvasLoad, CanvasMeasured, Decisions
from benchmarks.models import model_of, slot_bytes, weight_bytes
from benchmarks.shared import Report, chosen, defaults, parse_options, start
from benchmarks.stream import stream_rate
from idlm.devices import free_cached_memory
from idlm.infer.decoders.full_rows import CACHES

DEFAULTS = defaults(
    "model=llada-8b device=cuda dtype=bfloat16 canvas=8192 answer=512 block=32 passes=10 "
    "blocks=4 caches=dual,prefix rounds=3 graphs=true record=true"
)
MODELS = {"llada-8b": "llada_8b", "dream-7b": "dream_7b", "tiny": "tiny_llada"}
"""Names of benchmarks/models.py by those of the option."""


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="canvas_cache")
    caches, [name] = chosen(options, "caches", CACHES.names()), chosen(options, "model", MODELS)
    load, report, stream = (
        _load(options),
        Report("canvas_cache", options),
        stream_rate(device=options["device"]),
    )
    model = model_of({**options, "model": MODELS[name]})
    # The limit of a pass streams all weights and the KV of the canvas.
    floor = 1e3 * (weight_bytes(model) + load.canvas * slot_bytes(model)) / stream
    decisions, none = Decisions(load, model.device), None
    for cache in (None, *caches):
        engine = CanvasEngine(model, load, cache, decisions, graphs=options["graphs"] == "true")
        measured = CanvasMeasured(load=load, reuse=engine.engine.decoder.kv_policy.reuse)
        engine.run()
        for _ in range(int(options["rounds"])):
            engine.measure(measured)
        del engine
        free_cached_memory()
        none = none or measured
        case = {"model": name, "cache": cache or "none", "canvas": load.canvas, "block": load.block}
        _add(report, case, measured, none, floor)
    return 0


def _load(options: dict[str, str]) -> CanvasLoad:
    load = CanvasLoad(
        canvas=int(options["canvas"]),
        answer=int(options["answer"]),
        block=int(options["block"]),
        passes=int(options["passes"]),
        num_blocks=int(options["blocks"]),
    )
    has_blocks = load.answer % load.block == 0 and load.num_blocks * load.block <= load.answer < load.canvas
    assert has_blocks and 1 <= load.passes <= load.block, f"{load}: not so many whole blocks and passes"
    return load


def _add(
    report: Report, case: dict[str, object], measured: CanvasMeasured, none: CanvasMeasured, floor: float
) -> None:
    load = measured.load
    total, total_none = (median(sum(each) for each in one.rounds) for one in (measured, none))
    step_none = 1e3 * total_none / (load.num_blocks * load.passes)
    if measured is none:
        report.add(case, "step_ms", step_none, "ms")
        return
    block_passes, refreshes = _passes_of(measured)
    report.add(case, "step_ms", 1e3 * median(block_passes), "ms", floor=floor, exactness="lossy")
    report.add(case, "refresh_ms", 1e3 * median(refreshes), "ms", baseline=step_none, exactness="lossy")
    share = len(refreshes) / (len(refreshes) + len(block_passes))
    minimum = 1 / (share + (1 - share) * floor / step_none)
    report.add(case, "speedup_over_none", total_none / total, "x", floor=minimum, exactness="lossy")
    agreement = measured.num_equal / measured.num_replayed
    report.add(case, "agreement_with_none", agreement, "share", exactness="lossy")


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
