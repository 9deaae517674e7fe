"""Figures of a load: genai-bench's aggregated metrics under its names (seconds, tokens per second), and ours.

Names and formulas follow genai-bench 0.0.5 (docs/getting-started/metrics-definition.md). Ours are `itl`
(seconds between two chunks of an answer, each with one or more tokens, as `vllm bench serve` has it),
`tokens_per_forward` and `acceptance_rate`. `tpot` divides by tokens, so it compares decoders; `itl` says how
long a reader waits."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from idlm.infer.clients.loads import Load, Record

PERCENTILES = (25, 50, 75, 90, 95, 99)


def stat_field(values: Iterable[float]) -> dict[str, float | None]:
    """Minimum, maximum, mean, standard deviation, sum and percentiles (linear); all None without values."""
    array = np.fromiter(values, dtype=np.float64)
    if not len(array):
        return dict.fromkeys(("min", "max", "mean", "stddev", "sum", *(f"p{each}" for each in PERCENTILES)))
    plain = {"min": array.min(), "max": array.max(), "mean": array.mean(), "stddev": array.std()}
    cuts = zip(PERCENTILES, np.percentile(array, PERCENTILES), strict=True)
    named = plain | {"sum": array.sum()} | {f"p{each}": value for each, value in cuts}
    return {name: float(value) for name, value in named.items()}


def request_metrics(record: Record) -> dict[str, float]:
    """genai-bench's metrics of one request that is complete; rates without a duration are left out."""
    first, num = record.times[0] - record.start, record.num_output_tokens
    whole = record.end - record.start
    latency = whole - first
    metrics = {
        "ttft": first,
        "e2e_latency": whole,
        "output_latency": latency,
        "num_input_tokens": record.num_input_tokens,
        "num_output_tokens": num,
        "total_tokens": record.num_input_tokens + num,
    }
    if num > 1:
        metrics["tpot"] = latency / (num - 1)
    if num > 1 and latency > 0:
        metrics["output_inference_speed"] = metrics["output_throughput"] = (num - 1) / latency
    if first > 0:
        metrics["input_throughput"] = record.num_input_tokens / first
    return metrics


METRICS = (
    *("ttft", "tpot", "e2e_latency", "output_latency", "output_inference_speed", "num_input_tokens"),
    *("num_output_tokens", "total_tokens", "input_throughput", "output_throughput"),
)


def aggregate(records: Sequence[Record], load: Load) -> dict[str, Any]:
    """One JSON line: counts and rates of the load, and `stats` of its requests but those that failed."""
    # A stream without one chunk of tokens has no latency.
    done = [record for record in records if record.error is None and record.times]
    failed = [record for record in records if record.error is not None or not record.times]
    seconds = max(each.end for each in records) - min(each.start for each in records)
    requests = [request_metrics(record) for record in done]
    stats = {name: stat_field(each[name] for each in requests if name in each) for name in METRICS}
    gaps = (later - sooner for each in done for sooner, later in itertools.pairwise(each.times))
    num_input, num_output = (
        sum(each[f"num_{name}_tokens"] for each in requests) for name in ("input", "output")
    )
    codes = Counter(record.error_code for record in failed)
    return {
        "scenario": load.scenario,
        "num_concurrency": load.rate if load.concurrency is None else load.concurrency,
        "iteration_type": "num_concurrency",
        "batch_size": 1,
        "run_duration": seconds,
        "mean_output_throughput_tokens_per_s": num_output / seconds,
        "mean_input_throughput_tokens_per_s": num_input / seconds,
        "mean_total_tokens_throughput_tokens_per_s": (num_input + num_output) / seconds,
        "requests_per_second": len(done) / seconds,
        "error_codes_frequency": {str(code): num for code, num in codes.items()},
        "error_rate": len(failed) / len(records),
        "num_error_requests": len(failed),
        "num_completed_requests": len(done),
        "num_requests": len(records),
        "total_arrivals": len(records) if load.rate else None,
        "arrival_requests_per_second": load.rate,
        "stats": {**stats, "itl": stat_field(gaps)},
        "tokens_per_forward": _ratio(done, "num_output_tokens", "num_forwards"),
        "acceptance_rate": _ratio(done, "num_accepted", "num_tested"),
        "first_error": failed[0].error or "no tokens came" if failed else None,
    }


def _ratio(records: Sequence[Record], above: str, below: str) -> float | None:
    pairs = [(getattr(each, above), getattr(each, below)) for each in records]
    known = [(over, under) for over, under in pairs if over is not None and under is not None]
    total = sum(under for _, under in known)
    return sum(over for over, _ in known) / total if total else None
