"""`idlm-generate`: prompts from -p, a file, stdin or a chat; answers as text or JSON lines.

idlm-generate model=outputs/tiny -p "Lea has 9 shells. ..." sampling.temperature=0
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from idlm import command
from idlm.compose import compose, describe
from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.config import GenerateConfig
from idlm.infer.engine import Engine
from idlm.infer.prompts import PromptLine, read_prompts
from idlm.tokens import encode_messages


def main() -> int:
    """Console entry point."""
    return command.run(generate)


def generate(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__, "\ndecoder=NAME and decoder.OPTION=VALUE choose the decoder; further keys:\n")
        print(describe(GenerateConfig))
        return 0
    texts, arguments = take_prompts(arguments)
    decoder, options, rest = command.split_plugin_options(arguments, plugin="decoder", default=None)
    config = compose("generate", GenerateConfig, rest)
    config.prompt = [*texts, *config.prompt]
    lines = _lines(config)
    engine = load_engine(config.model, decoder, {**config.options(), **options})
    if lines is None:
        return _chat(engine, config)
    if config.output is None and len(texts) == 1 and config.sampling.n == 1:
        return _print_one(engine, lines, config)
    return _answer_all(engine, lines, config)


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


def load_engine(model: str | None, decoder: str | None, options: dict[str, Any]) -> Engine:
    """The engine of a `model=` argument."""
    if model is None:
        raise UserError("IDLM-0438", "no model given", fix="give model=PATH, a checkpoint directory")
    return Engine.from_pretrained(model, decoder, **options)


def _lines(config: GenerateConfig) -> Iterator[PromptLine] | None:
    """Where prompts come from; None means a chat."""
    if config.prompt and config.input:
        raise UserError("IDLM-0439", "both prompt and input are given", fix="give one of them")
    if config.output and Path(config.output).exists() and not config.overwrite:
        raise UserError(
            "IDLM-0431", f"output={config.output!r} exists", fix="give overwrite=true or another name"
        )
    if config.input:
        return read_prompts(config.input)
    texts = config.prompt
    if not texts and not sys.stdin.isatty():
        texts = [sys.stdin.read().strip()]
    if not texts:
        return None
    return iter([PromptLine(request_id=str(i), prompt=text, sampling={}) for i, text in enumerate(texts)])


def _print_one(engine: Engine, lines: Iterator[PromptLine], config: GenerateConfig) -> int:
    """Stream one answer to the terminal."""
    line = next(lines)
    done = _stream(engine, _prompt(engine, line.prompt), config.sampling.params(), config.stats)
    return 0 if done.finish_reason != "abort" else 1


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
        print(summary(engine, [completion], time.perf_counter() - start), file=sys.stderr)
    return completion


def _answer_all(engine: Engine, lines: Iterator[PromptLine], config: GenerateConfig) -> int:
    """Answer every line, write in input order as soon as possible; an interrupted run keeps what it wrote."""
    start = time.perf_counter()
    completions: list[Completion] = []
    partial = Path(f"{config.output}.partial") if config.output else None
    out: TextIO = partial.open("w", encoding="utf-8") if partial else sys.stdout
    try:
        for line, completion in _run(engine, lines, config):
            completions.append(completion)
            _write(out, line, completion, as_json=partial is not None)
    finally:
        if partial is not None:
            out.flush()
            os.fsync(out.fileno())
            out.close()
    if partial is not None and config.output is not None:
        partial.replace(config.output)
    if config.stats and completions:
        print(summary(engine, completions, time.perf_counter() - start), file=sys.stderr)
    return 0


def _run(
    engine: Engine, lines: Iterator[PromptLine], config: GenerateConfig
) -> Iterator[tuple[PromptLine, Completion]]:
    """Keep the engine's queue filled from the lines; yield finished answers in input order."""
    order: list[tuple[PromptLine, tuple[str, int]]] = []
    done: dict[tuple[str, int], Completion] = {}
    num_open, num_lines = 0, 0
    while True:
        while num_open < 4 * engine.settings.max_num_seqs and (line := next(lines, None)) is not None:
            params = config.sampling.params(**line.sampling)
            key = f"{num_lines}:{line.request_id}"
            engine.add_request(key, _prompt(engine, line.prompt), params)
            order += [(line, (key, index)) for index in range(params.n)]
            num_open, num_lines = num_open + params.n, num_lines + 1
        for event in engine.step():
            if event.completion is not None:
                done[event.request_id, event.index] = event.completion
                num_open -= 1
        while order and order[0][1] in done:
            line, request = order.pop(0)
            yield line, dataclasses.replace(done.pop(request), request_id=line.request_id)
        if not order and num_open == 0:
            return


def _prompt(engine: Engine, prompt: str | list[int] | list[dict[str, str]]) -> str | list[int]:
    """Text and ids pass; a conversation is rendered by the tokenizer's chat template."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        if engine.tokenizer is None:
            raise UserError("IDLM-0414", "messages need a tokenizer", fix="give prompt_ids")
        return list(encode_messages(engine.tokenizer, prompt))  # type: ignore[arg-type]
    return prompt  # type: ignore[return-value]


def _write(out: TextIO, line: PromptLine, completion: Completion, *, as_json: bool) -> None:
    if not as_json:
        print(completion.text if completion.text else list(completion.token_ids), file=out)
        return
    record = {"prompt": line.prompt, **dataclasses.asdict(completion)}
    record |= {
        "tokens_per_forward": completion.tokens_per_forward,
        "acceptance_rate": completion.acceptance_rate,
    }
    out.write(json.dumps(record, ensure_ascii=False) + "\n")
    out.flush()


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
        prompt = encode_messages(engine.tokenizer, messages) if engine.tokenizer.chat_template else text
        completion = _stream(engine, prompt, config.sampling.params(), config.stats)
        messages.append({"role": "assistant", "content": completion.text})


def summary(engine: Engine, completions: Sequence[Completion], seconds: float) -> str:
    """One line of figures about finished answers."""
    tokens = sum(len(done.token_ids) for done in completions)
    forwards = sum(done.num_forwards for done in completions)
    tested = sum(sum(done.tested_by_position) for done in completions)
    accepted = sum(sum(done.accepted_by_position) for done in completions)
    acceptance = f", acceptance {accepted / tested:.3f}" if tested else ""
    law = f"[{engine.decoder.name}, {completions[0].exactness}]"
    return f"{law} {tokens} tokens, {tokens / forwards:.2f} per forward{acceptance}, {tokens / seconds:.0f} tokens/s"


if __name__ == "__main__":
    sys.exit(main())
