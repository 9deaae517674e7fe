"""The decoders of one evaluation: the given one, its baseline, and those of `compare=`."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from idlm.config.compose import parse_value
from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments, engine_name
from idlm.infer.evaluation.config import EvaluateConfig
from idlm.semantics import Semantics

if TYPE_CHECKING:
    from idlm.infer.engine import Engine

AUTO = "auto"
Z95 = 1.959963984540054
T = TypeVar("T")


def sum_columns(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(*rows, fillvalue=0)))


class Arm(NamedTuple):
    """What is compared with: its name in the table, a decoder and the options of that decoder, and the
    checkpoint (None: the compared one)."""

    name: str
    decoder: str
    options: dict[str, Any]
    model: str | None = None

    def with_decoder(self, decoder: str, options: dict[str, Any]) -> Arm:
        """Itself, with the options of the compared decoder that apply to a baseline."""
        from idlm.infer.decoders.base import DECODERS

        kept = DECODERS.get(self.decoder).baseline_options if decoder == self.decoder else ()
        return self._replace(options={key: options[key] for key in kept if key in options} | self.options)

    def is_decoder(self, decoder: str, options: dict[str, Any]) -> bool:
        """Whether a decoder with these options is this one; None stands for an option's default."""
        given, own = ({k: v for k, v in each.items() if v is not None} for each in (options, self.options))
        return self.name == decoder or (decoder, given) == (self.decoder, own)

    def arguments(self, compared: EngineArguments) -> EngineArguments:
        given = {} if self.model is None else {"base": None, "mask_token_id": None}
        return EngineArguments(
            model=self.model or compared.model,
            decoder=self.decoder,
            settings=compared.settings | {"accelerators": {}} | given,
            options=self.options,
        )


def choose_baseline(given: str | None, semantics: Semantics) -> Arm | None:
    """The baseline of a checkpoint; `auto` decodes one token per pass. UserError if `given` does not fit."""
    from idlm.infer.decoders.base import DECODERS, fitting_decoders

    if given is None:
        return None
    if given == AUTO:
        for name in fitting_decoders(semantics):
            if (options := DECODERS.get(name).baseline) is not None:
                values = [str(value) for value in options.values() if value is not None]
                label = ":".join((name, *values)) if values or not options else f"{name}:one by one"
                return Arm(label, name, dict(options))
        return None
    chosen = DECODERS.get(given)
    try:
        chosen(chosen.Config(), semantics)
    except UserError as error:
        problem = f"baseline={given} does not fit the checkpoint: {error.message}"
        fix = "leave baseline out (auto: one token per pass), or give baseline=null for none"
        raise UserError(error.code, problem, fix=fix) from error
    return Arm(given, given, {})


def read_arms(texts: Sequence[str]) -> list[Arm]:
    """The decoders of `compare=`: `NAME`, or `NAME:option:value` with any number of options; and checkpoints,
    by their paths, decoded by AR. UserError IDLM-0484 for another form or two of one name, IDLM-0102 for an
    unknown decoder, IDLM-0600 for a path without a checkpoint."""
    from idlm.infer.decoders.base import DECODERS
    from idlm.infer.models.loader import checkpoint_directory

    arms = []
    for text in texts:
        if os.sep in text or (Path(text).is_dir() and text not in DECODERS.names()):
            checkpoint_directory(text)
            arms.append(Arm(text, "ar", {}, text))
            continue
        name, *parts = text.split(":")
        if len(parts) % 2 or texts.count(text) > 1:
            raise UserError(
                "IDLM-0484",
                f"compare={text} is given twice, or is not a decoder with options and values",
                fix="write compare=[isd:acceptance:published], for example",
            )
        DECODERS.get(name, key="compare")
        pairs = zip(parts[::2], parts[1::2], strict=True)
        arms.append(Arm(text, name, {key: parse_value(f"compare.{key}", value) for key, value in pairs}))
    return arms


def run_arms(
    config: EvaluateConfig, arguments: EngineArguments, work: Callable[[Engine, SamplingParams], T]
) -> dict[str, T]:
    """What `work` returns for the baseline, the given decoder with its accelerators, and those of
    `compare`."""
    arms = read_arms(config.compare)

    def first(engine: Engine) -> tuple[str, Arm | None, T]:
        chosen = choose_baseline(config.baseline, engine.semantics)
        return engine_name(engine), chosen, work(engine, config.sampling)

    name, base, own = with_engine(arguments, first)
    base = None if base is None else base.with_decoder(name, arguments.options)
    if base is not None and base.is_decoder(name, arguments.options):
        print(f"baseline={base.name} is the decoder itself, so there is no comparison", file=sys.stderr)
        base = None
    others = dataclasses.replace(config.sampling, decoder_options={}, tau=0.0)

    def use(arm: Arm) -> T:
        return with_engine(arm.arguments(arguments), lambda engine: work(engine, others))

    results = {name: own} if base is None else {base.name: use(base), name: own}
    for arm in arms:
        # One that has the compared decoder also has its other options, and may have its name.
        kept = arguments.options if arm.decoder == name and arm.model is None else {}
        label = f"compare={arm.name}" if arm.name in results else arm.name
        results[label] = use(arm._replace(options=kept | arm.options))
    return results


def with_engine(arguments: EngineArguments, work: Callable[[Engine], T]) -> T:
    """What `work` returns for an engine, whose memory is free afterwards: the next one sizes its own."""
    from idlm.devices import free_cached_memory

    engine = arguments.load()
    try:
        result = work(engine)
    finally:
        engine.close()
    del engine
    free_cached_memory()
    return result


class Interval(NamedTuple):
    value: float
    low: float
    high: float


def share_interval(scores: Sequence[float]) -> Interval:
    """Wilson's interval of the mean of scores in [0, 1]; those between vary less than it allows for."""
    n, value = len(scores), sum(scores) / len(scores)
    scale = 1 + Z95**2 / n
    middle = (value + Z95**2 / (2 * n)) / scale
    half = Z95 / scale * sqrt(value * (1 - value) / n + Z95**2 / (4 * n**2))
    return Interval(value, max(0.0, middle - half), min(1.0, middle + half))


def cut_off_lines(name: str, completions: Sequence[Completion]) -> list[str]:
    """A line for a decoder with answers that their limit ends: they are judged as they are."""
    num = sum(done.finish_reason == "length" for done in completions)
    line = f"{name}: {num} of {len(completions)} answers are cut off (sampling.max_tokens, max_length)"
    return [line] if num else []


def difference_line(
    name: str, first: str, scores: Sequence[float], others: Sequence[float], *, what: str, of: str
) -> str:
    """The `paired_difference` of two decoders in the metric `what`, over prompts or other pairs (`of`)."""
    gap = paired_difference(scores, others)
    interval = f"95% interval {gap.low:+.3f} to {gap.high:+.3f}"
    return f"{name} - {first}: {gap.value:+.3f} in {what}, {interval}, {len(scores)} {of} in pairs"


def paired_difference(scores: Sequence[float], others: Sequence[float]) -> Interval:
    """The mean of `scores - others`, after Agresti and Min (2005): two prompts more, half a one better and
    half a one worse, so that few prompts do not give an interval of width 0."""
    differences = [score - other for score, other in zip(scores, others, strict=True)]
    n, total = len(differences) + 2, sum(differences)
    middle = total / n
    half = Z95 * sqrt(((sum(each**2 for each in differences) + 1) / n - middle**2) / n)
    return Interval(total / len(differences), max(-1.0, middle - half), min(1.0, middle + half))
