"""`idlm-generate`: prompts from -p, a file, stdin or a chat; answers as text or JSON lines.

What imports torch is imported inside functions: help and refusals of keys must not wait for it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idlm.cli import command
from idlm.cli.help import CommandHelp, answers_flags
from idlm.config.compose import compose
from idlm.contracts import Completion
from idlm.errors import UserError
from idlm.files.paths import translate_path_errors
from idlm.infer.cli.chat import chat, check_system, stream, with_system
from idlm.infer.cli.output import answer_file, exclusive_output, partial_path
from idlm.infer.cli.plugin_help import describe_accelerators, describe_decoders
from idlm.infer.cli.prompts import PromptLine, check_prompts, read_prompts, text_prompts
from idlm.infer.config import GenerateConfig, refuse_empty

if TYPE_CHECKING:
    from idlm.infer.cli.fingerprint import MadeWith
    from idlm.infer.cli.progress import AnswerProgress
    from idlm.infer.cli.resume import ResumeState
    from idlm.infer.engine import Engine

MAX_NAMED = 8
"""Broken lines of a file that are named."""
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
        "accelerator=[NAME,...]": "plug-ins that thin attention; the options are at the end",
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
    config.prompt = [*texts, *config.prompt]
    refuse_empty(config)
    require_model(config.model)
    if config.describe:
        settings = with_options(config.options(), accelerator_options)
        print(describe_model(config, decoder, settings, options))
        return 0
    _check_resume(config)
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
    """Answer whatever is asked, a chat too (`lines` None), with the output claimed."""
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
        if earlier is not None:
            print(_told(earlier), file=sys.stderr)
        engine = load_engine(config.model, decoder, settings, options)
        check_system(engine, config)
        is_many = config.input is not None or len(config.prompt) > 1
        num_answers = check_lines(engine, _read(config)) if is_many else config.sampling.n
    if lines is None:
        return chat(engine, config)
    first = list(itertools.islice(lines, 2))
    if config.output is None and not is_many and config.sampling.n == 1:
        stream(engine, encode_line(engine, first[0]), first[0].params, stats=config.stats)
        return 0
    lines = itertools.chain(first, lines) if earlier is None else earlier.missing
    num_answers -= 0 if earlier is None else earlier.num_records
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
    """Split `accelerator.NAME.OPTION=VALUE` off: options by name, and the other arguments."""
    names, flat, rest = command.split_plugin_options(arguments, plugin="accelerator", default=None)
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        name, dot, option = key.partition(".")
        if not dot:
            raise UserError(
                "IDLM-0461",
                f"accelerator.{key} names no accelerator and option",
                fix="write accelerator.NAME.OPTION=VALUE, for example accelerator.mage.k=512",
            )
        options.setdefault(name, {})[option] = value
    if names is not None and names != "null" and not names.startswith("["):
        from idlm.infer.sparse.stack import as_options

        as_options(names)
    return options, rest if names is None else [*rest, f"accelerator={names}"]


def with_options(settings: dict[str, Any], options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Engine keywords with the options of their accelerators."""
    from idlm.infer.accelerators.base import ACCELERATORS

    chosen: dict[str, dict[str, Any]] = settings["accelerators"]
    sides = {name: ACCELERATORS.get(name).side for name in (*chosen, *options)}
    idle = [name for name in options if name not in chosen]
    if idle:
        kept = [name for name in chosen if sides[name] not in {sides[other] for other in idle}]
        lost = [name for name in chosen if name not in kept]
        written = f"accelerator=[{','.join([*kept, *idle])}]"
        raise UserError(
            "IDLM-0461",
            f"there are options of {', '.join(idle)}, and accelerator=[{','.join(chosen)}]",
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
    """What `describe=true` prints. Refuses what needs no weights to be refused."""
    from idlm.infer.decoders.base import choose_decoder
    from idlm.infer.models.describe import description
    from idlm.infer.models.loader import read_outline
    from idlm.infer.settings import check_options, decoder_config
    from idlm.infer.sparse.stack import accelerator_configs

    model = require_model(config.model)
    _check_places(settings, options)
    checked, decoder_options = check_options(decoder, settings | options)
    outline = read_outline(model, dtype=config.dtype, mask_token_id=config.mask_token_id, base=config.base)
    kind = choose_decoder(decoder, outline.semantics)
    decoding = decoder_config(kind, decoder_options)
    if decoder or options:
        kind(decoding, outline.semantics)
    thinning = accelerator_configs(checked.accelerators)
    return "\n".join(
        [
            *description(outline),
            f"decoder     {kind.name}{_values(decoding)}",
            f"accelerator {', '.join(name + _values(each) for name, each in thinning.items()) or 'none'}",
        ]
    )


def _values(config: Any) -> str:
    given = [f"{field.name}={getattr(config, field.name)!r}" for field in dataclasses.fields(config)]
    return f"({', '.join(given)})" if given else ""


def require_model(model: str | None) -> str:
    """The path of `model=`; UserError IDLM-0438 where none is given."""
    if model is None:
        raise UserError("IDLM-0438", "no model given", fix="give model=PATH, a checkpoint directory")
    return model


def load_engine(
    model: str | None, decoder: str | None, settings: dict[str, Any], options: dict[str, Any]
) -> Engine:
    """The engine of a `model=` argument; `options` are those written `decoder.OPTION=VALUE`."""
    from idlm.infer.engine import Engine

    _check_places(settings, options)
    return Engine.from_pretrained(require_model(model), decoder, **settings, **options)


def _check_places(settings: dict[str, Any], options: dict[str, Any]) -> None:
    misplaced = sorted(settings.keys() & options.keys())
    if misplaced:
        raise UserError(
            "IDLM-0441", f"decoder.{misplaced[0]} is no decoder option", fix=f"write {misplaced[0]}=VALUE"
        )


def _lines(config: GenerateConfig) -> Iterator[PromptLine] | None:
    """Where prompts come from; None means a chat. Finds every mistake that can be found without a model."""
    config.sampling.params()
    options = config.input_options()
    if config.system is not None and config.template == "none":
        raise UserError(
            "IDLM-0458",
            "system= is rendered by the chat template, which template=none leaves out",
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
    """The prompts of input= or -p, read anew with every call."""
    if config.input is None:
        texts = text_prompts(config.prompt, config.sampling, place="prompt")
        return with_system(texts, config.system)
    lines = read_prompts(config.input, config.sampling, **config.input_options())
    return with_system(lines, config.system)


def _check_resume(config: GenerateConfig) -> None:
    """Resuming needs files at both ends."""
    if config.resume and (config.input is None or config.output is None or config.overwrite):
        raise UserError(
            "IDLM-0445", "resume=true needs input= and output=, and no overwrite=true", fix="give both files"
        )


def _resume_state(config: GenerateConfig, common: MadeWith) -> ResumeState | None:
    """What an earlier run has left to go on with: its partial file, or a finished one."""
    from idlm.infer.cli.fingerprint import of_request
    from idlm.infer.cli.resume import find_resume_state

    assert config.input is not None and config.output is not None, f"{config=}"
    partial, output, source = partial_path(config.output), Path(config.output), config.input
    earlier = next((path for path in (partial, output) if path.exists()), None)
    if earlier is None:
        return None
    with translate_path_errors("IDLM-0442", earlier, fix="choose another output="):
        found = find_resume_state(
            earlier,
            lambda: _read(config),
            lambda line: of_request(common, line.params),
        )
    where = ", ".join(f"{earlier}:{number}" for number in found.broken_lines[:MAX_NAMED])
    if earlier == output and found.num_unanswered:
        raise UserError(
            "IDLM-0446",
            f"output={config.output!r} is finished, but input={source!r} has lines that it does not answer"
            + f"; no record is at {where}" * bool(where),
            fix=f"name it {str(partial)!r} to go on with it, or give another output=",
        )
    if where:
        print(f"passed over, for they hold no whole record: {where}", file=sys.stderr)
    return found


def _told(earlier: ResumeState) -> str:
    again = f"; {earlier.num_failed} requests failed and are answered again" * (earlier.num_failed > 0)
    return f"{earlier.num_records} answers are in {earlier.source} already{again}"


def _answer_all(
    engine: Engine,
    lines: Iterator[PromptLine],
    config: GenerateConfig,
    *,
    progress: AnswerProgress,
    earlier: ResumeState | None,
    common: MadeWith,
) -> int:
    """Answer every line; what is finished when a run is stopped is written as well. Status 1 when some were
    given up: their records have an `error`.
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
        go_on = "; give resume=true to go on with them" if config.input is not None else ""
        with answer_file(config.output, find_resume_state=earlier, how_to_go_on=go_on) as answers:
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
