"""Run many prompts through one engine, whose queue is kept filled; answers come in order of the prompts."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from idlm.cli.progress import Progress
from idlm.contracts import Completion
from idlm.errors import UserError
from idlm.infer.cli.config import require_tokenizer
from idlm.infer.cli.fingerprint import RunConfig, of_request
from idlm.infer.cli.progress import Tally
from idlm.infer.cli.prompts import PromptLine
from idlm.infer.engine import Engine, StreamEvent
from idlm.infer.interrupts import uninterrupted
from idlm.text.tokenizer import encode_messages

QUEUE_FACTOR = 4
"""Unfinished samples per lane, so that no lane waits for a line to be read."""

Key = tuple[str, int]
Answer = tuple[PromptLine, Completion]


class AnswerProgress(Progress):
    """Shows how many answers of `total` are finished, tokens per second and tokens per forward (TPF).

    Tokens are counted when they are emitted; `tally` holds the figures of finished answers."""

    def __init__(self, title: str, *, total: int, **options: Any) -> None:
        super().__init__(title, total=total, **options)
        self.tally, self._num_tokens = Tally(), 0

    def see(self, events: Iterable[StreamEvent]) -> None:
        """Count the events of one pass."""
        for event in events:
            self._num_tokens += len(event.token_ids)
            if event.completion is not None:
                self.tally.add(event.completion)
        self.update(self.tally.num_answers, self._figures)

    def _figures(self) -> str:
        tally = self.tally
        rate = self._num_tokens / max(self.seconds, 1e-9)
        per_forward = f"{tally.num_tokens / tally.num_forwards:.2f}" if tally.num_forwards else "-"
        failed = f"  {tally.num_failed} failed" if tally.num_failed else ""
        return f"{self._num_tokens:,} tokens  {rate:,.0f} tokens/s  TPF {per_forward}{failed}"


class AnswerRun:
    """Iterating yields every sample of every line, in order, as soon as it and all before it are finished.

    `check_lines` finds lines that the engine refuses. If one is met here all the same, all lines before it
    are answered and then its UserError is raised. An interrupted run aborts its requests; `finished` returns
    the answers that it still holds."""

    def __init__(
        self, engine: Engine, lines: Iterator[PromptLine], *, progress: AnswerProgress | None = None
    ) -> None:
        self._engine, self._lines, self._progress = engine, lines, progress
        self._order: deque[tuple[PromptLine, Key]] = deque()
        self._done: dict[Key, Completion] = {}
        self._num_lines = 0
        self._refusal: UserError | None = None
        self._is_read = False

    def __iter__(self) -> Iterator[Answer]:
        for answers in self.batches():
            yield from answers

    def batches(self) -> Iterator[Iterator[Answer]]:
        """After every step, the answers whose turn it is. One that is not read stays, for `finished`."""
        try:
            while self._fill():
                with uninterrupted():
                    self._see(self._engine.step())
                yield self._ready()
        finally:
            with uninterrupted():
                for _, (request_id, _) in self._order:
                    self._engine.abort(request_id)
                self._see(self._engine.take_events())
        if self._refusal is not None:
            raise self._refusal

    def finished(self) -> Iterator[Answer]:
        """Remove and yield, in order, the finished answers that an interrupted run still holds."""
        for line, key in self._order:
            if key in self._done:
                yield self._take(line, key)

    def _see(self, events: Iterable[StreamEvent]) -> None:
        for event in events:
            if event.completion is not None:
                self._done[event.request_id, event.index] = event.completion
        if self._progress is not None:
            self._progress.see(events)

    def _ready(self) -> Iterator[Answer]:
        while self._order and self._order[0][1] in self._done:
            yield self._take(*self._order.popleft())

    def _take(self, line: PromptLine, key: Key) -> Answer:
        return line, dataclasses.replace(self._done.pop(key), request_id=line.request_id)

    def _fill(self) -> bool:
        """Queue more lines; returns whether an answer is missing."""
        most = QUEUE_FACTOR * self._engine.settings.most_sequences
        while not self._is_read and len(self._order) - len(self._done) < most:
            try:
                line = next(self._lines, None)
                if line is None:
                    self._is_read = True
                else:
                    self._add(line)
            except UserError as refusal:
                self._refusal, self._is_read = refusal, True
        return bool(self._order)

    def _add(self, line: PromptLine) -> None:
        request_id = f"{self._num_lines}:{line.request_id}"
        with _placed(line), uninterrupted():
            self._engine.add_request(request_id, encode_line(self._engine, line), line.params)
            self._num_lines += 1
            self._order.extend((line, (request_id, index)) for index in range(line.params.n))


def check_lines(engine: Engine, lines: Iterable[PromptLine]) -> int:
    """Number of answers that the lines ask for. UserError, which begins with file and line, for the first
    line that the engine refuses."""
    num_answers = 0
    for line in lines:
        with _placed(line):
            engine.check_request(line.request_id, encode_line(engine, line), line.params)
        num_answers += line.params.n
    return num_answers


@contextmanager
def _placed(line: PromptLine) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(error.code, f"{line.place}: {error.message}", fix=error.fix) from error


def encode_line(engine: Engine, line: PromptLine) -> str | list[int]:
    """The prompt as the engine takes it: the tokenizer's chat template renders a conversation."""
    prompt: Any = line.prompt
    are_messages = isinstance(prompt, list) and isinstance(prompt[0], dict)
    if are_messages or isinstance(prompt, str):
        require_tokenizer(engine.tokenizer, "a conversation" if are_messages else "text")
    if not are_messages:
        return prompt
    return encode_messages(engine.tokenizer, prompt, max_tokens=engine.settings.max_length)


def as_record(engine: Engine, line: PromptLine, done: Completion, *, common: RunConfig) -> dict[str, Any]:
    """One line of an output file. `common`: what all answers of the run have in common."""
    made_by = {"decoder": engine.decoder.name, "accelerators": engine.settings.accelerator_options}
    run_config = of_request(common, line.params)
    return {"prompt": line.prompt, **line.carried, **made_by, "run_config": run_config, **figures(done)}


def figures(done: Completion) -> dict[str, Any]:
    """A completion as plain data, its ratios included."""
    return {
        **dataclasses.asdict(done),
        "tokens_per_forward": done.tokens_per_forward,
        "acceptance_rate": done.acceptance_rate,
    }
