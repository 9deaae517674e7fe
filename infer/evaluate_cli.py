"""`idlm-eval`: a verifiable task, decoded by a decoder and its baseline side by side.

idlm-eval model=outputs/tiny task=ledger decoder=isd decoder.stride=4 sampling.temperature=0
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from idlm import command
from idlm.compose import compose, describe
from idlm.infer.cli import load_engine
from idlm.infer.config import EvaluateConfig
from idlm.infer.evaluate import Evaluation, evaluate, task_samples
from idlm.tasks import TASKS


def main() -> int:
    """Console entry point."""
    return command.run(run_evaluation)


def run_evaluation(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__, "\ndecoder=NAME and decoder.OPTION=VALUE choose the decoder; further keys:\n")
        print(describe(EvaluateConfig))
        return 0
    decoder, options, rest = command.split_plugin_options(arguments, plugin="decoder", default=None)
    config = compose("eval", EvaluateConfig, rest)
    task = TASKS.get(config.task)(level=config.level)
    samples = task_samples(task, config.split, config.num)
    runs = [(config.baseline, {})] if config.baseline is not None and config.baseline != decoder else []
    results: dict[str, Evaluation] = {}
    for name, decoder_options in [*runs, (decoder, options)]:
        engine = load_engine(config.model, name, {**config.options(), **decoder_options})
        results[engine.decoder.name] = evaluate(engine, task, samples, config.sampling.params())
    print(table(results))
    if config.output is not None:
        _write(Path(config.output), [sample.prompt for sample in samples], results)
    return 0


def table(results: dict[str, Evaluation]) -> str:
    """Plain text, one line per decoder."""
    lines = [f"{'decoder':<10} {'law':<6} {'exact-match':>11} {'acceptance':>10} {'TPF':>6} {'tokens/s':>9}"]
    for name, result in results.items():
        acceptance = "-" if result.acceptance_rate is None else f"{result.acceptance_rate:.3f}"
        lines.append(
            f"{name:<10} {result.exactness:<6} {result.exact_match:>11.3f} {acceptance:>10} "
            f"{result.tokens_per_forward:>6.2f} {result.tokens_per_second:>9.0f}"
        )
    return "\n".join(lines)


def _write(path: Path, prompts: list[str], results: dict[str, Evaluation]) -> None:
    with path.open("w", encoding="utf-8") as out:
        for name, result in results.items():
            for prompt, done, verdict in zip(prompts, result.completions, result.verdicts, strict=True):
                record = {"decoder": name, "prompt": prompt, "verdict": dataclasses.asdict(verdict)}
                out.write(json.dumps(record | {"completion": dataclasses.asdict(done)}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
