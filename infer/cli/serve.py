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

HELP = EngineHelp.of("idlm-serve", ServeConfig)


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
