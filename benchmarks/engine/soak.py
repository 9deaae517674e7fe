"""Stress tests: thousands of requests in a pool too small for them, and memory that runs out.

    python -m benchmarks.soak [requests=20000] [device=cuda] [shortages=100] [lanes=64] [num_inflight_steps=4]
                              [graphs=on] [record=true]
    python -m benchmarks.soak accelerator=mage requests=2000 shortages=0
    python -m benchmarks.soak accelerator=[focus,mage] requests=2000 shortages=0

A tiny model of random weights decodes with replayed acceptance, asynchronous steps, prefix cache and
preemption; a third of the requests are aborted. The page pool is checked every few passes and at the end:
pages without references that are not free are leaked. `shortages`: the n-th allocation on the device fails, n
= 1, 2, .., and no request may fail. Then the allocation after it fails too: one request must fail with a
clear error, and all others finish. An allocation is a torch operation that returns new memory, counted by a
dispatch mode; the outputs of Triton kernels are allocated by such operations. With an `accelerator` (or
several) the decoder is block diffusion, and every answer that ends by itself is compared with that of a run
without aborts in a pool with room for all. `waiting_share`: of all (sequence, pass) pairs those that found no
room."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.engine.decoding.replay import Replay, replaying, trace_of
from benchmarks.models import assembled, random_model
from benchmarks.shared import Report, defaults, parse_options, start
from idlm.contracts import Completion, SamplingParams
from idlm.infer.decoders.base import DECODERS, max_rows
from idlm.infer.engine import Engine
from idlm.infer.sparse.accelerator import ACCELERATORS
from tests.contracts.engines import Shortage
from tests.prefix_simulation import check_pages

STRIDE = 4
MAX_LENGTH, PAGE_SIZE = 192, 8
LONGEST_PROMPT, LONGEST_ANSWER = 100, 80
SHARE_OF_PAGES = 0.15
"""Pages in the pool, relative to the number that full lanes would need."""
MARKED_SHARE = 0.33
"""Share of requests marked for an abort; some of them finish first, so that 30 % are aborted."""
PASSES_BETWEEN_CHECKS = 50
BLOCK_SIZE, LISTED = 8, 16
SHARE_OF_EQUAL = 0.995
"""Least share of equal answers: random weights leave a near tie now and then, which rounding decides."""
SHORT_LOAD = 6
MAX_PASSES = 20_000
DEFAULTS = defaults(
    "requests=20000 device=cuda shortages=100 lanes=64 num_inflight_steps=4 graphs=on "
    "accelerator=none record=true"
)


@dataclass(slots=True, kw_only=True)
class Soaked:
    """How many requests ended, and how."""

    num_requests: int = 0
    num_done: int = 0
    num_aborted: int = 0
    num_tokens: int = 0
    num_checks: int = 0
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)

    def count(self, completion: Completion) -> None:
        self.num_done += 1
        self.num_tokens += len(completion.token_ids)
        reason = completion.finish_reason
        if reason != "abort":
            self.answers[completion.request_id] = completion.token_ids
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="soak")
    report = Report("soak", options)
    _add_soak(report, options)
    if int(options["shortages"]):
        _add_shortages(report, options)
    return report.status


def make_engine(
    options: dict[str, str], *, share_of_pages: float, adaptive: bool = True
) -> tuple[Engine, Replay | None]:
    """An engine with `share_of_pages` of the pages that full lanes need, and the trace to replay in it."""
    device, lanes = options["device"], int(options["lanes"])
    names = [name for name in options["accelerator"].strip("[]").split(",") if name != "none"]
    size = BLOCK_SIZE if names else None
    model = random_model("tiny", device=device, dtype=torch.float32, block_size=size)
    decoding: dict[str, Any] = {"stride": STRIDE, "rejection_strategy": "branch", "adaptive": adaptive}
    kinds = {name: ACCELERATORS.get(name) for name in names}
    thin = {"k": LISTED, "exact_layers": 1}
    accelerators = {name: kind.Config(**(thin if kind.side == "kv" else {})) for name, kind in kinds.items()}
    if size is not None:
        decoding = {"strategy": "low_confidence_static", "steps": BLOCK_SIZE // 2}
    chosen = DECODERS.get("isd" if size is None else "block")
    decoder = chosen(chosen.Config(**decoding), model.semantics)
    needed = -(-(MAX_LENGTH - 1 + max_rows(decoder, MAX_LENGTH)) // PAGE_SIZE)
    parts = assembled(
        model,
        decoder,
        accelerators,
        max_num_seqs=lanes,
        max_length=MAX_LENGTH,
        max_num_batched_tokens=256,
        page_size=PAGE_SIZE,
        num_pages=max(needed, int(share_of_pages * needed * lanes)),
        num_inflight_steps=int(options["num_inflight_steps"]),
        graphs="on" if options["graphs"] == "on" else "off",
    )
    engine = Engine(parts)
    replay = Replay(trace_of("p0.90", STRIDE), lanes + 1, engine.table.device) if size is None else None
    return engine, replay


class Arrivals:
    """Random requests, most of which share a prefix with others."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self._vocab_size = vocab_size
        self.given: list[tuple[list[int], SamplingParams]] = []
        self._beginnings = [self._tokens(length) for length in (0, 9, 24, 40, 70)]

    def _tokens(self, length: int) -> list[int]:
        return [self.rng.randrange(self._vocab_size - 1) for _ in range(length)]

    def request(self) -> tuple[list[int], SamplingParams]:
        self.given.append((self.prompt(), self.params()))
        return self.given[-1]

    def prompt(self) -> list[int]:
        """A prompt of 1 to `LONGEST_PROMPT` tokens."""
        start = self.rng.choice(self._beginnings)
        return start + self._tokens(self.rng.randint(1, LONGEST_PROMPT - len(start)))

    def params(self) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            max_tokens=rng.randint(1, LONGEST_ANSWER),
            temperature=rng.choice((0.0, 0.7, 1.0, 1.3)),
            top_k=rng.choice((0, 0, 20)),
            top_p=rng.choice((1.0, 0.9)),
            seed=rng.randrange(2**62),
            stop_token_ids=rng.choice(((), (), (2,))),
        )


def soak(engine: Engine, arrivals: Arrivals, num_requests: int) -> Soaked:
    """Run all requests, twice as many as lanes at a time; abort some in the queue or a few passes later."""
    soaked, waiting_for_abort = Soaked(num_requests=num_requests), dict[str, int]()
    num_open = num_passes = num_added = 0
    max_open = 2 * engine.settings.max_sequences
    while num_added < num_requests or engine.has_work:
        while num_added < num_requests and num_open < max_open:
            request_id = f"q{num_added}"
            engine.add_request(request_id, *arrivals.request())
            num_added, num_open = num_added + 1, num_open + 1
            if arrivals.rng.random() < MARKED_SHARE:
                waiting_for_abort[request_id] = num_passes + arrivals.rng.choice((0, 1, 2, 3, 6, 12, 25))
        for request_id in [name for name, when in waiting_for_abort.items() if when <= num_passes]:
            del waiting_for_abort[request_id]
            for completion in engine.abort(request_id):
                soaked.count(completion)
                soaked.num_aborted += 1
                num_open -= 1
        for event in engine.step():
            if event.completion is not None:
                soaked.count(event.completion)
                waiting_for_abort.pop(event.request_id, None)
                num_open -= 1
        num_passes += 1
        if num_passes % PASSES_BETWEEN_CHECKS == 0:
            check_pages(engine.pool)
            soaked.num_checks += 1
    check_pages(engine.pool)
    return soaked


def _add_soak(report: Report, options: dict[str, str]) -> None:
    engine, replay = make_engine(options, share_of_pages=SHARE_OF_PAGES)
    arrivals = Arrivals(engine._parts.model.spec.vocab_size, seed=0)
    with replaying(replay):
        soaked = soak(engine, arrivals, int(options["requests"]))
    leaked = engine.pool.num_pages - engine.pool.num_free
    gate = soaked.num_done == soaked.num_requests and leaked == 0
    print(f"{soaked.reasons}, {soaked.num_tokens} tokens, pool checked {soaked.num_checks} times", flush=True)
    case = {"lanes": int(options["lanes"]), "pages": engine.pool.num_pages, "graphs": options["graphs"]}
    measured: list[tuple[str, float, str]] = []
    if options["accelerator"] != "none":
        case["accelerator"] = options["accelerator"]
        share, counts = _share_of_equal(options, soaked, arrivals), engine.row_counts
        gate = gate and share >= SHARE_OF_EQUAL
        waiting = counts.num_waits / counts.num_pairs
        measured = [("equal_answers_share", share, "share"), ("waiting_share", waiting, "share")]
    measured += [
        ("requests", soaked.num_done, ""),
        ("leaked_pages", leaked, ""),
        ("aborted_share", soaked.num_aborted / soaked.num_requests, "share"),
        ("preemptions", engine.scheduler.num_preemptions, ""),
    ]
    for metric, value, unit in measured:
        report.add(case, metric, value, unit, gate_passed=gate)


def _share_of_equal(options: dict[str, str], soaked: Soaked, arrivals: Arrivals) -> float:
    """Share of the answers that are those of a run in which nothing is aborted or preempted."""
    engine, _ = make_engine(options, share_of_pages=1.0)
    names = list(soaked.answers)
    given = [arrivals.given[int(name[1:])] for name in names]
    found = engine.generate([prompt for prompt, _ in given], [params for _, params in given])
    assert engine.scheduler.num_preemptions == 0
    equal = [one.token_ids == soaked.answers[name] for name, one in zip(names, found, strict=True)]
    print(f"{sum(equal)} of {len(equal)} answers equal those of an undisturbed run", flush=True)
    return sum(equal) / len(equal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Effect of a shortage: exceptions that reached the caller, requests that failed, and whether all others
    ended and every page was freed."""

    num_raised: int
    num_failed: int
    is_alive: bool


def survive(make: Callable[[], tuple[Engine, Replay | None]], number: int, *, twice: bool) -> Survival:
    """Make the `number`-th allocation of a fresh engine's decoding fail, and the next one too if `twice`."""
    engine, replay = make()
    arrivals = Arrivals(engine._parts.model.spec.vocab_size, seed=number)
    num_raised, ended = 0, list[Completion]()
    with replaying(replay):
        for k in range(SHORT_LOAD):
            engine.add_request(f"q{k}", *arrivals.request())
        with Shortage(engine.table.device.type, {number, number + 1} if twice else {number}):
            for _ in range(MAX_PASSES):
                if not engine.has_work:
                    break
                try:
                    events = engine.step()
                except torch.OutOfMemoryError:
                    num_raised += 1
                    continue
                ended += [event.completion for event in events if event.completion is not None]
    check_pages(engine.pool)
    is_alive = len(ended) == SHORT_LOAD and engine.pool.num_free == engine.pool.num_pages
    num_failed = sum(completion.finish_reason == "error" for completion in ended)
    return Survival(num_raised=num_raised, num_failed=num_failed, is_alive=is_alive)


def _add_shortages(report: Report, options: dict[str, str]) -> None:
    """One failing allocation must fail no request; two in a row must fail one request."""
    small = {**options, "lanes": "4"}

    def make() -> tuple[Engine, Replay | None]:
        return make_engine(small, share_of_pages=1.0, adaptive=False)

    for twice in (False, True):
        numbers = range(1, int(options["shortages"]) + 1)
        found = [survive(make, number, twice=twice) for number in numbers]
        alive, raised = sum(one.is_alive for one in found), sum(one.num_raised for one in found)
        failed = sum(one.num_failed for one in found)
        gate = alive == len(found) and raised == 0 and failed == twice * len(found)
        print(f"{raised} exceptions reached the caller", flush=True)
        case = {"shortages": len(found), "in_a_row": 1 + twice, "failed_requests": failed}
        report.add(case, "engine_survives", alive, "", baseline=float(len(found)), gate_passed=gate)


if __name__ == "__main__":
    start(measure, __doc__)
