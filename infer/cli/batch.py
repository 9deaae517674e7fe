"""`idlm-generate` beyond one prompt of -p: several prompts, files, standard input and outputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from idlm.contracts import Completion
from idlm.errors import UserError
from idlm.files.paths import translate_path_errors
from idlm.infer.cli.config import EngineArguments, GenerateConfig, check_printed
from idlm.infer.cli.output import answer_file, exclusive_output, partial_path
from idlm.infer.cli.progress import Tally, engine_name, print_stream
from idlm.infer.cli.prompts import PromptLine, check_prompts, read_prompts, text_prompts
from idlm.infer.cli.system import check_system, with_system
from idlm.infer.interrupts import uninterrupted

if TYPE_CHECKING:
    from idlm.infer.cli.answers import Answer, AnswerProgress, AnswerRun
    from idlm.infer.cli.fingerprint import RunConfig
    from idlm.infer.cli.resume import ResumeState
    from idlm.infer.engine import Engine

MAX_NAMED = 8
"""Most broken lines of a file that a message names."""

Reader = Callable[[], Iterator[PromptLine]]
"""Reads the prompts, from the first one with every call."""


def answer_batch(config: GenerateConfig, arguments: EngineArguments) -> int:
    """Answer the prompts; returns the exit status."""
    if config.resume and (config.input is None or config.output is None or config.overwrite):
        raise UserError(
            "IDLM-0445", "resume=true needs input= and output=, and no overwrite=true", fix="give both files"
        )
    with exclusive_output(config.output, overwrite=config.overwrite, resume=config.resume):
        return _run(config, arguments, _reader(config))


def _reader(config: GenerateConfig) -> Reader:
    """The prompts. Finds every mistake that can be found without a model."""
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
            read_prompts,
            config.input,
            config.sampling,
            drop_last_turn=config.drop_last_turn,
            carry_keys=config.carry_keys,
        )
    elif config.prompt:
        source = partial(text_prompts, config.prompt, config.sampling, place="prompt")
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
        source = partial(text_prompts, [text], config.sampling, place="stdin")

    def read() -> Iterator[PromptLine]:
        for line in with_system(source(), config.system):
            if config.output is None:
                check_printed(line.params, place=f"{line.place}: ")
            yield line

    check_prompts(read(), source=config.input)
    return read


def _run(config: GenerateConfig, arguments: EngineArguments, read: Reader) -> int:
    """Load the engine and answer, while the output is locked. Returns status 1 when some requests failed;
    their records have an `error`."""
    earlier: ResumeState | None = None
    common: RunConfig = {}
    if config.output is not None:
        from idlm.infer.cli.fingerprint import run_config

        common = run_config(config, arguments)
        earlier = resume_state(config, read, common) if config.resume else None
        if earlier is not None and earlier.is_whole and earlier.source == Path(config.output):
            print(f"{config.output} is complete", file=sys.stderr)
            return 0
    engine = arguments.load(is_shown=config.stats)
    check_system(engine.tokenizer, config.system)
    from idlm.infer.cli.answers import encode_line

    if config.input is None and config.output is None and len(config.prompt) <= 1 and config.sampling.n == 1:
        [line] = read()
        print_stream(engine, encode_line(engine, line), line.params, has_stats=config.stats)
        return 0
    return int(answer_lines(engine, config, read, earlier, common).num_failed > 0)


def answer_lines(
    engine: Engine, config: GenerateConfig, read: Reader, earlier: ResumeState | None, common: RunConfig
) -> Tally:
    """Answer the prompts that `earlier` has no answer to, and write or print the answers. Before the first
    answer, UserError for a prompt that the engine refuses."""
    from idlm.infer.cli.answers import AnswerProgress, AnswerRun, check_lines

    num_answers, lines = check_lines(engine, read()), read()
    if earlier is not None:
        lines, num_answers = earlier.missing, num_answers - len(earlier.kept_lines)
    with AnswerProgress(engine_name(engine), total=num_answers, is_shown=config.stats) as progress:
        run = AnswerRun(engine, lines, progress=progress)
        if config.output is None:
            _print_answers(engine, run, progress)
        else:
            _write_answers(engine, run, config, earlier, common)
        if config.stats:
            progress.tally.report(engine, progress.seconds)
    return progress.tally


def _print_answers(engine: Engine, run: AnswerRun, progress: AnswerProgress) -> None:
    for _, done in run:
        _report(done)
        with progress.hidden():
            print(done.text if engine.tokenizer is not None else list(done.token_ids), flush=True)


def _write_answers(
    engine: Engine, run: AnswerRun, config: GenerateConfig, earlier: ResumeState | None, common: RunConfig
) -> None:
    """Write finished answers, also when the run is stopped."""
    from idlm.infer.cli.answers import as_record

    advice = "; give resume=true to continue" if config.input is not None else ""
    with answer_file(str(config.output), earlier=earlier, advice=advice) as answers:

        def write(finished: Iterator[Answer]) -> None:
            # Ctrl-C waits, so that no answer is lost between the two.
            with uninterrupted():
                for line, done in finished:
                    _report(done)
                    answers.write(as_record(engine, line, done, common=common))

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
    from idlm.infer.cli.fingerprint import of_request
    from idlm.infer.cli.resume import find_resume_state

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
        print(f"{len(found.kept_lines)} answers are in {earlier} already{again}", file=sys.stderr)
    return found
