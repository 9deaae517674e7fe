"""Progress bars of `idlm-generate` and `idlm-eval` while they load and decode; see idlm.cli.progress."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from idlm.cli.progress import Clock, Progress

if TYPE_CHECKING:
    from idlm.infer.engine import StreamEvent


@contextmanager
def loading(
    *, is_shown: bool = True, console: Console | None = None, clock: Clock = time.monotonic
) -> Iterator[None]:
    """Show how much of the weights of models loaded inside is copied."""
    with Progress("loading", counts=False, is_shown=is_shown, console=console, clock=clock) as shown:
        # Importing torch takes seconds, so the bar is shown first.
        from idlm.infer.models.weights import WATCHER

        def watch(num_done: int, total: int) -> None:
            shown.begin(total)
            shown.update(num_done)

        token = WATCHER.set(watch)
        try:
            yield
        finally:
            WATCHER.reset(token)


class AnswerProgress:
    """Shows how many answers of `total` are finished, tokens per second and tokens per forward (TPF).

    Tokens are counted when they are emitted; TPF is computed over finished answers.
    """

    def __init__(
        self,
        title: str,
        *,
        total: int,
        is_shown: bool = True,
        console: Console | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._shown = Progress(title, total=total, is_shown=is_shown, console=console, clock=clock)
        self.num_answers = self.num_tokens = self._num_failed = 0
        self._num_finished_tokens = self._num_forwards = 0

    def __enter__(self) -> AnswerProgress:
        self._shown.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._shown.__exit__(*error)

    def see(self, events: Iterable[StreamEvent]) -> None:
        """Count the events of one pass."""
        for event in events:
            self.num_tokens += len(event.token_ids)
            if event.completion is not None:
                self.num_answers += 1
                self._num_failed += event.completion.error is not None
                self._num_finished_tokens += len(event.completion.token_ids)
                self._num_forwards += event.completion.num_forwards
        self._shown.update(self.num_answers, self._figures)

    def hidden(self) -> AbstractContextManager[None]:
        """Remove the bar while an answer is printed to the terminal."""
        return self._shown.hidden()

    def _figures(self) -> str:
        rate = self.num_tokens / max(self._shown.seconds, 1e-9)
        forwards = self._num_forwards
        per_forward = f"{self._num_finished_tokens / forwards:.2f}" if forwards else "-"
        failed = f"  {self._num_failed} failed" if self._num_failed else ""
        return f"{self.num_tokens:,} tokens  {rate:,.0f} tokens/s  TPF {per_forward}{failed}"
