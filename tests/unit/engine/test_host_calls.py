"""How many Python functions the host calls for a sequence and pass, over a stub of the device."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from benchmarks.models import assembled, random_model
from idlm.contracts import SamplingParams
from idlm.infer.build import PAGE_SIZE
from idlm.infer.decoders.base import DECODERS
from idlm.infer.engine import Engine
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.model_runner import StepResult
from idlm.infer.state.batch import Batch, PassRows

NUM_SEQUENCES, NUM_PASSES, PROMPT_TOKENS, STRIDE = 64, 64, 20, 4


@dataclass(slots=True)
class StubStep:
    """Stands for the three moves of a pass; every sequence that decodes gets `num_tokens` tokens."""

    decoder: Any
    table: Any
    runner: Any
    num_tokens: int
    num_pairs: int = 0

    def __call__(self, batch: Batch, prompt_rows: object = None) -> StepResult:
        emitted_B = self.num_tokens * batch.samples_B.long()
        counts_BJ = torch.zeros(len(emitted_B), 8 + self.num_tokens, dtype=torch.int64)
        counts_BJ[:, 5], counts_BJ[:, 6] = emitted_B, emitted_B - batch.samples_B.long()
        counts_BJ[:, 7] = counts_BJ[:, 6]
        counts_BJ[:, 8:].random_(4, 60)
        self.num_pairs += int((batch.num_feed_B > 0).sum())
        return StepResult(counts_BJ=counts_BJ, widths=PassRows(fed=0, retained=0, head=0))


def answer(engine: Engine, reader: str, num_tokens: int) -> None:
    """Answer prompts that have nothing in common."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0)
    prompts = [[4 + (7 * n + k * k) % 60 for k in range(PROMPT_TOKENS)] for n in range(NUM_SEQUENCES)]
    if reader == "generate":
        engine.generate(prompts, params)
        return
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{number}", prompt, params, streams=True)
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


@pytest.mark.sweep_but("generate-isd-17")
@pytest.mark.parametrize(
    ("reader", "decoder", "maximum"),
    [("generate", "ar", 11), ("generate", "isd", 17), ("stream", "ar", 19), ("stream", "isd", 25)],
)
def test_a_sequence_takes_few_calls_in_a_pass(reader: str, decoder: str, maximum: int) -> None:
    num_tokens = 1 if decoder == "ar" else STRIDE
    model, kind = random_model("tiny", device="cpu", dtype=torch.float32), DECODERS.get(decoder)
    made = kind(kind.Config(**({} if decoder == "ar" else {"stride": STRIDE})), model.semantics)
    sizes = {"max_num_seqs": NUM_SEQUENCES, "max_length": PROMPT_TOKENS + num_tokens * NUM_PASSES}
    parts = assembled(
        model, made, **sizes, page_size=PAGE_SIZE, num_inflight_steps=4, graphs="on", warmup="off"
    )
    stub: Any = StubStep(made, parts.table, parts.runner, num_tokens)
    step = StaticStep(stub, spare_lane=NUM_SEQUENCES, captures=False)
    engine = Engine(replace(parts, step=step))
    # Caches are warm and the pool is full of pages to evict, as in traffic.
    answer(engine, reader, num_tokens * NUM_PASSES)
    stub.num_pairs = 0
    calls = calls_of(lambda: answer(engine, reader, num_tokens * NUM_PASSES))
    assert 1 < calls / stub.num_pairs <= maximum
