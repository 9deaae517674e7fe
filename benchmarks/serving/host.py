"""Time and Python calls of the host for each sequence and pass: the real engine over a stub of the device.

    python -m benchmarks.host [decoders=ar,isd] [sequences=64,256] [readers=generate,stream] [stride=4]
        [passes=256] [rounds=3] [record=true]

The stub feeds nothing and emits `stride` arbitrary tokens (AR: one) for every sequence that decodes; what it
takes itself is left out. Reader `generate` is `Engine.generate`; `stream` takes events with text. Time is CPU
time of this process, the least of all rounds, in us and in turns of a loop of plain Python that runs at the
same time as it (`loops_per_sequence_step`), which other machines can be compared by. Calls are those of
Python functions: they do not depend on the machine.
"""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.models import random_model
from benchmarks.results import result_row
from benchmarks.shared import defaults, numbers, parse_options, save, start
from idlm.contracts import SamplingParams
from idlm.infer import build as parts_builder
from idlm.infer.decoders.base import DECODERS
from idlm.infer.engine import Engine
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.model_runner import PassRunner, StepResult
from idlm.infer.settings import EngineSettings
from idlm.infer.state.batch import Batch, PassRows
from idlm.infer.state.sequence_state import SequenceState
from idlm.text.tokenizer import load_tokenizer

DEFAULTS = defaults(
    "decoders=ar,isd sequences=64,256 readers=generate,stream stride=4 passes=256 rounds=3 record=true"
)
TOKENIZER = Path(__file__).resolve().parents[2] / "recipes" / "assets" / "tiny_ar"
PROMPT_TOKENS, NUM_INFLIGHT = 20, 4
LOOP_TURNS = 200_000


@dataclass(slots=True)
class StubStep:
    """Stands for the three moves of a pass. `seconds`: CPU time that it has taken itself."""

    decoder: Any
    table: SequenceState
    runner: PassRunner
    num_tokens: int
    vocab_size: int
    seconds: float = 0.0
    num_pairs: int = 0
    """(Sequence, pass) that it has fed."""

    def __call__(self, batch: Batch, prompt_rows: object = None) -> StepResult:
        """`num_tokens` tokens for every sequence that decodes."""
        begin, stride = time.process_time(), self.num_tokens
        emitted_B = stride * batch.samples_B.long()
        counts_BJ = torch.zeros(len(emitted_B), 8 + stride, dtype=torch.int64)
        counts_BJ[:, 5], counts_BJ[:, 6] = emitted_B, emitted_B - batch.samples_B.long()
        counts_BJ[:, 7] = counts_BJ[:, 6]
        counts_BJ[:, 8:].random_(4, self.vocab_size)
        self.num_pairs += int((batch.num_feed_B > 0).sum())
        self.seconds += time.process_time() - begin
        return StepResult(counts_BJ=counts_BJ, widths=PassRows(fed=0, retained=0, head=0))


def stub_engine(decoder: str, *, num_sequences: int, max_length: int, stride: int) -> tuple[Engine, StubStep]:
    """An engine whose passes compute nothing."""
    tokenizer, model = load_tokenizer(TOKENIZER), random_model("tiny", device="cpu", dtype=torch.float32)
    kind = DECODERS.get(decoder)
    made = kind(kind.Config(**({} if decoder == "ar" else {"stride": stride})), model.semantics)
    settings = EngineSettings(
        device="cpu",
        max_num_seqs=num_sequences,
        max_length=max_length,
        page_size=parts_builder.PAGE_SIZE,
        num_inflight_steps=NUM_INFLIGHT,
        graphs="on",
        warmup="off",
    )
    parts = parts_builder._assemble(settings, model, tokenizer, made, ())
    num_tokens = 1 if decoder == "ar" else stride
    vocab_size = min(len(tokenizer), model.spec.vocab_size)
    stub: Any = StubStep(made, parts.table, parts.runner, num_tokens, vocab_size)
    step = StaticStep(stub, spare_lane=num_sequences, captures=False)
    return Engine(replace(parts, step=step)), stub


def answer(engine: Engine, reader: str, *, num_sequences: int, num_tokens: int) -> None:
    """Answer prompts that have nothing in common."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0)
    prompts = [
        [4 + (7 * number + k * k) % 60 for k in range(PROMPT_TOKENS)] for number in range(num_sequences)
    ]
    if reader == "generate":
        engine.generate(prompts, params)
        return
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{number}", prompt, params, streams=True)
    while engine.has_work:
        engine.step()


def calls_of(run: Callable[[], None]) -> int:
    """Python functions that are called by `run`, as in a fresh process: commands that this one has run leave
    handlers of signals, which the engine wraps in every step, and garbage that calls back when collected."""
    counter = itertools.count()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            next(counter)

    plain: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    handlers = {number: signal.signal(number, handler) for number, handler in plain.items()}
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return next(counter)


def loop_us() -> float:
    """CPU time of a turn of a loop of plain Python."""
    begin, found, table = time.process_time(), list[int](), {}
    for number in range(LOOP_TURNS):
        table[number & 63] = number
        found.append(table[number & 31] + number)
        if number & 255 == 255:
            found.clear()
    return 1e6 * (time.process_time() - begin) / LOOP_TURNS


class Case:
    """A reader of a decoder's answers, and the engine that gives them."""

    def __init__(
        self, reader: str, decoder: str, num_sequences: int, *, stride: int, num_passes: int
    ) -> None:
        tokens = 1 if decoder == "ar" else stride
        self.name: dict[str, Any] = {"decoder": decoder, "tokens": tokens, "sequences": num_sequences}
        self.name["reader"] = reader
        size = {"num_sequences": num_sequences, "num_tokens": tokens * num_passes}
        max_length = PROMPT_TOKENS + size["num_tokens"]
        engine, self._stub = stub_engine(
            decoder, num_sequences=num_sequences, max_length=max_length, stride=stride
        )
        self._run = partial(answer, engine, reader, **size)
        # Caches are warm and the pool is full of pages to evict, as in traffic.
        self._run()

    def calls(self) -> float:
        """Python calls for each sequence and pass."""
        self._stub.num_pairs = 0
        return calls_of(self._run) / self._stub.num_pairs

    def times(self, rounds: int) -> tuple[float, float]:
        """CPU time for each sequence and pass, in us and in turns of the loop."""
        times, loops = list[float](), list[float]()
        for _ in range(rounds):
            self._stub.seconds, self._stub.num_pairs = 0.0, 0
            loops.append(loop_us())
            begin = time.process_time()
            self._run()
            seconds = time.process_time() - begin - self._stub.seconds
            times.append(1e6 * seconds / self._stub.num_pairs)
        return min(times), min(times) / min(loops)


UNITS = {"us_per_sequence_step": "us", "loops_per_sequence_step": "loops", "calls_per_sequence_step": "calls"}


def measure(arguments: list[str]) -> int:
    """Measure every case that the arguments name; returns 0."""
    options = parse_options(arguments, DEFAULTS)
    rows = list[dict[str, Any]]()
    for reader, decoder, num_sequences in itertools.product(
        options["readers"].split(","), options["decoders"].split(","), numbers(options["sequences"])
    ):
        case = Case(
            reader, decoder, num_sequences, stride=int(options["stride"]), num_passes=int(options["passes"])
        )
        us, loops = case.times(int(options["rounds"]))
        found = {
            "us_per_sequence_step": us,
            "loops_per_sequence_step": loops,
            "calls_per_sequence_step": case.calls(),
        }
        rows += [result_row("host", case.name, name, value, UNITS[name]) for name, value in found.items()]
        figures = ", ".join(f"{value:.2f} {UNITS[name]}" for name, value in found.items())
        print(f"{reader:8s} {decoder:3s} {num_sequences:3d} sequences: {figures}", flush=True)
    save("host", rows, options)
    return 0


if __name__ == "__main__":
    start(measure, __doc__)
