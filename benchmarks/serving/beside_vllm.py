"""vLLM under the loads of `benchmarks.serve`, on the same GPU in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.bench import Bench
from benchmarks.serving.vllm_peer import run_vllm
from idlm.errors import UserError
from idlm.infer.clients.arms import (
    ROUNDING,
    ROUNDING_OF_16_BITS,
    Greedy,
    check_parity,
    greedy_jobs,
    to_greedy,
)
from idlm.infer.clients.loads import Job
from idlm.infer.engine import Engine

PARITY = {"num": 16, "num_prompt_tokens": 64, "num_tokens": 32}
STEADY_NAMES = ("steady short", "steady long")
MAX_LENGTH, PROMPT_ROWS = 4096, 8192
GREEDY = "greedy"
PREFILL_TURNS = 2
"""The first one finds kernels that are not compiled yet."""


@dataclass(slots=True, kw_only=True)
class Peer:
    """What vLLM did: output tokens per second by load, seconds of the part `prefill` by prompts, and greedy
    answers of `jobs`."""

    engine: str
    rates: dict[str, float]
    prefill: dict[int, float]
    jobs: Sequence[Job]
    answers: list[list[int]]
    agrees: bool = False

    def check(self, engine: Engine, dtype: str) -> None:
        """The gate: an AR engine's greedy answers are vLLM's, up to choices that rounding decides."""
        done = engine.generate([job.prompt for job in self.jobs], [job.params for job in self.jobs])
        theirs = [Greedy(tuple(answer), ()) for answer in self.answers]
        try:
            rounding = ROUNDING.get(dtype, ROUNDING_OF_16_BITS)
            num = check_parity(list(map(to_greedy, done)), theirs, rounding=rounding)
        except UserError as error:
            print(error)
            return
        self.agrees = True
        print(f"{num} greedy tokens agree with vLLM's", flush=True)


def measure_vllm(bench: Bench) -> Peer:
    """Put the loads of the highest concurrency on vLLM, and add its rows."""
    maximum, prompt_rows = max(bench.concurrency), PROMPT_ROWS // bench.scale
    if "steady" in bench.parts and bench.settings.get("max_num_batched_tokens") != prompt_rows:
        fix = f"add settings=max_num_batched_tokens={prompt_rows}: then prompts cancel in both engines"
        raise UserError("IDLM-0107", "steady decoding beside vLLM needs its prompt rows a pass", fix=fix)
    mixed, steady = bench.mixed_load(maximum), bench.steady_loads(maximum)
    jobs: dict[str, list[Job]] = {}
    if "mixed" in bench.parts:
        jobs["mixed"] = mixed.jobs
    if "steady" in bench.parts:
        jobs |= {name: load.jobs for name, load in zip(STEADY_NAMES, steady, strict=True)}
    if "prefill" in bench.parts:
        jobs |= {
            f"prefill {number} {turn}": bench.steady_loads(number)[0].jobs
            for number in bench.concurrency
            for turn in range(PREFILL_TURNS)
        }
    jobs[GREEDY] = greedy_jobs(mixed.jobs, **PARITY)
    requests = {name: list(map(_request, each)) for name, each in jobs.items()}
    found = run_vllm(
        bench.options["vllm"],
        bench.path,
        requests,
        greedy=[GREEDY],
        dtype=bench.options["dtype"],
        max_num_seqs=maximum,
        max_model_len=MAX_LENGTH // bench.scale,
        max_num_batched_tokens=prompt_rows,
    )
    loads = found["loads"]
    is_complete = all(
        loads[name]["num_tokens"] == [number for _, number in each] for name, each in requests.items()
    )
    case: dict[str, Any] = {"engine": f"vllm {found['version']}", "decoder": "ar"}
    case["max_num_batched_tokens"] = prompt_rows
    bench.add(case, "ready_s", found["load_s"], "s")
    rates = _rates(loads, bench.steady_tokens)
    for name, rate in rates.items():
        own = {**case, "load": name, "concurrency": maximum}
        bench.add(own, "output_tokens_per_s", rate, "tokens/s", gate_passed=is_complete)
    prefill = dict[int, float]()
    for number in bench.concurrency if "prefill" in bench.parts else ():
        seconds = [loads[f"prefill {number} {turn}"]["seconds"] for turn in range(PREFILL_TURNS)]
        prefill[number] = min(seconds)
        own = {**case, **bench.prefill_case(number)}
        bench.add(own, "prefill_s", prefill[number], "s", gate_passed=is_complete)
    answers = loads[GREEDY]["token_ids"]
    return Peer(engine=case["engine"], rates=rates, prefill=prefill, jobs=jobs[GREEDY], answers=answers)


def _request(job: Job) -> tuple[list[int], int]:
    assert isinstance(job.prompt, list) and job.params.max_tokens is not None
    return job.prompt, job.params.max_tokens


def _rates(loads: dict[str, Any], steady_tokens: int) -> dict[str, float]:
    """Output tokens per second by load."""
    rates = {}
    if "mixed" in loads:
        rates["mixed"] = sum(loads["mixed"]["num_tokens"]) / loads["mixed"]["seconds"]
    if STEADY_NAMES[0] in loads:
        short, long = (loads[name] for name in STEADY_NAMES)
        taken = long["seconds"] - short["seconds"]
        rates["steady"] = len(short["num_tokens"]) * steady_tokens / taken
    return rates


def compare(bench: Bench, peer: Peer, decoder: str, engine: Engine, rates: dict[str, float]) -> None:
    """Add what an engine's rates are over vLLM's; AR is checked first."""
    if decoder == "ar":
        peer.check(engine, bench.options["dtype"])
    for load, rate in rates.items():
        case = {"engine": "idlm", "decoder": decoder, "load": load, "concurrency": max(bench.concurrency)}
        ratio = rate / peer.rates[load]
        bench.add(case, "over_vllm", ratio, "x", gate_passed=peer.agrees)
