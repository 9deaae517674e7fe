"""What `idlm-generate` and `idlm-eval` show while they work: progress, a streamed answer, and figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from idlm.cli.command import importing
from idlm.cli.progress import Progress
from idlm.contracts import Completion, SamplingParams

if TYPE_CHECKING:
    from idlm.infer.engine import Engine


@contextmanager
def loading(**options: Any) -> Iterator[None]:
    """Show how much of the weights of models loaded inside is copied. `options` are those of `Progress`."""
    with Progress("loading", counts=False, **options) as shown:
        # Importing torch takes seconds, so the bar is shown first.
        with importing():
            import transformers  # noqa: F401

            from idlm.infer.models.weights import WATCHER

        def watch(num_done: int, total: int) -> None:
            shown.begin(total)
            shown.update(num_done)

        token = WATCHER.set(watch)
        try:
            yield
        finally:
            WATCHER.reset(token)


def engine_name(engine: Engine) -> str:
    """Decoder and accelerators, joined by +."""
    return "+".join((engine.decoder.name, *engine.settings.accelerator_options))


def print_stream(engine: Engine, prompt: str | list[int], params: SamplingParams, *, has_stats: bool) -> None:
    """Print one answer while it is generated, then with `has_stats` its figures."""
    start, tally = time.perf_counter(), Tally()
    for event in engine.stream(prompt, params):
        print(event.text, end="", flush=True)
        completion = event.completion
    print()
    assert completion is not None
    if has_stats:
        tally.add(completion)
        tally.report(engine, time.perf_counter() - start)


@dataclass(slots=True)
class Tally:
    num_answers: int = 0
    num_tokens: int = 0
    num_forwards: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    num_failed: int = 0
    num_cut_off: int = 0
    exactness: str = "exact"

    def add(self, done: Completion) -> None:
        self.num_answers += 1
        self.num_tokens += len(done.token_ids)
        self.num_forwards += done.num_forwards
        self.num_tested += sum(done.tested_by_position)
        self.num_accepted += sum(done.accepted_by_position)
        self.num_failed += done.error is not None
        self.num_cut_off += done.finish_reason == "length"
        if done.exactness != "exact":
            self.exactness = done.exactness

    def report(self, engine: Engine, seconds: float) -> None:
        """Print one line to standard error; nothing without answers."""
        if not self.num_forwards:
            return
        acceptance = f", acceptance {self.num_accepted / self.num_tested:.3f}" if self.num_tested else ""
        cut_off = f", {self.num_cut_off} of {self.num_answers} cut off" if self.num_cut_off else ""
        print(
            f"[{engine_name(engine)}, {self.exactness}] {self.num_tokens} tokens, "
            f"{self.num_tokens / self.num_forwards:.2f} per forward{acceptance}, "
            f"{self.num_tokens / seconds:.0f} tokens/s{cut_off}",
            file=sys.stderr,
        )
