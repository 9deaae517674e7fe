"""`idlm-generate` beyond one prompt of -p: several prompts, files, standard input and outputs. Answers come
in order of the prompts."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idlm.cli.progress import Progress
from idlm.contracts import Completion
from idlm.errors import MAX_NAMED, UserError
from idlm.files.paths import translate_path_errors
from idlm.infer.cli import prompts
from idlm.infer.cli.config import (
    EngineArguments,
    GenerateConfig,
    Tally,
    check_printed,
    engine_name,
    print_stream,
    require_tokenizer,
)
from idlm.infer.cli.output import answer_file, exclusive_output, partial_path
from idlm.infer.cli.prompts import PromptLine
from idlm.infer.interrupts import uninterrupted
from idlm.text.tokenizer import encode_messages

if TYPE_CHECKING:
    from idlm.infer.cli.resume import ResumeState, RunConfig
    from idlm.infer.engine import Engine, StreamEvent

Reader = Callable[[], Iterator[PromptLine]]
"""Reads the prompts, from the first one with every call."""
QUEUE_FACTOR = 4
"""Unfinished samples per lane, so that no lane waits for a line to be read."""

Key = tuple[str, int]
Answer = tuple[PromptLine, Completion]


def answer_batch(config: GenerateConfig, arguments: EngineArguments) -> int:
    if config.resume and (config.input is None or config.output is None or config.overwrite):
        raise UserError(
            "IDLM-0445", "resume=true needs input= and output=, and no overwrite=true", fix="give both files"
        )
    with exclusive_output(config.output, overwrite=config.overwrite, resume=config.resume):
        return _run(config, arguments, _reader(config))


def _reader(config: GenerateConfig) -> Reader:
    """The prompts, after finding every mistake that can be found without a model."""
    if config.system is not None and config.chat_template == "none":
        raise UserError(
            "IDLM-0458",
            "system= is rendered by the chat template, which chat_template=none leaves out",
            fix="leave one of them out",
        )
    if config.prompt and config.input:
        raise UserError("IDLM-0439", "both prompt and input are given", fix="give one of them")
    source: Callable[[], Iterator[PromptLine]]
    if config.input:
        if config.output and Path(config.output).resolve() == Path(config.input).resolve():
            raise UserError("IDLM-0439", "input and output are the same file", fix="choose another output=")
        source = partial(
            prompts.read_prompts,
            config.input,
            config.sampling,
            drop_last_turn=config.drop_last_turn,
            carry_keys=config.carry_keys,
        )
    elif config.prompt:
        source = partial(prompts.text_prompts, config.prompt, config.sampling, location="prompt")
    else:
        # None: the command was started with standard input closed.
        is_piped = sys.stdin is not None and not sys.stdin.isatty()
        text = sys.stdin.read().rstrip("\r\n") if is_piped else ""
        if not text:
            raise UserError(
                "IDLM-0436",
                "there is no prompt",
                fix="give -p TEXT or input=FILE; idlm-chat is for conversations",
            )
        source = partial(prompts.text_prompts, [text], config.sampling, location="stdin")

    def read() -> Iterator[PromptLine]:
        for line in prompts.with_system(source(), config.system):
            if config.output is None:
                check_printed(line.params, location=f"{line.location}: ")
            yield line

    prompts.check_prompts(read(), source=config.input)
    return read


def _run(config: GenerateConfig, arguments: EngineArguments, read: Reader) -> int:
    """Load the engine and answer, while the output is locked. Status 1: some records have an `error`."""
    earlier: ResumeState | None = None
    common: RunConfig = {}
    if config.output is not None:
        from idlm.infer.cli.resume import run_config

        common = run_config(config, arguments)
        earlier = resume_state(config, read, common) if config.resume else None
        if earlier is not None and earlier.is_whole and earlier.source == Path(config.output):
            print(f"{config.output} is complete", file=sys.stderr)
            return 0
    engine = arguments.load(is_shown=config.stats)
    prompts.check_system(engine.tokenizer, config.system)
    if config.input is None and config.output is None and len(config.prompt) <= 1 and config.sampling.n == 1:
        [line] = read()
        print_stream(engine, encode_line(engine, line), line.params, has_stats=config.stats)
        return 0
    return int(answer_lines(engine, config, read, earlier, common).num_failed > 0)


def answer_lines(
    engine: Engine, config: GenerateConfig, read: Reader, earlier: ResumeState | None, common: RunConfig
) -> Tally:
    """Write or print answers to the prompts that `earlier` has none to. UserError for a prompt that the
    engine refuses, before the first answer."""
    num_answers, lines = check_lines(engine, read()), read()
    if earlier is not None:
        lines, num_answers = earlier.missing, num_answers - len(earlier.finished_lines)
    with AnswerProgress(engine_name(engine), total=num_answers, is_shown=config.stats) as progress:
        run = AnswerRun(engine, lines, progress=progress)
        if config.output is not None:
            _write_answers(engine, run, config, earlier, common)
        else:
            for _, done in run:
                _report(done)
                with progress.hidden():
                    print(done.text if engine.tokenizer is not None else list(done.token_ids), flush=True)
        if config.stats:
            progress.tally.report(engine, progress.seconds)
    return progress.tally


def _write_answers(
    engine: Engine, run: AnswerRun, config: GenerateConfig, earlier: ResumeState | None, common: RunConfig
) -> None:
    from idlm.infer.cli.resume import of_request

    made_by = {"decoder": engine.decoder.name, "accelerators": engine.settings.accelerator_options}
    advice = "; give resume=true to continue" if config.input is not None else ""
    with answer_file(str(config.output), earlier=earlier, advice=advice) as answers:

        def write(finished: Iterator[Answer]) -> None:
            # Ctrl-C waits, so that no answer is lost between the two.
            with uninterrupted():
                for line, done in finished:
                    _report(done)
                    record = {"prompt": line.prompt, **line.carried, **made_by}
                    answers.write({**record, "run_config": of_request(common, line.params), **figures(done)})

        try:
            for finished in run.batches():
                write(finished)
        finally:
            write(run.finished())


def _report(done: Completion) -> None:
    if done.error is not None:
        print(f"error {done.error}", file=sys.stderr)


def resume_state(config: GenerateConfig, read: Reader, common: RunConfig) -> ResumeState | None:
    """What an earlier run left in the partial file, or in a finished one; None if neither exists."""
    from idlm.infer.cli.resume import find_resume_state, of_request

    output, partial = Path(str(config.output)), partial_path(str(config.output))
    earlier = next((path for path in (partial, output) if path.exists()), None)
    if earlier is None:
        return None
    with translate_path_errors("IDLM-0442", earlier, fix="choose another output="):
        found = find_resume_state(earlier, read, lambda line: of_request(common, line.params))
    where = ", ".join(f"{earlier}:{number}" for number in found.broken_lines[:MAX_NAMED])
    if earlier == output and found.num_unanswered:
        raise UserError(
            "IDLM-0446",
            f"output={config.output!r} is finished, but input={config.input!r} has lines without an answer"
            + f"; there is no record at {where}" * bool(where),
            fix=f"name it {str(partial)!r} to continue it, or give another output=",
        )
    if where:
        print(f"skipped lines without a whole record: {where}", file=sys.stderr)
    again = f"; {found.num_failed} requests failed and are answered again" * (found.num_failed > 0)
    if not (found.is_whole and earlier == output):
        print(f"{len(found.finished_lines)} answers are in {earlier} already{again}", file=sys.stderr)
    return found


class AnswerProgress(Progress):
    """Shows how many answers of `total` are finished, and tokens per second as they are emitted and per
    forward (TPF). `tally` holds the figures of finished answers."""

    def __init__(self, title: str, *, total: int, **options: Any) -> None:
        super().__init__(title, total=total, **options)
        self.tally, self._num_tokens = Tally(), 0

    def see(self, events: Iterable[StreamEvent]) -> None:
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
    The UserError of a line that the engine refuses (`check_lines`) is raised after the answers before it. An
    interrupted run aborts its requests; `finished` returns the answers that it still holds."""

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
        """Yield finished answers in order; `finished` returns unread ones."""
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
        maximum = QUEUE_FACTOR * self._engine.settings.max_sequences
        while not self._is_read and len(self._order) - len(self._done) < maximum:
            try:
                line = next(self._lines, None)
                if line is None:
                    self._is_read = True
                    break
                request_id = f"{self._num_lines}:{line.request_id}"
                with _located(line), uninterrupted():
                    self._engine.add_request(request_id, encode_line(self._engine, line), line.params)
                    self._num_lines += 1
                    self._order.extend((line, (request_id, index)) for index in range(line.params.n))
            except UserError as refusal:
                self._refusal, self._is_read = refusal, True
        return bool(self._order)


def check_lines(engine: Engine, lines: Iterable[PromptLine]) -> int:
    """Number of answers of all lines. UserError, which begins with file and line, for one that is refused."""
    num_answers = 0
    for line in lines:
        with _located(line):
            engine.check_request(line.request_id, encode_line(engine, line), line.params)
        num_answers += line.params.n
    return num_answers


@contextmanager
def _located(line: PromptLine) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(error.code, f"{line.location}: {error.message}", fix=error.fix) from error


def encode_line(engine: Engine, line: PromptLine) -> str | list[int]:
    """The prompt as the engine takes it: the tokenizer's chat template renders a conversation."""
    prompt: Any = line.prompt
    are_messages = isinstance(prompt, list) and isinstance(prompt[0], dict)
    if are_messages or isinstance(prompt, str):
        require_tokenizer(engine.tokenizer, "a conversation" if are_messages else "text")
    if not are_messages:
        return prompt
    return encode_messages(engine.tokenizer, prompt, max_tokens=engine.settings.max_length)


def figures(done: Completion) -> dict[str, Any]:
    """A completion as plain data, its ratios included."""
    return {
        **dataclasses.asdict(done),
        "tokens_per_forward": done.tokens_per_forward,
        "acceptance_rate": done.acceptance_rate,
    }
