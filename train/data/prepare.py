"""The data of a run: training rows, held-out rows, and the curriculum whose length follows from the rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from idlm.errors import UserError
from idlm.text.tokenizer import stop_token_ids
from idlm.train.config.schema import make_curriculum
from idlm.train.data.base import Encoder, Source, has_splits, make_encoder
from idlm.train.data.cache import CachedSource
from idlm.train.data.dataset import PackedDataset
from idlm.train.data.open import open_source_on_all_ranks
from idlm.train.objectives.base import OBJECTIVES, Objective, ObjectiveArgs
from idlm.train.objectives.curriculum import Curriculum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from idlm.train.config.monitoring import EvalConfig
    from idlm.train.config.schema import TrainConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a run trains on and is evaluated on; `held_out` is None without `eval.every`."""

    dataset: PackedDataset
    curriculum: Curriculum
    held_out: PackedDataset | None


def make_objective(
    config: TrainConfig, model: PreTrainedModel, tokenizer: Any, mask_token_id: int | None
) -> Objective:
    """Return the objective of a run; `mask_token_id` is None where it places no masks."""
    generation = model.generation_config
    return OBJECTIVES.get(config.objective).create(
        ObjectiveArgs(
            mask_token_id=mask_token_id,
            mask_region=config.mask_region,
            max_stride=max((stage.stride for stage in config.train.stages), default=1),
            stop_token_ids=stop_token_ids(tokenizer, generation.to_dict() if generation else None),
        )
    )


def prepare_data(
    config: TrainConfig, tokenizer: Any, objective: Objective, mask_token_id: int | None, world_size: int
) -> RunData:
    """Return the packed datasets and the curriculum, whose steps follow from the rows where `epochs` is set.

    Collective.
    """
    loop = config.train
    encoder = make_encoder(config.data, tokenizer, mask_token_id)
    source = open_source_on_all_ranks(config.data, encoder, output_dir=config.output_dir)
    is_held_out = held_out_flags(config.eval, source, seed=config.data.seed)

    def packed(source: Source, left_out: np.ndarray | None) -> PackedDataset:
        pad_token_id = tokenizer.pad_token_id
        return PackedDataset(
            source,
            objective,
            max_length=loop.max_length,
            row_length=loop.row_length or objective.default_row_length(loop.max_length),
            overlong=loop.overlong,
            pad_token_id=tokenizer.eos_token_id if pad_token_id is None else pad_token_id,
            seed=config.data.seed,
            left_out=left_out,
        )

    dataset = packed(source, is_held_out)
    curriculum = make_curriculum(config, world_size=world_size, rows_per_epoch=dataset.rows_per_epoch())
    dataset.start(curriculum)
    held_out = None
    if is_held_out is not None:
        held_out = packed(source, ~is_held_out)
    elif config.eval.every is not None:
        held_out = packed(_separate_source(config, encoder), None)
    return RunData(dataset=dataset, curriculum=curriculum, held_out=held_out)


def held_out_flags(config: EvalConfig, source: Source, *, seed: int) -> np.ndarray | None:
    """Return which samples of a file are held out, bool [num_samples]; None where none are.

    Whole records are held out, so that turns of one conversation stay together. Raises UserError IDLM-0552
    where no sample is left to train on.
    """
    if config.every is None or config.path is not None or source.num_samples is None:
        return None
    records = source.records() if isinstance(source, CachedSource) else np.arange(source.num_samples)
    chance = np.random.default_rng([seed, source.num_samples]).random(source.num_samples)
    is_held_out = chance < config.holdout
    is_held_out[chance[: records.max() + 1].argmin()] = True
    flags = is_held_out[records]
    if flags.all():
        raise UserError(
            "IDLM-0552",
            f"eval.holdout={config.holdout} of {source.num_samples} samples leaves nothing to train on",
            fix="give eval.path with held-out data, or eval.every=null",
        )
    return flags


def _separate_source(config: TrainConfig, encoder: Encoder) -> Source:
    """Open `eval.path` (of an hf dataset its validation split), or the validation split of a task."""
    if config.eval.path is None and not has_splits(config.data.source):
        raise UserError(
            "IDLM-0552",
            f"the endless source {config.data.source} has no samples to hold out",
            fix="give eval.path with held-out data, or eval.every=null",
        )
    data = dataclasses.replace(config.data, path=config.eval.path, split="validation")
    return open_source_on_all_ranks(data, encoder, output_dir=config.output_dir)
