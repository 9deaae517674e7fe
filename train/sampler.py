"""The samples of the report and of evaluations, which the engine generates from a published checkpoint.

This is the only module of training that imports the engine."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from idlm.contracts import SamplingParams
from idlm.devices import free_cached_memory, is_out_of_memory
from idlm.errors import UserError
from idlm.semantics import Semantics
from idlm.text.tokenizer import load_tokenizer
from idlm.train.data.base import CORRECT, JudgedSource, Source, make_encoder, open_source
from idlm.train.data.packing import held_out_flags
from idlm.train.prepare import run_date, separate_data
from idlm.train.report import HELD_OUT, TRAINED, Measurement, Sampler, SampleReport, SampleText

if TYPE_CHECKING:
    from idlm.infer.engine import Engine
    from idlm.infer.evaluation.conversion import Conversion
    from idlm.train.config.schema import TrainConfig

SAMPLE_TOKENS = 512


def engine_sampler(config: TrainConfig) -> Sampler:
    """Return a function that generates greedily from the published checkpoint, with every decoder that fits.

    The prompts are those of a task's validation split, of eval.path, or of the samples of a file that
    training leaves out; where there are none of these, trained prompts, and called so. If the engine fails
    there are no samples: the checkpoint is published before."""

    def sample(directory: Path, num_samples: int) -> SampleReport:
        try:
            return _generate(config, directory, num_samples)
        except UserError as error:
            problem = str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            problem = "out of memory: " + str(error).partition("\n")[0]
        print(f"no samples: {problem}", file=sys.stderr)
        return SampleReport(problem=problem)

    return sample


def require_engine(config: TrainConfig) -> None:
    """Refuse a base that the engine does not decode: UserError IDLM-0545, unless `model.needs_engine` is
    false. What training itself refuses passes."""
    if not config.model.needs_engine:
        return
    from idlm.infer.models.loader import read_spec
    from idlm.train.model.load import base_config, causal_class, new_config

    path = config.model.path
    try:
        base = new_config(config.model.config) if path is None else base_config(path)
        name = causal_class(base).__name__
    except UserError:
        return
    try:
        # As the export has it.
        read_spec({**json.loads(base.to_json_string()), "architectures": [name]})
    except UserError as error:
        raise UserError(
            "IDLM-0545",
            f"idlm does not decode this {base.model_type}, so that only transformers could run what is "
            f"trained: {error.message}",
            fix="use a base of a family that idlm decodes (docs/decoders.md), or model.needs_engine=false",
        ) from error


def _generate(config: TrainConfig, directory: Path, num_samples: int) -> SampleReport:
    # Importing the engine takes seconds, and only the report needs it.
    from idlm.infer.decoders.base import fitting_decoders
    from idlm.infer.engine import Engine

    params = SamplingParams(temperature=0, max_tokens=SAMPLE_TOKENS)
    measurements: list[Measurement] = []
    origin = ""
    texts: list[SampleText] = []
    for decoder in fitting_decoders(Semantics.load(directory)):
        engine = Engine.from_pretrained(directory, decoder, device=config.train.device)
        prompts, judge, origin = _prompts(config, engine, num_samples)
        done = engine.generate(prompts, params)
        verdicts = [judge(index, completion.text) for index, completion in enumerate(done)]
        measurements.append(_measure(decoder, done, verdicts))
        if not texts:
            shown = [p if isinstance(p, str) else engine.tokenizer.decode(p) for p in prompts]
            texts = [
                SampleText(prompt=prompt, response=completion.text, verdict=verdict or "")
                for prompt, completion, verdict in zip(shown, done, verdicts, strict=True)
            ]
        # The next decoder's engine needs the memory of this one.
        del engine, judge
        free_cached_memory()
    # Evaluations decode weights that are not published.
    found = _conversion(config, directory) if directory == Path(config.output_dir) else None
    return SampleReport(
        samples=tuple(texts), measurements=tuple(measurements), origin=origin, conversion=found
    )


def _prompts(
    config: TrainConfig, engine: Engine, num_samples: int
) -> tuple[list[str | list[int]], Callable[[int, str], str | None], str]:
    """Return the prompts, a judge `(index, answer) -> verdict or None`, and what the prompts are."""
    source, indices, origin = _held_out(config, engine.tokenizer, num_samples)
    if isinstance(source, JudgedSource):
        return [source.question(index) for index in indices], source.verdict, origin
    samples = [source.sample(index) for index in indices]
    prompts = [sample.token_ids[: max(1, int(sample.supervised.argmax()))].tolist() for sample in samples]
    return prompts, lambda index, answer: None, origin


def _held_out(config: TrainConfig, tokenizer: Any, num_samples: int) -> tuple[Source, list[int], str]:
    """Return a source, the first of its samples that did not train, and what these are."""
    separate = separate_data(config)
    data = config.data if separate is None else separate
    encoder = make_encoder(data, tokenizer, None, date=run_date(config))
    source = open_source(data, encoder, output_dir=config.output_dir)
    given = config.eval.path or config.eval.split
    flags, origin = None, HELD_OUT if given is None else f"prompts of {given}"
    if separate is None:
        flags = held_out_flags(config.eval, source, seed=data.seed)
        origin = TRAINED if flags is None else HELD_OUT
    if flags is None:
        return source, [*range(num_samples)[: source.num_samples]], origin
    return source, np.flatnonzero(flags)[:num_samples].tolist(), origin


def _conversion(config: TrainConfig, directory: Path) -> Conversion | None:
    """What the run changed since its base, on held-out samples; None for new weights."""
    from idlm.infer.cli.config import EngineArguments
    from idlm.infer.evaluation.conversion import MAX_ANSWERS, measure_conversion

    if config.model.path is None or Semantics.load(directory).causality != "causal":
        return None
    settings = {"device": config.train.device}
    own = EngineArguments(model=str(directory), decoder=None, settings=settings, options={})
    base = dataclasses.replace(own, model=config.model.path, decoder="ar")
    source, indices, origin = _held_out(config, load_tokenizer(directory), MAX_ANSWERS)
    samples = map(source.sample, indices)
    answers = [(one.token_ids.tolist(), (np.flatnonzero(one.supervised[1:]) + 1).tolist()) for one in samples]
    return measure_conversion(base, own, answers, origin=f"answers to {origin}", max_tokens=SAMPLE_TOKENS)


def _measure(decoder: str, done: Sequence[Any], verdicts: Sequence[str | None]) -> Measurement:
    tested = sum(sum(completion.tested_by_position) for completion in done)
    accepted = sum(sum(completion.accepted_by_position) for completion in done)
    num_forwards = sum(completion.num_forwards for completion in done)
    is_judged = all(verdict is not None for verdict in verdicts)
    return Measurement(
        decoder=decoder,
        exact_match=sum(verdict == CORRECT for verdict in verdicts) / len(done) if is_judged else None,
        acceptance_rate=accepted / tested if tested else None,
        tokens_per_forward=sum(len(c.token_ids) for c in done) / num_forwards if num_forwards else None,
    )
