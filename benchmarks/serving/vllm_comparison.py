"""vLLM under the loads of `benchmarks.serve`, on the same GPU in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.bench import MAX_LENGTH, PROMPT_ROWS, STEADY_TURNS, Bench
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
MIXED, GREEDY = "mixed", "greedy"


@dataclass(slots=True, kw_only=True)
class Peer:
    """What vLLM did: output tokens per second by load and concurrency, seconds of the prompts alone by their
    number, and greedy answers of `jobs`."""

    engine: str
    rates: dict[tuple[str, int], float]
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
    """Put steady loads, and the mixed load of the highest concurrency, on vLLM, and add its rows."""
    maximum, prompt_rows = max(bench.concurrency), PROMPT_ROWS // bench.scale
    mixed, jobs = bench.mixed_load(maximum), dict[str, list[Job]]()
    for number in bench.concurrency if "steady" in bench.parts else ():
        jobs |= {f"{number}, {turn}": load.jobs for turn, load in enumerate(bench.steady_loads(number))}
    if MIXED in bench.parts:
        jobs[MIXED] = mixed.jobs
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
    peer = Peer(
        engine=case["engine"], rates={}, prefill={}, jobs=jobs[GREEDY], answers=loads[GREEDY]["token_ids"]
    )
    for number in bench.concurrency if "steady" in bench.parts else ():
        seconds = [loads[f"{number}, {turn}"]["seconds"] for turn in range(sum(STEADY_TURNS))]
        peer.prefill[number], peer.rates["steady", number] = bench.steady_rate(number, seconds)
        own = {**case, **bench.prefill_case(number)}
        bench.add(own, "prefill_s", peer.prefill[number], "s", gate_passed=is_complete)
    if MIXED in bench.parts:
        peer.rates[MIXED, maximum] = sum(loads[MIXED]["num_tokens"]) / loads[MIXED]["seconds"]
    for (load, number), rate in peer.rates.items():
        own = {**case, "load": load, "concurrency": number}
        bench.add(own, "output_tokens_per_s", rate, "tokens/s", gate_passed=is_complete)
    return peer


def _request(job: Job) -> tuple[list[int], int]:
    assert isinstance(job.prompt, list) and job.params.max_tokens is not None
    return job.prompt, job.params.max_tokens


def compare(
    bench: Bench, peer: Peer, decoder: str, engine: Engine, rates: dict[tuple[str, int], float]
) -> None:
    """Add what an engine's rates are over vLLM's; AR is checked first."""
    if decoder == "ar":
        peer.check(engine, bench.options["dtype"])
    for (load, number), rate in rates.items():
        case = {"engine": "idlm", "decoder": decoder, "load": load, "concurrency": number}
        bench.add(case, "over_vllm", rate / peer.rates[load, number], "x", gate_passed=peer.agrees)
