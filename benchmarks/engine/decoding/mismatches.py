"""How many tokens differ between R-ISD and AR of its base in deterministic mode.

Both engines decode greedily, on held-out prompts of the verifiable task, and ignore stop ids, so every answer
has full length. Batches differ at each concurrency, so equal answers also show that the arithmetic of a
sequence does not depend on the rest of the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.results import result_row
from idlm.contracts import Completion, SamplingParams
from idlm.infer.cli.evaluate import task_samples
from idlm.infer.engine import Engine
from idlm.tasks import TASKS

CONCURRENCY = (1, 7, 64)
TOKENS = 512
STRATEGY, STRIDE = "branch", 4


def rows(options: dict[str, str]) -> list[dict[str, Any]]:
    """Mismatched tokens of the adapter `options["mismatches"]` at each concurrency, against AR alone."""
    device, num = options["device"], int(options["num"])
    length = int(options["tokens"] or TOKENS)
    prompts = [sample.prompt for sample in task_samples(TASKS.get("ledger")(level="tiny"), "test", num)]
    settings: dict[str, Any] = {"device": device, "dtype": options["dtype"], "deterministic": True}
    if options["base"]:
        settings["base"] = options["base"]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)] * len(prompts)
    expected = _answers(options, "ar", {**settings, "max_num_seqs": CONCURRENCY[-1]}, prompts, params)
    found = []
    for concurrency in CONCURRENCY:
        choices = {"stride": STRIDE, "rejection_strategy": STRATEGY, "max_num_seqs": concurrency}
        answers = _answers(options, "isd", {**settings, **choices}, prompts, params)
        wrong = sum(_differing(a, b) for a, b in zip(answers, expected, strict=True))
        case = {"concurrency": concurrency, "prompts": num, "tokens": length, "dtype": options["dtype"]}
        print(f"concurrency {concurrency}: {wrong} of {num * length} tokens differ", flush=True)
        found.append(
            result_row("decode", case, "deterministic_mismatches", wrong, "tokens", gate_passed=wrong == 0)
        )
    return found


def _answers(
    options: dict[str, str],
    decoder: str,
    settings: dict[str, Any],
    prompts: list[str],
    params: list[SamplingParams],
) -> list[Completion]:
    engine = Engine.from_pretrained(options["mismatches"], decoder, **settings)
    room = engine.settings.max_length
    assert room is not None
    longest = max(map(len, engine.encode(prompts)))
    shortened = [replace(one, max_tokens=min(one.max_tokens or room, room - longest)) for one in params]
    return engine.generate(prompts, shortened)


def _differing(ours: Completion, theirs: Completion) -> int:
    """Tokens from the first difference on."""
    length = max(len(ours.token_ids), len(theirs.token_ids))
    pairs = enumerate(zip(ours.token_ids, theirs.token_ids))
    return length - next(
        (place for place, (a, b) in pairs if a != b), min(map(len, (ours.token_ids, theirs.token_ids)))
    )
