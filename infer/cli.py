"""`idlm-generate`: prompts from -p, a file, stdin or a chat; answers as text or JSON lines.

idlm-generate model=outputs/tiny -p "Lea has 9 shells. ..." sampling.temperature=0
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from idlm import command
from idlm.compose import compose, describe
from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.acceleration import accelerator_configs, as_options
from idlm.infer.accelerators.base import ACCELERATORS
from idlm.infer.answers import AnswerRun, Tally, as_record, check_lines, encode_line
from idlm.infer.config import GenerateConfig, refuse_empty
from idlm.infer.continuation import Begun, begun
from idlm.infer.decoders.base import DECODERS, default_decoder
from idlm.infer.engine import Engine
from idlm.infer.models.describe import description
from idlm.infer.models.loader import read_outline
from idlm.infer.output import answer_file, claimed, partial_path
from idlm.infer.prompts import PromptLine, check_prompts, check_text, read_prompts, text_prompts
from idlm.infer.provenance import MadeWith, made_with, of_request
from idlm.infer.settings import check_options, decoder_config
from idlm.paths import telling_of_path
from idlm.schema import show_default
from idlm.tokens import encode_messages

HELP_FLAGS = {"-h", "--help"}
MAX_NAMED = 8
"""Broken lines of a file that are named."""


def generate(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    texts, arguments = take_prompts(arguments)
    if HELP_FLAGS & set(arguments):
        print(__doc__)
        print("-p TEXT, --prompt TEXT, --prompt=TEXT\n    a prompt; as often as you like")
        print(describe_decoders(), describe_accelerators(), describe(GenerateConfig), sep="\n")
        return 0
    decoder, options, rest = command.split_plugin_options(arguments, plugin="decoder", default=None)
    accelerator_options, rest = take_accelerator_options(rest)
    config = compose("generate", GenerateConfig, rest)
    config.prompt = [*texts, *config.prompt]
    refuse_empty(config)
    settings = with_options(config.options(), accelerator_options)
    if config.describe:
        print(describe_model(config, decoder, settings, options))
        return 0
    _check_resume(config)
    with claimed(config.output, overwrite=config.overwrite, resume=config.resume):
        return _run(config, decoder, settings, options)


def _run(
    config: GenerateConfig, decoder: str | None, settings: dict[str, Any], options: dict[str, Any]
) -> int:
    """Answer whatever is asked, a chat too, with the output claimed."""
    model = _given(config.model)
    lines = _lines(config)
    earlier, common = None, {}
    if config.output is not None:
        accelerators = settings["accelerators"]
        common = made_with(config, model, decoder=decoder, options=options, accelerators=accelerators)
        earlier = _begun(config, common) if config.resume else None
    if earlier is not None and earlier.is_whole and earlier.source != partial_path(str(config.output)):
        print(f"{config.output} is complete", file=sys.stderr)
        return 0
    if earlier is not None:
        print(_told(earlier), file=sys.stderr)
    engine = load_engine(config.model, decoder, settings, options)
    if lines is None:
        return _chat(engine, config)
    if config.input is not None:
        check_lines(engine, read_prompts(config.input, config.sampling, **config.input_options()))
    elif len(config.prompt) > 1:
        check_lines(engine, text_prompts(config.prompt, config.sampling, place="prompt"))
    first = list(itertools.islice(lines, 2))
    if config.input is None and config.output is None and len(first) == 1 and first[0].params.n == 1:
        return _print_one(engine, first[0], config)
    lines = itertools.chain(first, lines) if earlier is None else earlier.missing
    return _answer_all(engine, lines, config, earlier=earlier, common=common)


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
        as_options(names)
    return options, rest if names is None else [*rest, f"accelerator={names}"]


def with_options(settings: dict[str, Any], options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Engine keywords with the options of their accelerators."""
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


def engine_name(engine: Engine) -> str:
    """Decoder and accelerators, joined by +."""
    return "+".join((engine.decoder.name, *engine.settings.accelerators))


def describe_decoders() -> str:
    """Help on the decoders and the options they own."""
    kinds = {name: DECODERS.get(name).Config for name in DECODERS.names()}
    return "\n".join(_described(f"decoder={name}", "decoder.{}", kind) for name, kind in kinds.items())


def describe_accelerators() -> str:
    """Help on the accelerators and the options they own."""
    kinds = {name: ACCELERATORS.get(name).Config for name in ACCELERATORS.names()}
    return "\n".join(
        _described(f"accelerator=[{name}]", f"accelerator.{name}.{{}}", kind) for name, kind in kinds.items()
    )


def _described(choice: str, key: str, kind: type) -> str:
    options = [
        f"{key.format(field.name)}={show_default(field.default)}" for field in dataclasses.fields(kind)
    ]
    help_lines = (inspect.getdoc(kind) or "").splitlines() if options else []
    return "\n    ".join([choice, ", ".join(options) or "no options", *help_lines])


def describe_model(
    config: GenerateConfig, decoder: str | None, settings: dict[str, Any], options: dict[str, Any]
) -> str:
    """What `describe=true` prints. Refuses what needs no weights to be refused."""
    model = _given(config.model)
    _check_places(settings, options)
    checked, decoder_options = check_options(decoder, settings | options)
    outline = read_outline(model, dtype=config.dtype, mask_token_id=config.mask_token_id, base=config.base)
    kind = DECODERS.get(decoder or default_decoder(outline.semantics))
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


def _given(model: str | None) -> str:
    if model is None:
        raise UserError("IDLM-0438", "no model given", fix="give model=PATH, a checkpoint directory")
    return model


def load_engine(
    model: str | None, decoder: str | None, settings: dict[str, Any], options: dict[str, Any]
) -> Engine:
    """The engine of a `model=` argument; `options` are those written `decoder.OPTION=VALUE`."""
    _check_places(settings, options)
    return Engine.from_pretrained(_given(model), decoder, **settings, **options)


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
    if config.prompt and config.input:
        raise UserError("IDLM-0439", "both prompt and input are given", fix="give one of them")
    if config.input:
        if config.output and Path(config.output).resolve() == Path(config.input).resolve():
            raise UserError("IDLM-0439", "input and output are the same file", fix="choose another output=")
        check_prompts(config.input, config.sampling, **options)
        return read_prompts(config.input, config.sampling, **options)
    if config.prompt:
        return iter(text_prompts(config.prompt, config.sampling, place="prompt"))
    # None: the command was started with standard input closed.
    if sys.stdin is None or not sys.stdin.isatty():
        text = "" if sys.stdin is None else sys.stdin.read().rstrip("\r\n")
        return iter(text_prompts([text], config.sampling, place="stdin"))
    if config.output is not None or config.sampling.n > 1:
        raise UserError(
            "IDLM-0440", "a chat has no output file and one answer per turn", fix="give -p TEXT or input=FILE"
        )
    return None


def _check_resume(config: GenerateConfig) -> None:
    """Resuming needs files at both ends."""
    if config.resume and (config.input is None or config.output is None or config.overwrite):
        raise UserError(
            "IDLM-0445", "resume=true needs input= and output=, and no overwrite=true", fix="give both files"
        )


def _begun(config: GenerateConfig, common: MadeWith) -> Begun | None:
    """What an earlier run has left to go on with: its partial file, or a finished one."""
    assert config.input is not None and config.output is not None, f"{config=}"
    partial, output, source = partial_path(config.output), Path(config.output), config.input
    earlier = next((path for path in (partial, output) if path.exists()), None)
    if earlier is None:
        return None
    with telling_of_path("IDLM-0442", earlier, fix="choose another output="):
        found = begun(
            earlier,
            lambda: read_prompts(source, config.sampling, **config.input_options()),
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


def _told(earlier: Begun) -> str:
    again = f"; {earlier.num_failed} requests failed and are answered again" * (earlier.num_failed > 0)
    return f"{earlier.num_records} answers are in {earlier.source} already{again}"


def _print_one(engine: Engine, line: PromptLine, config: GenerateConfig) -> int:
    """Stream one answer to the terminal."""
    _stream(engine, encode_line(engine, line), line.params, config.stats)
    return 0


def _stream(engine: Engine, prompt: str | list[int], params: SamplingParams, stats: bool) -> Completion:
    start = time.perf_counter()
    completion = None
    for event in engine.stream(prompt, params):
        if engine.tokenizer is None:
            print(*event.token_ids, end=" ", flush=True)
        print(event.text, end="", flush=True)
        completion = event.completion
    print()
    assert completion is not None
    if stats:
        tally = Tally()
        tally.add(completion)
        print(tally.line(engine_name(engine), time.perf_counter() - start), file=sys.stderr)
    return completion


def _answer_all(
    engine: Engine,
    lines: Iterator[PromptLine],
    config: GenerateConfig,
    *,
    earlier: Begun | None,
    common: MadeWith,
) -> int:
    """Answer every line; what is finished when a run is stopped is written as well. Status 1 when some were
    given up: their records have an `error`.
    """
    start = time.perf_counter()
    run, tally = AnswerRun(engine, lines), Tally()
    if config.output is None:
        for _, done in run:
            tally.add(done)
            _report(done)
            print(done.text if engine.tokenizer is not None else list(done.token_ids), flush=True)
    else:
        go_on = "; give resume=true to go on with them" if config.input is not None else ""
        with answer_file(config.output, begun=earlier, how_to_go_on=go_on) as answers:
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


def _chat(engine: Engine, config: GenerateConfig) -> int:
    """Read turns from the terminal until end of file."""
    if engine.tokenizer is None:
        raise UserError("IDLM-0414", "a chat needs a tokenizer", fix="give prompt_ids through input=")
    print("chat: one line is one turn, an empty line starts over, Ctrl-D ends", file=sys.stderr)
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return 0
        if not text:
            messages = []
            continue
        messages.append({"role": "user", "content": text})
        try:
            check_text("this turn", text)
            prompt = encode_messages(engine.tokenizer, messages) if engine.tokenizer.chat_template else text
            completion = _stream(engine, prompt, config.sampling.params(), config.stats)
        except UserError as error:
            print(f"error {error}\n  an empty line starts over", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": completion.text})


if __name__ == "__main__":
    sys.exit(command.run(generate))
