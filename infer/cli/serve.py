"""`idlm-serve`: an HTTP server with OpenAI's interface.

Modules that need the extra `serve` are imported inside functions, so that help and configuration errors come
without it."""

from __future__ import annotations

import sys

from idlm.cli import command
from idlm.config.project import install_command
from idlm.errors import UserError
from idlm.infer.cli.config import read_arguments
from idlm.infer.cli.help import EngineHelp
from idlm.infer.server.config import ServeConfig

HELP = EngineHelp(
    name="idlm-serve",
    schema=ServeConfig,
    usage="model=PATH [port=8000] [key=value ...]",
    summary="Serves a checkpoint over HTTP with OpenAI's interface, to this machine alone without host=.\n"
    "Sampling settings here are the defaults of requests.",
    examples=(
        "idlm-serve model=outputs/tiny port=8000",
        "idlm-serve model=outputs/qwen3_8b host=0.0.0.0 max_num_seqs=128     # with IDLM_API_KEY=...",
    ),
    keys=(
        *("model", "host", "port", "served_model_name", "enable_thinking", "max_waiting"),
        *("sampling.temperature", "sampling.max_tokens", "max_num_seqs", "device"),
    ),
)


def main() -> int:
    return command.run(serve)


def serve(arguments: list[str]) -> int:
    """Run the command; returns the exit status. UserError IDLM-0704 without the packages that it needs."""
    if command.has_help_flag(arguments):
        return HELP.print(arguments)
    config, engine_arguments = read_arguments("serve", ServeConfig, arguments)
    try:
        from idlm.infer.server.run import run_server
    except ModuleNotFoundError as error:
        raise UserError(
            "IDLM-0704",
            f"idlm-serve needs the package {error.name}",
            fix=f"install the extra serve: {install_command('serve')}",
        ) from error
    run_server(config, engine_arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
