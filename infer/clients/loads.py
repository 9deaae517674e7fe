"""Loads: requests whose lengths are drawn, or whose prompts are text, and the times at which they arrive. The
same numbers give the same load, for every arm. An engine of this process answers one here, a server in
`http.py`; a request that fails is a record with an error.

Figures of a load are genai-bench's aggregated metrics under its names (seconds, tokens per second), and ours.
Names and formulas follow genai-bench 0.0.5 (docs/getting-started/metrics-definition.md). Ours are `itl`
(seconds between two chunks of an answer, each with one or more tokens, as `vllm bench serve` has it),
`tokens_per_forward` and `acceptance_rate`. `tpot` divides by tokens, so it compares decoders; `itl` is how
long a reader waits."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.files.paths import opened
from idlm.infer.cli.prompts import PromptLine, read_prompts, text_prompts
from idlm.tasks import TASKS

if TYPE_CHECKING:
    from idlm.infer.engine import Engine

FIRST_ID = 3
"""Lower ids are special tokens of many vocabularies."""
# Ranges of the mixed load in tokens.
MIXED_PROMPT, MIXED_ANSWER = (32, 2048), (64, 768)
WORDS = ("Mia", "has", "five", "nuts", "and", "Tom", "finds", "six", "pens", "but", "Lea", "has", "more")
NUM_PROBLEMS = 64
QUESTIONS = Path(__file__).with_name("questions.txt")
"""Questions and instructions of the kinds that people send, one a line."""
PERCENTILES = (25, 50, 75, 90, 95, 99)
METRICS = (
    *("ttft", "tpot", "e2e_latency", "output_latency", "output_inference_speed", "num_input_tokens"),
    *("num_output_tokens", "total_tokens", "input_throughput", "output_throughput"),
)


class Job(NamedTuple):
    """One request: token ids, or for the chat template a text or messages, and what is requested for it."""

    prompt: Any
    params: SamplingParams

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages of a prompt that is a conversation; else empty."""
        return [turn for turn in self.prompt if isinstance(turn, dict)]

    def backwards(self, params: SamplingParams, length: int | None = None) -> Job:
        """The same with the end of its prompt backwards, at most `length` of it, which no cache holds."""
        if not self.turns:
            return Job(self.prompt[::-1][:length], params)
        *before, last = self.turns
        return Job([*before, {**last, "content": last["content"][::-1][:length]}], params)


class Load(NamedTuple):
    """Jobs, and how they come: `concurrency` at a time (closed loop), else at `arrivals`, in seconds from the
    start (open loop). `scenario` is genai-bench's name: D(input,output) for fixed lengths."""

    scenario: str
    jobs: list[Job]
    concurrency: int | None = None
    rate: float | None = None
    arrivals: Sequence[float] = ()


def mixed_lengths(num: int, *, scale: int = 1, rng: random.Random) -> list[tuple[int, int]]:
    """Tokens of prompts (log-normal) and answers (uniform), divided by `scale`."""
    (minimum, maximum), (shortest, longest) = MIXED_PROMPT, MIXED_ANSWER
    prompts = [max(minimum, min(maximum, int(rng.lognormvariate(5.9, 0.8)))) // scale for _ in range(num)]
    answers = [rng.randrange(shortest, longest + 1) // scale for _ in range(num)]
    return [(max(prompt, 1), max(answer, 1)) for prompt, answer in zip(prompts, answers)]


def make_jobs(
    lengths: Sequence[tuple[int, int]],
    params: SamplingParams,
    *,
    ids: range,
    rng: random.Random,
    is_chat: bool = False,
) -> list[Job]:
    """Jobs with prompts of these lengths, token ids out of `ids` or words; their seeds are their numbers."""
    jobs = []
    for seed, (length, max_tokens) in enumerate(lengths):
        prompt: list[int] | str = [rng.randrange(ids.start, ids.stop) for _ in range(length)]
        if is_chat:
            prompt = " ".join(rng.choice(WORDS) for _ in range(length))
        jobs.append(Job(prompt, dataclasses.replace(params, max_tokens=max_tokens, seed=seed)))
    return jobs


def poisson_arrivals(num: int, rate: float, *, rng: random.Random) -> list[float]:
    """Times of `num` arrivals at `rate` per second; the first one is at once."""
    gaps = (rng.expovariate(rate) for _ in range(num - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


def load_prompts(source: str) -> list[Any]:
    """Each prompt is a text (one turn of a user), token ids, or messages. `source`: `text`, the name of a
    task, or a file of JSON lines (as for `idlm-generate`) or with a text in each line. Raises UserError
    IDLM-0706 for anything else, and the UserErrors of `read_prompts`."""
    if source in TASKS.names():
        task = TASKS.get(source)(level="tiny", seed=1)
        return [task.sample(number, "test").prompt for number in range(NUM_PROBLEMS)]
    path = QUESTIONS if source == "text" else Path(source)
    fix = f"give random, text, a task ({', '.join(sorted(TASKS.names()))}), or a file with prompts alone"
    lines = _read(path, fix) if path.is_file() else []
    own = [line.location for line in lines if line.params != SamplingParams()]
    if own or not lines:
        what = f"{own[0]} has sampling settings" if own else f"prompts={source} is no file with prompts"
        raise UserError("IDLM-0706", what, fix=fix)
    return [line.prompt for line in lines]


def _read(path: Path, fix: str) -> list[PromptLine]:
    with opened("IDLM-0706", path, key="prompts", fix=fix) as file:
        texts = [text for line in file if (text := line.decode("utf-8-sig").strip())]
    if texts and texts[0].startswith("{"):
        return list(read_prompts(str(path), SamplingParams(), drop_last_turn=True, carry_keys=True))
    return list(text_prompts(texts, SamplingParams(), location=f"prompts={path}, prompt"))


OnDone = Callable[[int], None]
"""Called with the number of requests that are finished."""


@dataclass(slots=True)
class Record:
    """One request: when it was sent, when its chunks arrived (seconds of one clock), and the server's
    counts."""

    start: float
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_forwards: int | None = None
    num_accepted: int | None = None
    num_tested: int | None = None
    error: str | None = None
    error_code: int = 0


def run_on_engine(
    engine: Engine, load: Load, *, streams: bool = True, on_done: OnDone = lambda _: None
) -> list[Record]:
    """Records of a load on an engine. `streams`: answers become text as they come, as a server's do."""
    waiting, records = deque(enumerate(load.jobs)), dict[str, Record]()
    num_active = 0
    start = time.perf_counter()
    while waiting or num_active:
        while waiting and _is_due(load, waiting[0][0], num_active, time.perf_counter() - start):
            number, job = waiting.popleft()
            name = f"load-{number}"
            # In an open loop a request waits from its arrival on, also while a pass is under way.
            begin = start + load.arrivals[number] if load.arrivals else time.perf_counter()
            record = records[name] = Record(begin)
            try:
                engine.add_request(name, job.prompt, job.params, streams=streams)
                num_active += 1
            except UserError as error:
                record.end, record.error = time.perf_counter(), str(error)
        if not num_active:
            if waiting:
                time.sleep(max(0.0, start + load.arrivals[waiting[0][0]] - time.perf_counter()))
            continue
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            record = records[event.request_id]
            if event.token_ids:
                record.times.append(now)
            if (done := event.completion) is not None:
                record.end, record.error = now, done.error
                record.num_input_tokens = done.num_prompt_tokens
                record.num_output_tokens = len(done.token_ids)
                record.num_forwards = done.num_forwards
                record.num_accepted = sum(done.accepted_by_position)
                record.num_tested = sum(done.tested_by_position)
                num_active -= 1
        on_done(len(records) - num_active)
    return list(records.values())


def _is_due(load: Load, number: int, num_active: int, seconds: float) -> bool:
    if load.concurrency is not None:
        return num_active < load.concurrency
    return load.arrivals[number] <= seconds


def stat_field(values: Iterable[float]) -> dict[str, float | None]:
    """Minimum, maximum, mean, standard deviation, sum and percentiles (linear); all None without values."""
    # Help must not wait for it.
    import numpy as np

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
