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

import contextlib
import dataclasses
import json
import random
import string
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.serving.bench import output_rate
from idlm.checkpoint import read_json
from idlm.contracts import Constraint, SamplingParams
from idlm.errors import UserError
from idlm.infer.clients.generator import Record, run_on_engine
from idlm.infer.clients.loads import Load, make_jobs
from idlm.infer.clients.stats import aggregate
from idlm.infer.engine import Engine
from idlm.infer.runtime.model_runner import Step
from idlm.infer.state.batch import Batch
from idlm.infer.structured import masks
from idlm.infer.structured.masks import PassGrammars
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
    sequences), whether all answers are complete, and the graphs captured meanwhile. `times_ms`: as
    `grammar_times` says.
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
        with grammar_times() as times_ms:
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


@contextlib.contextmanager
def grammar_times() -> Iterator[dict[str, float]]:
    """Means (ms) over the passes with grammars, filled in at the end.

    Host: it waits for what a pass tells (`wait_ms`), then the device for the choice of drafts (`choice_ms`).
    While the forward pass runs, the host launches what follows hidden states (`decide_ms`), which includes
    the computation of bits (`bits_ms`). Device, on a GPU: from what a pass tells to the start of the next
    forward pass (`choice_wait_ms`), and from logits to the bits that mask them (`bits_wait_ms`).
    """
    clock, found = _Clock(), dict[str, float]()
    choose, bits, masked, tell = (
        getattr(PassGrammars, name) for name in ("choose_drafts", "bits", "masked", "tell")
    )
    choose_in_place, decide, beside = Step.choose_drafts, Step.decide, masks._beside

    def choose_after_waiting(self: PassGrammars, num_drafts: int) -> Any:
        clock.num_passes += 1
        told = [each.told[0] for each in self._followers.values() if each.told is not None]
        clock.host("wait_ms", lambda: [one._array for one in told])
        return clock.host("choice_ms", choose, self, num_drafts)

    def masked_later(self: PassGrammars, logits_XV: Tensor, *values: Any, **named: Any) -> Tensor:
        clock.begin("bits_wait_ms", logits_XV.device)
        found: Tensor = masked(self, logits_XV, *values, **named)
        return found

    def beside_then(values: Tensor, device: torch.device) -> Tensor:
        copied = beside(values, device)
        clock.end("bits_wait_ms", device)
        return copied

    def tell_then(self: PassGrammars, num_emitted_B: Tensor, *values: Any) -> None:
        tell(self, num_emitted_B, *values)
        clock.begin("choice_wait_ms", num_emitted_B.device)

    def choose_then(self: Step, batch: Batch) -> None:
        choose_in_place(self, batch)
        # A pass that is captured has no grammars.
        if batch.grammars is not None:
            clock.end("choice_wait_ms", batch.lanes_B.device)

    patches: dict[str, Any] = {
        "choose_drafts": choose_after_waiting,
        "bits": lambda *values: clock.host("bits_ms", bits, *values),
        "masked": masked_later,
        "tell": tell_then,
    }
    with (
        mock.patch.multiple(PassGrammars, **patches),
        mock.patch.object(Step, "choose_drafts", choose_then),
        mock.patch.object(Step, "decide", lambda *values: clock.host("decide_ms", decide, *values)),
        mock.patch.object(masks, "_beside", beside_then),
    ):
        yield found
    found |= clock.means()


class _Clock:
    """Sums of the host's seconds, and pairs of events on the device, by name."""

    def __init__(self) -> None:
        self.num_passes, self._seconds = 0, defaultdict[str, float](float)
        self._begun = dict[str, torch.cuda.Event]()
        self._spans = defaultdict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]](list)

    def host(self, name: str, call: Callable[..., Any], *values: Any) -> Any:
        """Call, and count the time."""
        start = time.perf_counter()
        result = call(*values)
        self._seconds[name] += time.perf_counter() - start
        return result

    def begin(self, name: str, device: torch.device) -> None:
        """Of a span on the device, in the order of its stream."""
        if device.type == "cuda":
            self._begun[name] = _mark(device)

    def end(self, name: str, device: torch.device) -> None:
        """Of the span that has begun last, if one has."""
        if name in self._begun:
            self._spans[name].append((self._begun.pop(name), _mark(device)))

    def means(self) -> dict[str, float]:
        """Milliseconds of a pass with grammars; {} if there was none."""
        if not self.num_passes:
            return {}
        found = {name: 1e3 * total / self.num_passes for name, total in self._seconds.items()}
        for name, pairs in self._spans.items():
            torch.cuda.synchronize()
            found[name] = sum(start.elapsed_time(end) for start, end in pairs) / len(pairs)
        return found


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


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
