"""Options, loads and results that the parts of `benchmarks.serve` share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.models import MODELS
from benchmarks.shared import Report, numbers
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.clients.loads import Load, Record, make_jobs, mixed_lengths

REQUESTS = {256: 512, 64: 256, 16: 64, 1: 3}
"""Requests of a load by concurrency: with Qwen3-8B's shape on an H200, AR takes about 55 s for all."""
MAX_LENGTH, PROMPT_ROWS = 4096, 8192
STEADY_PROMPT, STEADY_LENGTHS = 1024, (33, 333)
STEADY_TURNS = (4, 2)
"""How often a load with short and one with long answers runs. The shortest time of each counts: of 256
prompts at once vLLM took 1.0 s in one run and 1.7 s in the next."""
SCALES = {"tiny": 16}
"""Models for tests have lengths divided by this."""


def output_rate(figures: dict[str, Any], records: Sequence[Record]) -> float:
    """Output tokens per second of a load, from `aggregate`. UserError IDLM-0108 if it made no token, with the
    error of the first request that has one."""
    rate = float(figures["mean_output_throughput_tokens_per_s"])
    if not rate:
        output = next(
            (record.error for record in records if record.error is not None), "no request has an error"
        )
        raise UserError(
            "IDLM-0108", f"a load of {len(records)} requests made no token: {output}", fix="see that error"
        )
    return rate


@dataclass(slots=True, kw_only=True)
class Bench:
    """Options, and what was measured: output tokens per second of AR by concurrency, and result rows.
    `peer`: that of the same run, in the case of our rows."""

    options: dict[str, str]
    path: Path
    report: Report
    ar_rates: dict[int, float] = field(default_factory=dict)
    peer: dict[str, str] = field(default_factory=dict)

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> None:
        case = {"model": self.options["model"], **case}
        if case.get("engine", "idlm") == "idlm":
            case |= {**self.settings, **self.peer}
        self.report.add(case, metric, value, unit, **more)

    @property
    def scale(self) -> int:
        return SCALES.get(self.options["model"], 1)

    @property
    def parts(self) -> list[str]:
        return self.options["parts"].split(",")

    @property
    def concurrency(self) -> list[int]:
        return numbers(self.options["concurrency"])

    @property
    def settings(self) -> dict[str, Any]:
        """Further settings of the engines: against vLLM as many prompt rows a pass as it has."""
        pairs = (part.split("=", 1) for part in self.options["settings"].split(",") if part)
        given = {name: yaml.safe_load(value) for name, value in pairs}
        rows = {"max_num_batched_tokens": PROMPT_ROWS // self.scale} if self.options["vllm"] else {}
        return {**rows, **given}

    @property
    def ids(self) -> range:
        return range(MODELS[self.options["model"]]["vocab_size"] - 1)

    def mixed_load(self, concurrency: int) -> Load:
        """Requests, the same for every decoder. The lengths of 512 are those that vLLM was measured with."""
        rng = random.Random(1)
        num = int(self.options["requests"] or REQUESTS.get(concurrency, 6 * concurrency))
        lengths = mixed_lengths(num, scale=self.scale, rng=rng)
        jobs = make_jobs(lengths, SamplingParams(ignore_eos=True), ids=self.ids, rng=rng)
        return Load("mixed", jobs, concurrency)

    @property
    def steady_tokens(self) -> int:
        """By how many tokens the long answers of `steady_loads` are longer."""
        short, long = (length // self.scale for length in STEADY_LENGTHS)
        return long - short

    def prefill_case(self, num_prompts: int) -> dict[str, Any]:
        """The load by rows of prompts alone: the short one of `steady_loads`."""
        return {"load": "prefill", "prompts": num_prompts, "length": STEADY_PROMPT // self.scale}

    def steady_loads(self, concurrency: int) -> list[Load]:
        """The same prompts with short and with long answers, all at once, in all their turns."""
        params, prompt = SamplingParams(ignore_eos=True), STEADY_PROMPT // self.scale
        loads = []
        for length, turns in zip(STEADY_LENGTHS, STEADY_TURNS, strict=True):
            lengths = [(prompt, length // self.scale)] * concurrency
            jobs = make_jobs(lengths, params, ids=self.ids, rng=random.Random(3))
            loads += [Load("steady", jobs, concurrency)] * turns
        return loads

    def steady_rate(self, concurrency: int, seconds: Sequence[float]) -> tuple[float, float]:
        """Seconds of the prompts alone and output tokens per second, from the times of `steady_loads`."""
        short, whole = min(seconds[: STEADY_TURNS[0]]), min(seconds[STEADY_TURNS[0] :])
        return short, concurrency * self.steady_tokens / (whole - short)
