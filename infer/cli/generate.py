"""`idlm-generate`: one prompt of -p is answered here; several and files are in `batch.py`.

Modules that import torch are imported inside functions, so that help and configuration errors come at once.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from idlm.cli import command
from idlm.errors import UserError
from idlm.infer.cli.config import (
    GenerateConfig,
    check_printed,
    check_text,
    print_stream,
    read_arguments,
    require_tokenizer,
)
from idlm.infer.cli.help import PLUGIN_FLAGS, EngineHelp

HELP = EngineHelp.of(
    "idlm-generate",
    GenerateConfig,
    flags={"-p TEXT, --prompt TEXT": "a prompt; as often as you like", **PLUGIN_FLAGS},
)


def main() -> int:
    return command.run(generate)


def generate(arguments: list[str]) -> int:
    texts, arguments = take_prompts(arguments)
    if command.has_help_flag(arguments):
        return HELP.print(arguments)
    config, engine_arguments = read_arguments("generate", GenerateConfig, arguments)
    config = dataclasses.replace(config, prompt=[*texts, *config.prompt])
    if config.describe:
        from idlm.infer.cli.help import describe_memory, describe_model

        described = describe_memory if config.describe == "memory" else describe_model
        print(described(config, engine_arguments))
        return 0
    if config.output is None:
        check_printed(config.sampling)
    has_files = config.input is not None or config.output is not None or config.resume
    if has_files or config.system is not None or not len(config.prompt) == config.sampling.n == 1:
        from idlm.infer.cli.batch import answer_batch

        return answer_batch(config, engine_arguments)
    [prompt] = config.prompt
    check_text("prompt", prompt)
    engine = engine_arguments.load(is_shown=config.stats)
    require_tokenizer(engine.tokenizer, "text")
    print_stream(engine, prompt, config.sampling, has_stats=config.stats)
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
