"""Part `structured` of `benchmarks.serve`: the same load with and without a JSON schema, decoded by ISD.

The checkpoint has random weights, so it gets a vocabulary of random words of the model's size: what a mask
costs grows with it. Objects of the schema follow one another for ever, so that all answers have the length
that was asked for. A trace replaces the verdicts on drafts, which fit the schema: both loads accept alike,
the ratio is that of the speed of passes, and says nothing about how well drafts fit. It is a hard case for
the host: hardly a candidate of random weights fits where the schema prescribes the text.
"""

from __future__ import annotations

import dataclasses
import json
import random
import string
from dataclasses import dataclass
from pathlib import Path

from idlm.contracts import Constraint, SamplingParams
from idlm.infer.clients.generator import Record, run_on_engine
from idlm.infer.clients.loads import Load, make_jobs
from idlm.infer.clients.stats import aggregate
from idlm.infer.engine import Engine

PROMPT, ANSWER, WARM_ANSWER = 256, 192, 48
"""Tokens of a request."""
SCHEMA = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 60},
            "kind": {"enum": ["red", "green", "blue"]},
            "size": {"type": "integer", "minimum": 0, "maximum": 9999},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "kind", "size", "tags"],
        "additionalProperties": False,
    },
    "x-guidance": {"whitespace_pattern": " ?"},
}
EOS, MASK, MAX_WORD = "<eos>", "<mask>", 9


def write_vocabulary(path: Path, vocab_size: int) -> None:
    """Files of a byte-level BPE tokenizer: printable characters, then random words that grow by a letter.
    The last two ids are the end of sequence and the mask.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    dice, space = random.Random(0), "\u0120"
    pieces = {char: number for number, char in enumerate((space + string.printable[:94])[: vocab_size - 2])}
    heads, merges = [space, *string.ascii_letters], list[tuple[str, str]]()
    while len(pieces) < vocab_size - 2:
        head, letter = dice.choice(heads), dice.choice(string.ascii_letters)
        if len(head) < MAX_WORD and head + letter not in pieces:
            pieces[head + letter] = len(pieces)
            merges.append((head, letter))
            heads.append(head + letter)
    pieces |= {EOS: vocab_size - 2, MASK: vocab_size - 1}
    tokenizer = Tokenizer(models.BPE(pieces, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, MASK])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Output tokens per second, tokens of a sequence per pass, seconds of a pass (which counts for all its
    sequences), and whether all answers are complete.
    """

    rate: float
    tokens_per_pass: float
    pass_s: float
    is_complete: bool


def measure(engine: Engine, concurrency: int, scale: int) -> dict[str, Speed]:
    """Speeds of the loads `free` and `structured`, which ran before, shorter."""
    found = {}
    constraint = Constraint(kind="json_schema", text=json.dumps(SCHEMA))
    params = SamplingParams(ignore_eos=True)
    settings = {"free": params, "structured": dataclasses.replace(params, constraint=constraint)}
    for answer in (WARM_ANSWER, ANSWER):
        for name, one in settings.items():
            load = _load(engine, one, concurrency, (max(1, PROMPT // scale), max(8, answer // scale)))
            records = run_on_engine(engine, load, streams=False)
            rate = aggregate(records, load)["mean_output_throughput_tokens_per_s"]
            tokens_per_pass = _tokens_per_pass(records)
            found[name] = Speed(
                rate=rate,
                tokens_per_pass=tokens_per_pass,
                pass_s=concurrency * tokens_per_pass / rate,
                is_complete=_is_complete(records, load),
            )
    return found


def _load(engine: Engine, params: SamplingParams, concurrency: int, lengths: tuple[int, int]) -> Load:
    ids, num = range(engine.model.spec.vocab_size - 2), max(2, 2 * concurrency)
    jobs = make_jobs([lengths] * num, params, ids=ids, dice=random.Random(3))
    return Load(f"D{lengths}", jobs, concurrency)


def _tokens_per_pass(records: list[Record]) -> float:
    num_forwards = sum(record.num_forwards or 0 for record in records)
    return sum(record.num_output_tokens for record in records) / max(1, num_forwards)


def _is_complete(records: list[Record], load: Load) -> bool:
    pairs = zip(records, load.jobs, strict=True)
    return all(record.num_output_tokens == job.params.max_tokens for record, job in pairs)
