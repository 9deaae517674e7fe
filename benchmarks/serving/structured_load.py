"""Part `structured` of `benchmarks.serve`: the same load with and without a JSON schema, decoded by ISD.

The checkpoint has random weights, so it gets a vocabulary of random words of the model's size: what a mask
costs grows with it. The text of an answer: objects without end, each with a short text, one of three words, a
number and a list of short texts, so that all answers have the length that was asked for. The grammar forces
about half of its tokens and leaves few to choose from for a third. Each load runs twice, and the second run
counts: its graphs are captured. Prompts count too, which both loads share.

A trace replaces the verdicts on drafts, which fit the schema. Both loads thus accept alike: every pass has as
many drafts, and each lane reads its part of one trace (`tokens_per_forward` of both says whether they did).
So `structured_over_unconstrained` compares equal acceptance; it says what a schema costs the speed of passes,
and nothing about how well a model's drafts fit. It is a hard case for the host: hardly a candidate of random
weights fits where the schema prescribes the text. `structured_pass_speed` leaves out what is left of the
difference in acceptance.
"""

from __future__ import annotations

import dataclasses
import json
import random
import string
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.bench import output_rate
from benchmarks.serving.structured_times import pass_times
from idlm.checkpoint import read_json
from idlm.contracts import Constraint, SamplingParams
from idlm.errors import UserError
from idlm.infer.clients.generator import Record, run_on_engine
from idlm.infer.clients.loads import Load, make_jobs
from idlm.infer.clients.stats import aggregate
from idlm.infer.engine import Engine
from idlm.semantics import Semantics
from idlm.text.tokenizer import TOKENIZER_FILES

PROMPT, ANSWER = 256, 192
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


def add_vocabulary(path: Path) -> None:
    """`write_vocabulary` for a checkpoint that has no tokenizer, as earlier parts of the benchmark make it;
    one that has a tokenizer stays as it is. UserError IDLM-0203 if its mask is not the last id.
    """
    if any((path / name).exists() for name in TOKENIZER_FILES):
        return
    vocab_size = read_json(path / "config.json")["vocab_size"]
    if Semantics.load(path).mask_token_id != vocab_size - 1:
        raise UserError(
            "IDLM-0203",
            f"{path} has no tokenizer, and the last of its {vocab_size} ids is not the mask",
            fix="copy tokenizer files into it, or give a path= without a checkpoint",
        )
    write_vocabulary(path, vocab_size)


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
    sequences), whether all answers are complete, and the graphs captured meanwhile. `times_ms`: `pass_times`.
    """

    rate: float
    tokens_per_pass: float
    pass_s: float
    is_complete: bool
    num_captured: float
    times_ms: dict[str, float]


def measure(engine: Engine, concurrency: int, scale: int) -> dict[str, Speed]:
    """Speeds of the loads `free` and `structured`, each in its second run."""
    found = {}
    constraint = Constraint(kind="json_schema", text=json.dumps(SCHEMA))
    params = SamplingParams(ignore_eos=True)
    settings = {"free": params, "structured": dataclasses.replace(params, constraint=constraint)}
    lengths = max(1, PROMPT // scale), max(8, ANSWER // scale)
    for name, one in [*settings.items(), *settings.items()]:
        load, before = _load(engine, one, concurrency, lengths), engine.metrics()
        with pass_times() as times_ms:
            records = run_on_engine(engine, load, streams=False)
        rate = output_rate(aggregate(records, load), records)
        tokens_per_pass = _tokens_per_pass(records)
        captured = "graphs_captured_in_traffic"
        found[name] = Speed(
            rate=rate,
            tokens_per_pass=tokens_per_pass,
            pass_s=concurrency * tokens_per_pass / rate,
            is_complete=_is_complete(records, load),
            num_captured=engine.metrics()[captured] - before[captured],
            times_ms=times_ms,
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
