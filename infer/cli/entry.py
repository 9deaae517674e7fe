"""Console entry points of inference: the commands are imported inside, so that Ctrl-C is quiet while torch
loads.
"""

from __future__ import annotations

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
