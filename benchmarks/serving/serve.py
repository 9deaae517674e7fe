"""Mixed traffic through the public API: AR and ISD on one checkpoint, from the first request on.

    python -m benchmarks.serve [model=qwen3-8b] [path=DIR] [decoders=ar,isd] [concurrency=256,64,16,1]
        [stride=4] [trace=p0.90] [requests=N] [warmup=auto|full|off] [parts=mixed,steady]
        [settings=NAME=VALUE,...] [vllm=DIR] [record=true]

It needs a GPU (`device=cpu model=tiny` is for tests). A load has up to 512 requests of 32 to 2,048 prompt
tokens (log-normal) and 64 to 768 answer tokens, with so many at a time. The first load of an engine is a cold
start, the others are warm. The checkpoint has random weights, so that a trace replaces the verdicts on drafts
(decoding/replay.py). `settings` are further settings of the engines.

Part `steady` decodes so many sequences at a time, by the difference of two lengths of answers: prompts cancel
as far as they are all stored at once. The time of the shorter one (the prompts and 33 tokens) is `prefill_s`.

`vllm=DIR`, a folder with vLLM, puts the steady loads, and the mixed load of the highest concurrency, on it
first (vllm_peer.py); its greedy answers must be AR's:

    python -m benchmarks.serve vllm=DIR model=qwen3-0.6b decoders=ar parts=mixed,steady \\
        concurrency=256,128,64,16,1"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.decoding.replay import Replay, replaying, trace_of
from benchmarks.engine.tensor_parallel import write_checkpoint
from benchmarks.serving.bench import MAX_LENGTH, Bench, output_rate
from benchmarks.serving.vllm_comparison import Peer, compare, measure_vllm
from benchmarks.shared import Report, chosen, defaults, parse_options, start
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.infer.clients.loads import aggregate, run_on_engine
from idlm.infer.engine import Engine
from idlm.infer.models.loader import DTYPES

DEFAULTS = defaults(
    "model=qwen3-8b path= device=cuda dtype=bfloat16 decoders=ar,isd concurrency=256,64,16,1 "
    "stride=4 trace=p0.90 requests= warmup=auto parts=mixed settings= vllm= record=true"
)
PARTS, DECODERS = ("mixed", "steady"), ("ar", "isd")


def measure(arguments: list[str]) -> int:
    """Run every decoder and load that the arguments name; returns the exit status."""
    options = parse_options(arguments, DEFAULTS, needs_gpu="serve")
    decoders, _ = chosen(options, "decoders", DECODERS), chosen(options, "parts", PARTS)
    with _checkpoint(options) as path:
        bench = Bench(options=options, path=path, report=Report("serve", options))
        peer = None
        if options["vllm"]:
            try:
                peer = measure_vllm(bench)
                bench.peer = {"beside": peer.engine}
            except UserError as error:
                # The rest is measured without vLLM.
                print(error, flush=True)
        for decoder in decoders:
            _measure_decoder(bench, decoder, peer)
            free_cached_memory()
    is_complete = peer is not None or not options["vllm"]
    return bench.report.status or int(not is_complete)


@contextlib.contextmanager
def _checkpoint(options: dict[str, str]) -> Iterator[Path]:
    """The checkpoint in `path`, made there first if there is none; without `path` in a temporary folder."""
    path = Path(options["path"] or tempfile.mkdtemp(prefix="idlm-serve-"))
    try:
        if not (path / "config.json").exists():
            write_checkpoint(path, options["model"], device=options["device"], dtype=DTYPES[options["dtype"]])
        yield path
    finally:
        if not options["path"]:
            shutil.rmtree(path, ignore_errors=True)


def _measure_decoder(bench: Bench, decoder: str, peer: Peer | None) -> None:
    """All parts with a fresh engine, and what starting it took; ISD with the trace's verdicts."""
    options = bench.options
    concurrency, stride = bench.concurrency, int(options["stride"])
    settings: dict[str, Any] = {
        "device": options["device"],
        "dtype": options["dtype"],
        "warmup": options["warmup"],
        "max_num_seqs": max(concurrency),
        "max_length": MAX_LENGTH // bench.scale,
        "prefix_cache": False,
        **bench.settings,
    }
    replay = None
    if decoder == "isd":
        settings |= {"stride": stride, "adaptive": True}
        lanes, device = max(concurrency) + 1, torch.device(options["device"])
        trace = trace_of(options["trace"], stride)
        replay = Replay(trace, lanes, device)
    with replaying(replay):
        start_time = time.perf_counter()
        engine = Engine.from_pretrained(bench.path, decoder, **settings)
        ready_s, metrics = time.perf_counter() - start_time, engine.metrics()
        case = {"decoder": decoder, "warmup": options["warmup"]}
        bench.add(case, "ready_s", ready_s, "s")
        for metric, unit in (("graphs_captured_ahead", "graphs"), ("warm_up_seconds", "s")):
            bench.add(case, metric, metrics[metric], unit)
        bench.add(case, "warm_up_bytes", metrics["warm_up_bytes"], "bytes")
        rates = _measure_engine(bench, decoder, engine, peer)
        if peer is not None:
            compare(bench, peer, decoder, engine, rates)
        engine.close()


def _measure_engine(
    bench: Bench, decoder: str, engine: Engine, peer: Peer | None
) -> dict[tuple[str, int], float]:
    """All loads. Returns output tokens per second by load and concurrency; with vLLM of its loads too."""
    start, rates = "cold", dict[tuple[str, int], float]()
    for number in bench.concurrency if "steady" in bench.parts else ():
        peer_prefill = None if peer is None else peer.prefill[number]
        rates["steady", number] = _steady(bench, decoder, engine, number, peer_prefill)
        start = "warm"
    for number in bench.concurrency if "mixed" in bench.parts else ():
        if peer is None or number == max(bench.concurrency):
            rates["mixed", number] = _mixed(bench, decoder, engine, number, start)
        start = "warm"
    return rates


def _mixed(bench: Bench, decoder: str, engine: Engine, concurrency: int, start: str) -> float:
    """One load, and its rows; returns output tokens per second."""
    load = bench.mixed_load(concurrency)
    before = engine.metrics()["graphs_captured_in_traffic"]
    records = run_on_engine(engine, load, streams=False)
    pairs = zip(records, load.jobs, strict=True)
    is_complete = all(record.num_output_tokens == job.params.max_tokens for record, job in pairs)
    figures = aggregate(records, load)
    rate, itl = output_rate(figures, records), figures["stats"]["itl"]
    case = {
        "engine": "idlm",
        "decoder": decoder,
        "load": "mixed",
        "concurrency": concurrency,
        "start": start,
        "warmup": bench.options["warmup"],
    }
    if decoder == "ar":
        bench.ar_rates[concurrency] = rate
    else:
        case |= {"stride": int(bench.options["stride"]), "trace": bench.options["trace"]}
    baseline = bench.ar_rates.get(concurrency)
    bench.add(case, "output_tokens_per_s", rate, "tokens/s", baseline=baseline, gate_passed=is_complete)
    if decoder != "ar" and baseline is not None:
        bench.add(case, "isd_over_ar", rate / baseline, "x", gate_passed=is_complete)
    bench.add(case, "itl_p99_over_median", itl["p99"] / itl["p50"], "x")
    bench.add(case, "ttft_ms", 1e3 * figures["stats"]["ttft"]["p50"], "ms")
    captured = engine.metrics()["graphs_captured_in_traffic"] - before
    bench.add(case, "graphs_captured_in_traffic", captured, "graphs")
    return rate


def _steady(bench: Bench, decoder: str, engine: Engine, number: int, peer_prefill: float | None) -> float:
    """Rows of so many prompts at once. With few tokens: their time, and that of half the first tokens; with
    many more: output tokens per second, returned. `peer_prefill`: vLLM's time of the prompts."""
    loads = bench.steady_loads(number)
    turns = [run_on_engine(engine, load, streams=False) for load in loads]
    seconds = [max(each.end for each in records) - records[0].start for records in turns]
    prefill, rate = bench.steady_rate(number, seconds)
    case = {"engine": "idlm", "decoder": decoder, **bench.prefill_case(number)}
    bench.add(case, "prefill_s", prefill, "s")
    best = seconds.index(prefill)
    ttft = aggregate(turns[best], loads[best])["stats"]["ttft"]
    bench.add(case, "ttft_ms", 1e3 * ttft["p50"], "ms")
    if peer_prefill is not None:
        bench.add(case, "prefill_over_vllm", prefill / peer_prefill, "x")
    case = {"engine": "idlm", "decoder": decoder, "load": "steady", "concurrency": number}
    bench.add(case, "output_tokens_per_s", rate, "tokens/s")
    return rate


if __name__ == "__main__":
    start(measure, __doc__)
