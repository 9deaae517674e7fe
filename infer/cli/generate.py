"""`idlm-generate`: prompts from -p, a file, stdin or a chat; answers as text or JSON lines.

Modules that import torch are imported inside functions, so that help and configuration errors come at once.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idlm.cli import command
from idlm.cli.help import CommandHelp, answers_flags
from idlm.config.compose import compose
from idlm.contracts import Completion
from idlm.errors import UserError
from idlm.files.paths import translate_path_errors
from idlm.infer.cli.chat import chat, check_system, stream, with_system
from idlm.infer.cli.config import GenerateConfig, refuse_empty
from idlm.infer.cli.output import answer_file, exclusive_output, partial_path
from idlm.infer.cli.plugin_help import describe_accelerators, describe_decoders
from idlm.infer.cli.prompts import PromptLine, check_prompts, read_prompts, text_prompts
from idlm.infer.settings import as_options

if TYPE_CHECKING:
    from idlm.infer.cli.fingerprint import RunConfig
    from idlm.infer.cli.progress import AnswerProgress
    from idlm.infer.cli.resume import ResumeState
    from idlm.infer.engine import Engine

MAX_NAMED = 8
"""Most broken lines of a file that a message names."""
HELP = CommandHelp(
    name="idlm-generate",
    usage='model=PATH [-p "..."] [key=value ...]',
    summary="Answers prompts with an AR, I-DLM or block diffusion checkpoint. Prompts come from -p, from a\n"
    "file of JSON lines (input=), or from standard input; on a terminal without any of them, a chat begins.",
    examples=(
        'idlm-generate model=outputs/tiny sampling.temperature=0 -p "Mia has 5 nuts. Mia breaks 2. ..."',
        "idlm-generate model=outputs/tiny input=prompts.jsonl output=answers.jsonl decoder=isd",
        'idlm-generate model=outputs/qwen3_8b system="You are brief."     # a chat',
    ),
    keys=(
        *("model", "input", "output", "resume", "system"),
        *("sampling.temperature", "sampling.max_tokens", "sampling.seed", "max_num_seqs", "device"),
    ),
    flags={
        "-p TEXT, --prompt TEXT": "a prompt; as often as you like",
        "decoder=NAME decoder.OPTION=VALUE": "how to decode: ar, isd or block; the options are at the end",
        "accelerators=[NAME,...]": "plug-ins that compute sparse attention; the options are at the end",
    },
)


def generate(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    texts, arguments = take_prompts(arguments)
    if answers_flags(HELP, GenerateConfig, arguments, plugins=describe_plugins):
        return 0
    decoder, options, rest = command.split_plugin_options(arguments, plugin="decoder", default=None)
    accelerator_options, rest = take_accelerator_options(rest)
    config = compose("generate", GenerateConfig, rest)
    config = dataclasses.replace(config, prompt=[*texts, *config.prompt])
    refuse_empty(config)
    require_model(config.model)
    if config.describe:
        settings = with_options(config.options(), accelerator_options)
        print(describe_model(config, decoder, settings, options))
        return 0
    if config.resume and (config.input is None or config.output is None or config.overwrite):
        raise UserError(
            "IDLM-0445", "resume=true needs input= and output=, and no overwrite=true", fix="give both files"
        )
    with exclusive_output(config.output, overwrite=config.overwrite, resume=config.resume):
        lines = _lines(config)
        return _run(config, decoder, accelerator_options, options, lines=lines)


def describe_plugins() -> str:
    """Help on every decoder and accelerator."""
    return f"Decoders and accelerators:\n{describe_decoders()}\n{describe_accelerators()}"


def _run(
    config: GenerateConfig,
    decoder: str | None,
    accelerator_options: dict[str, dict[str, Any]],
    options: dict[str, Any],
    *,
    lines: Iterator[PromptLine] | None,
) -> int:
    """Answer the prompts, or chat if `lines` is None, while the output is locked."""
    from idlm.infer.cli.progress import AnswerProgress, loading

    earlier, common = None, {}
    with loading(is_shown=config.stats):
        from idlm.infer.cli.answers import check_lines, encode_line, engine_name
        from idlm.infer.cli.fingerprint import run_config

        settings = with_options(config.options(), accelerator_options)
        if config.output is not None:
            model, accelerators = require_model(config.model), settings["accelerators"]
            common = run_config(config, model, decoder=decoder, options=options, accelerators=accelerators)
            earlier = _resume_state(config, common) if config.resume else None
        if earlier is not None and earlier.is_whole and earlier.source != partial_path(str(config.output)):
            print(f"{config.output} is complete", file=sys.stderr)
            return 0
        engine = load_engine(config.model, decoder, settings, options)
        check_system(engine, config)
        is_batch = config.input is not None or len(config.prompt) > 1
        num_answers = check_lines(engine, _read(config)) if is_batch else config.sampling.n
    if lines is None:
        return chat(engine, config)
    if config.output is None and not is_batch and config.sampling.n == 1:
        [line] = lines
        stream(engine, encode_line(engine, line), line.params, stats=config.stats)
        return 0
    if earlier is not None:
        lines, num_answers = earlier.missing, num_answers - len(earlier.kept_lines)
    with AnswerProgress(engine_name(engine), total=num_answers, is_shown=config.stats) as progress:
        return _answer_all(engine, lines, config, progress=progress, earlier=earlier, common=common)


def take_prompts(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `-p TEXT`, `--prompt TEXT` and `--prompt=TEXT` off the `key=value` arguments."""
    prompts, rest = [], []
    remaining = iter(arguments)
    for argument in remaining:
        if argument in ("-p", "--prompt"):
            text = next(remaining, None)
            if text is None:
                raise UserError("IDLM-0437", f"{argument} needs a text", fix=f'write {argument} "..."')
            prompts.append(text)
        elif argument.startswith("--prompt="):
            prompts.append(argument.removeprefix("--prompt="))
        else:
            rest.append(argument)
    return prompts, rest


def take_accelerator_options(arguments: Sequence[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Split `accelerators.NAME.OPTION=VALUE` off: options by name, and the other arguments."""
    names, flat, rest = command.split_plugin_options(arguments, plugin="accelerators", default=None)
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        name, dot, option = key.partition(".")
        if not dot:
            raise UserError(
                "IDLM-0461",
                f"accelerators.{key} does not name an accelerator and an option",
                fix="write accelerators.NAME.OPTION=VALUE, for example accelerators.mage.k=512",
            )
        options.setdefault(name, {})[option] = value
    if names is not None and names != "null" and not names.startswith("["):
        as_options(names)
    return options, rest if names is None else [*rest, f"accelerators={names}"]


def with_options(settings: dict[str, Any], options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Engine keywords with the options of accelerators; UserError IDLM-0461 for options of one not chosen."""
    from idlm.infer.accelerators.base import ACCELERATORS

    chosen: dict[str, dict[str, Any]] = settings["accelerators"]
    sides = {name: ACCELERATORS.get(name).side for name in (*chosen, *options)}
    idle = [name for name in options if name not in chosen]
    if idle:
        kept = [name for name in chosen if sides[name] not in {sides[other] for other in idle}]
        lost = [name for name in chosen if name not in kept]
        written = f"accelerators=[{','.join([*kept, *idle])}]"
        raise UserError(
            "IDLM-0461",
            f"options of {', '.join(idle)} are given, and accelerators=[{','.join(chosen)}]",
            fix=(
                f"write {written} in place of {', '.join(lost)} (one of each side is allowed)"
                if lost
                else f"write {written}"
            )
            + ", or leave the options out",
        )
    return settings | {"accelerators": {name: options.get(name, {}) for name in chosen}}


def describe_model(
    config: GenerateConfig, decoder: str | None, settings: dict[str, Any], options: dict[str, Any]
) -> str:
    """What `describe=true` prints. Finds every mistake that can be found without weights."""
    from idlm.infer.decoders.base import choose_decoder
    from idlm.infer.models.describe import description
    from idlm.infer.models.loader import read_outline
    from idlm.infer.options import check_options, decoder_config

    model = require_model(config.model)
    _check_names(settings, options)
    checked = check_options(decoder, settings | options)
    outline = read_outline(model, dtype=config.dtype, mask_token_id=config.mask_token_id, base=config.base)
    kind = choose_decoder(decoder, outline.semantics)
    decoding = checked.decoder_config or decoder_config(kind, checked.decoder_options)
    if decoder or options:
        kind(decoding, outline.semantics)
    accelerators = ", ".join(name + _values(each) for name, each in checked.accelerators.items())
    return "\n".join(
        [
            *description(outline),
            f"decoder     {kind.name}{_values(decoding)}",
            f"accelerator {accelerators or 'none'}",
        ]
    )


def _values(config: Any) -> str:
    given = [f"{field.name}={getattr(config, field.name)!r}" for field in dataclasses.fields(config)]
    return f"({', '.join(given)})" if given else ""


def require_model(model: str | None) -> str:
    """The path of `model=`; UserError IDLM-0438 if there is none."""
    if model is None:
        raise UserError("IDLM-0438", "no model given", fix="give model=PATH, a checkpoint directory")
    return model


def load_engine(
    model: str | None, decoder: str | None, settings: dict[str, Any], options: dict[str, Any]
) -> Engine:
    """The engine for `model=`; `options` come from `decoder.OPTION=VALUE`."""
    from idlm.infer.engine import Engine

    _check_names(settings, options)
    return Engine.from_pretrained(require_model(model), decoder, **settings, **options)


def _check_names(settings: dict[str, Any], options: dict[str, Any]) -> None:
    misplaced = sorted(settings.keys() & options.keys())
    if misplaced:
        raise UserError(
            "IDLM-0441", f"decoder.{misplaced[0]} is not a decoder option", fix=f"write {misplaced[0]}=VALUE"
        )


def _lines(config: GenerateConfig) -> Iterator[PromptLine] | None:
    """The prompts, or None for a chat. Finds every mistake that can be found without a model."""
    options = config.input_options()
    if config.system is not None and config.chat_template == "none":
        raise UserError(
            "IDLM-0458",
            "system= is rendered by the chat template, which chat_template=none leaves out",
            fix="leave one of them out",
        )
    if config.prompt and config.input:
        raise UserError("IDLM-0439", "both prompt and input are given", fix="give one of them")
    if config.input:
        if config.output and Path(config.output).resolve() == Path(config.input).resolve():
            raise UserError("IDLM-0439", "input and output are the same file", fix="choose another output=")
        check_prompts(config.input, config.sampling, **options)
        if config.system is not None:
            collections.deque(_read(config), maxlen=0)
        return _read(config)
    if config.prompt:
        return _read(config)
    # None: the command was started with standard input closed.
    if sys.stdin is None or not sys.stdin.isatty():
        text = "" if sys.stdin is None else sys.stdin.read().rstrip("\r\n")
        return with_system(text_prompts([text], config.sampling, place="stdin"), config.system)
    if config.output is not None or config.sampling.n > 1:
        raise UserError(
            "IDLM-0440", "a chat has no output file and one answer per turn", fix="give -p TEXT or input=FILE"
        )
    return None


def _read(config: GenerateConfig) -> Iterator[PromptLine]:
    """The prompts of input= or -p, from the first one with every call."""
    if config.input is None:
        lines: Iterable[PromptLine] = text_prompts(config.prompt, config.sampling, place="prompt")
    else:
        lines = read_prompts(config.input, config.sampling, **config.input_options())
    return with_system(lines, config.system)


def _resume_state(config: GenerateConfig, common: RunConfig) -> ResumeState | None:
    """What an earlier run left in the partial file, or in a finished one; None if neither exists."""
    from idlm.infer.cli.fingerprint import of_request
    from idlm.infer.cli.resume import find_resume_state

    output, partial = Path(str(config.output)), partial_path(str(config.output))
    earlier = next((path for path in (partial, output) if path.exists()), None)
    if earlier is None:
        return None
    with translate_path_errors("IDLM-0442", earlier, fix="choose another output="):
        found = find_resume_state(
            earlier, lambda: _read(config), lambda line: of_request(common, line.params)
        )
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


def _answer_all(
    engine: Engine,
    lines: Iterator[PromptLine],
    config: GenerateConfig,
    *,
    progress: AnswerProgress,
    earlier: ResumeState | None,
    common: RunConfig,
) -> int:
    """Answer every line, and write finished answers also when the run is stopped. Returns status 1 when some
    requests failed; their records have an `error`.
    """
    from idlm.infer.cli.answers import AnswerRun, Tally, as_record, engine_name

    start = time.perf_counter()
    run, tally = AnswerRun(engine, lines, progress=progress), Tally()
    if config.output is None:
        for _, done in run:
            tally.add(done)
            _report(done)
            with progress.hidden():
                print(done.text if engine.tokenizer is not None else list(done.token_ids), flush=True)
    else:
        advice = "; give resume=true to continue" if config.input is not None else ""
        with answer_file(config.output, earlier=earlier, advice=advice) as answers:
            try:
                for line, done in run:
                    tally.add(done)
                    _report(done)
                    answers.write(as_record(engine, line, done, common=common))
            finally:
                for line, done in run.finished():
                    answers.write(as_record(engine, line, done, common=common))
    if config.stats:
        print(tally.line(engine_name(engine), time.perf_counter() - start), file=sys.stderr)
    return int(tally.num_failed > 0)


def _report(done: Completion) -> None:
    if done.error is not None:
        print(f"error {done.error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(command.run(generate))
