"""The real engine over a stub of the device: what the host does is all that is left of a pass."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.models import assembled, random_model
from idlm.contracts import SamplingParams
from idlm.infer.build import PAGE_SIZE
from idlm.infer.decoders.base import DECODERS
from idlm.infer.engine import Engine
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.model_runner import StepResult
from idlm.infer.state.batch import Batch, PassRows

PROMPT_TOKENS, NUM_INFLIGHT = 20, 4


@dataclass(slots=True)
class StubStep:
    """Stands for the three moves of a pass. `seconds`: CPU time that it takes itself; `num_pairs`: pairs of a
    sequence and a pass that it has fed."""

    decoder: Any
    table: Any
    runner: Any
    num_tokens: int
    seconds: float = 0.0
    num_pairs: int = 0

    def __call__(self, batch: Batch, prompt_rows: object = None) -> StepResult:
        begin, emitted_B = time.process_time(), self.num_tokens * batch.samples_B.long()
        counts_BJ = torch.zeros(len(emitted_B), 8 + self.num_tokens, dtype=torch.int64)
        counts_BJ[:, 5], counts_BJ[:, 6] = emitted_B, emitted_B - batch.samples_B.long()
        counts_BJ[:, 7] = counts_BJ[:, 6]
        counts_BJ[:, 8:].random_(4, 60)
        self.num_pairs += int((batch.num_feed_B > 0).sum())
        self.seconds += time.process_time() - begin
        return StepResult(counts_BJ=counts_BJ, widths=PassRows(fed=0, retained=0, head=0))


def stubbed(
    decoder: str, reader: str, *, num_sequences: int, num_passes: int, stride: int
) -> tuple[Callable[[], None], StubStep]:
    """A call that has the same prompts answered again, and the stub below it. It has run once, so that caches
    are warm and the pool is full of pages to evict, as in traffic."""
    num_tokens = 1 if decoder == "ar" else stride
    model, kind = random_model("tiny", device="cpu", dtype=torch.float32), DECODERS.get(decoder)
    made = kind(kind.Config(**({} if decoder == "ar" else {"stride": stride})), model.semantics)
    sizes = {"max_num_seqs": num_sequences, "max_length": PROMPT_TOKENS + num_tokens * num_passes}
    own: dict[str, Any] = {"page_size": PAGE_SIZE, "graphs": "on", "warmup": "off"}
    parts = assembled(model, made, **sizes, **own, num_inflight_steps=NUM_INFLIGHT)
    stub: Any = StubStep(made, parts.table, parts.runner, num_tokens)
    engine = Engine(replace(parts, step=StaticStep(stub, spare_lane=num_sequences, captures=False)))
    params = SamplingParams(max_tokens=num_tokens * num_passes, ignore_eos=True, seed=0)
    run = partial(answer, engine, reader, params, num_sequences)
    run()
    return run, stub


def answer(engine: Engine, reader: str, params: SamplingParams, num_sequences: int) -> None:
    """Answer prompts that have nothing in common."""
    prompts = [[4 + (7 * n + k * k) % 60 for k in range(PROMPT_TOKENS)] for n in range(num_sequences)]
    if reader == "generate":
        engine.generate(prompts, params)
        return
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params, streams=True)
    while engine.has_work:
        engine.step()


def calls_of(run: Callable[[], None]) -> int:
    """Python functions that are called by `run`, as in a fresh process: handlers of signals, which the engine
    wraps in every step, and garbage that calls back when it is collected would count."""
    counter = itertools.count()
    plain: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    handlers = {number: signal.signal(number, handler) for number, handler in plain.items()}
    gc.collect()
    gc.disable()
    sys.setprofile(lambda frame, event, _: next(counter) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return next(counter)
