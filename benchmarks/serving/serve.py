"""Mixed traffic through the public API: AR and ISD on one checkpoint, from the first request on.

    python -m benchmarks.serve [model=qwen3-8b] [path=DIR] [decoders=ar,isd] [concurrency=256,64,16,1]
        [stride=4] [trace=p0.90] [requests=N] [warmup=auto|full|off] [parts=mixed,steady,regret,profile,..]
        [settings=NAME=VALUE,...] [vllm=DIR] [record=true]

A load has up to 512 requests of 32 to 2,048 prompt tokens (log-normal) and 64 to 768 answer tokens, with so
many at a time. The first load of an engine is a cold start, the others are warm. The checkpoint has random
weights, so that a trace replaces the verdicts on drafts (decoding/replay.py). `passes.py` counts what Triton
compiled, eager passes, and times on host and device. `settings` are further settings of the engines.

`vllm=DIR`, a folder with vLLM, puts the loads of the highest concurrency on it first (vllm_peer.py); its
greedy answers must be AR's. Part `steady` decodes that many sequences at a time: the difference of two
lengths, so that prompts cancel as far as they are all stored at once. Part `regret` compares the stride
controller with each of its modes on sequences in mid-answer. Part `profile` prints kernel times
(load_profile.py). Part `structured` compares ISD of this stride with and without a JSON schema
(structured_load.py); a checkpoint in `path` without a tokenizer gets one.
"""

from __future__ import annotations

import contextlib
import gc
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.decoding.harness import MAX_STRIDE, MODELS
from benchmarks.engine.decoding.replay import Replay, replaying
from benchmarks.engine.decoding.trace import trace_of
from benchmarks.options import parse_options
from benchmarks.results import RESULTS
from benchmarks.serving import structured_load
from benchmarks.serving.bench import Bench, output_rate
from benchmarks.serving.beside_vllm import MAX_LENGTH, Peer, compare, measure_vllm
from benchmarks.serving.load_profile import print_profile
from benchmarks.serving.passes import Passes, watching
from idlm.cli import command
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.clients.generator import run_on_engine
from idlm.infer.clients.stats import aggregate
from idlm.infer.engine import Engine
from idlm.infer.models.loader import DTYPES
from idlm.semantics import Semantics

DEFAULTS = {
    "model": "qwen3-8b",
    "path": "",
    "device": "cuda",
    "dtype": "bfloat16",
    "decoders": "ar,isd",
    "concurrency": "256,64,16,1",
    "stride": "4",
    "trace": "p0.90",
    "requests": "",
    "warmup": "auto",
    "parts": "mixed",
    "settings": "",
    "vllm": "",
    "record": "true",
    "results": str(RESULTS),
}
PARTS = {"mixed", "steady", "regret", "structured", "profile"}
SHOWN = ("engine", "decoder", "load", "concurrency")
REGRET_PROMPT, REGRET_ROUNDS = 1024, 3
SETTLING_PASSES, UNTIMED_PASSES, TIMED_PASSES = 50, 4, 40
SUMMARY = (
    *("ready_s", "warm_up_seconds", "graphs_captured_ahead", "kernels_compiled", "output_tokens_per_s"),
    *("isd_over_ar", "over_vllm", "itl_p99_over_median", "graphs_captured_in_traffic", "graph_passes"),
    *("eager_passes", "graph_host_ms", "controller_regret"),
    *("eager_host_ms", "graph_device_ms", "eager_device_ms", "device_busy"),
    *("structured_over_unconstrained", "structured_pass_speed", "pass_ms"),
    *("wait_ms", "choice_ms", "choice_wait_ms", "bits_ms", "bits_wait_ms", "decide_ms"),
)


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Run every decoder and load that the arguments name; returns the exit status."""
    options = parse_options(arguments, DEFAULTS)
    if options["device"].startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            "IDLM-0543", "no CUDA device", fix="run benchmarks.serve on a GPU, or give device=cpu"
        )
    unknown = {*options["parts"].split(",")} - PARTS | {*options["decoders"].split(",")} - {"ar", "isd"}
    if unknown:
        fix = f"use parts of {','.join(sorted(PARTS))} and decoders of ar,isd"
        raise UserError("IDLM-0107", f"unknown {', '.join(sorted(unknown))}", fix=fix)
    with _checkpoint(options) as path:
        bench = Bench(options=options, path=path)
        peer = None
        if options["vllm"]:
            try:
                peer = measure_vllm(bench)
                bench.beside = {"beside": peer.engine}
            except UserError as error:
                # What is measured without vLLM is worth the GPU's time.
                print(error, flush=True)
        bench.save()
        for decoder in options["decoders"].split(","):
            _measure_decoder(bench, decoder, peer)
            bench.save()
            _free(options["device"])
    _print_summary(bench.rows)
    is_complete = peer is not None or not options["vllm"]
    return 0 if is_complete and all(row["gate_passed"] is not False for row in bench.rows) else 1


def _print_summary(rows: list[dict[str, Any]]) -> None:
    """The rows of `SUMMARY`, a line for each engine or load."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        if row["metric"] in SUMMARY:
            case = " ".join(str(row["case"][key]) for key in SHOWN if key in row["case"])
            lines.setdefault(case, []).append(f"{row['metric']} {row['value']:.4g}")
    print("", *(f"{case:20s} " + ", ".join(said) for case, said in lines.items()), sep="\n")


@contextlib.contextmanager
def _checkpoint(options: dict[str, str]) -> Iterator[Path]:
    """The checkpoint in `path`, made there first if there is none; without `path` in a temporary folder."""
    path = Path(options["path"] or tempfile.mkdtemp(prefix="idlm-serve-"))
    try:
        if not (path / "config.json").exists():
            _make(options, path)
        if "structured" in options["parts"].split(","):
            structured_load.add_vocabulary(path)
        yield path
    finally:
        if not options["path"]:
            shutil.rmtree(path, ignore_errors=True)


def _make(options: dict[str, str], path: Path) -> None:
    """A checkpoint of random weights that says it was converted."""
    import transformers

    start_time, shape = time.perf_counter(), MODELS[options["model"]]
    config = transformers.Qwen3Config(**shape, tie_word_embeddings=False, eos_token_id=None)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[options["dtype"]])
    try:
        with torch.device(options["device"]):
            model = transformers.Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.save_pretrained(path, max_shard_size="4GB")
    Semantics(mask_token_id=shape["vocab_size"] - 1, stride=MAX_STRIDE).save(path)
    del model
    _free(options["device"])
    print(
        f"random checkpoint of {options['model']} after {time.perf_counter() - start_time:.1f} s", flush=True
    )


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
        has_grammars = "structured" in options["parts"]
        settings |= {"stride": stride, "adaptive": not has_grammars}
        lanes, device = max(concurrency) + 1, torch.device(options["device"])
        trace = trace_of(options["trace"], stride)
        replay = Replay(trace, lanes, device, draws_from_p=has_grammars)
    with replaying(replay), watching() as passes:
        start_time = time.perf_counter()
        engine = Engine.from_pretrained(bench.path, decoder, **settings)
        ready_s, counted, ahead = time.perf_counter() - start_time, passes.take(), engine.metrics()
        found = {metric: value for metric, value, _ in counted}
        num_compiled, num_loaded = found["kernels_compiled"], found["kernels_loaded"]
        case = {
            "decoder": decoder,
            "warmup": options["warmup"],
            "kernel_cache": ("partly full" if num_loaded else "empty") if num_compiled else "full",
        }
        bench.add(case, "ready_s", ready_s, "s")
        for metric, unit in (("graphs_captured_ahead", "graphs"), ("warm_up_seconds", "s")):
            bench.add(case, metric, ahead[metric], unit)
        bench.add(case, "warm_up_bytes", ahead["warm_up_bytes"], "bytes")
        for row in counted:
            bench.add({**case, "part": "ready"}, *row)
        rates = _measure_engine(bench, decoder, engine, passes, replay)
        if peer is not None:
            compare(bench, peer, decoder, engine, rates)
        engine.close()


def _measure_engine(
    bench: Bench, decoder: str, engine: Engine, passes: Passes, replay: Replay | None
) -> dict[str, float]:
    """All loads, then what the controller loses. Returns output tokens per second of the loads with the
    highest concurrency.
    """
    concurrency, start, rates = bench.concurrency, "cold", dict[str, float]()
    if "mixed" in bench.parts:
        for number in concurrency:
            rate = _mixed(bench, decoder, engine, number, start, passes)
            bench.save()
            if number == max(concurrency):
                rates["mixed"] = rate
            start = "warm"
    if "steady" in bench.parts:
        rates["steady"] = _steady(bench, decoder, engine, max(concurrency))
    if "regret" in bench.parts and replay is not None:
        for number in concurrency:
            regret = _regret(bench, engine, number, replay)
            bench.add({"concurrency": number, "stride": int(bench.options["stride"])}, *regret)
    if "profile" in bench.parts:
        print_profile(bench, engine, max(concurrency))
    if "structured" in bench.parts and decoder == "isd":
        for number in concurrency:
            _structured(bench, engine, number)
    return rates


def _structured(bench: Bench, engine: Engine, concurrency: int) -> None:
    """ISD with a schema over ISD without."""
    stride, trace = int(bench.options["stride"]), bench.options["trace"]
    case = {"decoder": "isd", "concurrency": concurrency, "stride": stride, "trace": trace}
    found = structured_load.measure(engine, concurrency, bench.scale)
    for name, speed in found.items():
        own = {**case, "load": name}
        bench.add(own, "output_tokens_per_s", speed.rate, "tokens/s", gate_passed=speed.is_complete)
        bench.add(own, "tokens_per_forward", speed.tokens_per_pass, "tokens")
        bench.add(own, "pass_ms", 1e3 * speed.pass_s, "ms")
        bench.add(own, "graphs_captured_in_traffic", speed.num_captured, "graphs")
        for metric, value in speed.times_ms.items():
            bench.add(own, metric, value, "ms")
    is_complete = all(speed.is_complete for speed in found.values())
    free, structured = found["free"], found["structured"]
    ratio = structured.rate / free.rate
    bench.add(case, "structured_over_unconstrained", ratio, "x", gate_passed=is_complete)
    bench.add(case, "structured_pass_speed", free.pass_s / structured.pass_s, "x", gate_passed=is_complete)
    bench.save()


def _mixed(bench: Bench, decoder: str, engine: Engine, concurrency: int, start: str, passes: Passes) -> float:
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
    captured = engine.metrics()["graphs_captured_in_traffic"] - before
    bench.add(case, "graphs_captured_in_traffic", captured, "graphs")
    for row in passes.take():
        bench.add(case, *row)
    return rate


def _steady(bench: Bench, decoder: str, engine: Engine, concurrency: int) -> float:
    """Output tokens per second of as many sequences that all decode, and its row."""
    seconds = []
    for load in bench.steady_loads(concurrency):
        records = run_on_engine(engine, load, streams=False)
        seconds.append(max(record.end for record in records) - min(record.start for record in records))
    rate = concurrency * bench.steady_tokens / (seconds[1] - seconds[0])
    case = {"engine": "idlm", "decoder": decoder, "load": "steady", "concurrency": concurrency}
    bench.add(case, "output_tokens_per_s", rate, "tokens/s")
    return rate


class _FixedMode:
    """Takes one mode in place of the stride controller, which learns nothing meanwhile."""

    def __init__(self, mode: int) -> None:
        self.mode = mode

    def choose(self, load: object) -> int:
        return self.mode

    def observe(self, *_: object, **__: object) -> None:
        return

    observe_time = observe_drafts = observe_out_of_memory = observe


def _regret(bench: Bench, engine: Engine, concurrency: int, replay: Replay) -> tuple[str, float, str]:
    """By how much the controller is slower than its best mode, after `SETTLING_PASSES` passes of its own.

    Turns of a round have the same contexts and the same places of the trace: else contexts that grow, and at
    one sequence the luck of draws, are more than what is to be found.
    """
    controller: Any = engine._stride_controller
    arms = [controller, *(_FixedMode(mode) for mode in range(len(engine.decoder.modes)))]
    settling, timed = (max(2, num // bench.scale) for num in (SETTLING_PASSES, TIMED_PASSES))
    _start_contexts(bench, engine, concurrency)
    _timed(engine, settling)
    num_tokens, seconds = [0] * len(arms), [list[float]() for _ in arms]
    for number in range(REGRET_ROUNDS):
        for arm in range(len(arms)):
            engine._stride_controller = arms[arm]
            _start_contexts(bench, engine, concurrency)
            replay.restart(number)
            _timed(engine, UNTIMED_PASSES)
            emitted, took = _timed(engine, timed)
            num_tokens[arm] += emitted
            seconds[arm].append(took)
    engine._stride_controller = controller
    _abort_all(engine)
    rates = [tokens / statistics.median(times) for tokens, times in zip(num_tokens, seconds, strict=True)]
    return "controller_regret", 1 - rates[0] / max(rates[1:]), "fraction"


def _start_contexts(bench: Bench, engine: Engine, concurrency: int) -> None:
    """Replace all requests by so many in mid-answer, whose contexts count as computed."""
    _abort_all(engine)
    dice, kv_policy = random.Random(2), engine.decoder.kv_policy
    params = SamplingParams(max_tokens=1 << 20, ignore_eos=True, seed=0)
    for number in range(concurrency):
        prompt = [dice.choice(bench.ids) for _ in range(REGRET_PROMPT // bench.scale)]
        engine.add_request(f"regret-{number}", prompt, params)
        num_computed = kv_policy.num_computable(len(prompt)) - kv_policy.num_lookahead_tokens
        [request] = (one for one in engine.scheduler.waiting if one.request_id == f"regret-{number}")
        request.num_computed = num_computed


def _abort_all(engine: Engine) -> None:
    for request_id in list(engine._active):
        engine.abort(request_id)
    engine._collect(max_inflight=0)


def _timed(engine: Engine, num_passes: int) -> tuple[int, float]:
    """Tokens and seconds of so many passes, between two empty queues of passes."""
    engine._collect(max_inflight=0)
    engine._events.clear()
    start_time, num_tokens = time.perf_counter(), 0
    for _ in range(num_passes):
        num_tokens += sum(len(event.token_ids) for event in engine.step())
    engine._collect(max_inflight=0)
    num_tokens += sum(len(event.token_ids) for event in engine._events)
    engine._events.clear()
    return num_tokens, time.perf_counter() - start_time


def _free(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
