"""Console scripts `idlm-generate` and `idlm-eval`. They import the command while Ctrl-C is handled, because
importing torch takes seconds.
"""

from __future__ import annotations

import sys

from idlm.cli import command


def generate() -> int:
    """`idlm-generate`."""

    def run(arguments: list[str]) -> int:
        from idlm.infer.cli.generate import generate

        return generate(arguments)

    return command.run(run)


def evaluate() -> int:
    """`idlm-eval`."""

    def run(arguments: list[str]) -> int:
        from idlm.infer.cli.evaluate import run_evaluation

        return run_evaluation(arguments)

    return command.run(run)


if __name__ == "__main__":
    sys.exit(generate())
