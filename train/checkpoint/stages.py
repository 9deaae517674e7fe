"""Publishes a stock checkpoint at the end of every stage: `<output_dir>/stages/<number>-stride-<stride>`, for
the last stage `output_dir` itself.

A stage is published before the checkpoint of the same step. So a run that resumes from a checkpoint has all
stages that ended before it; a stage whose end is trained again is replaced by an equal one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerState

from idlm.text.tokenizer import stop_token_ids
from idlm.train.checkpoint.export import export, export_adapter
from idlm.train.checkpoint.resume import STAGE_FOLDER
from idlm.train.distributed.collectives import from_rank_zero
from idlm.train.distributed.deepspeed import whole_weights
from idlm.train.model.gated_lora import is_trained
from idlm.train.objectives.curriculum import Curriculum, Stage

if TYPE_CHECKING:
    from idlm.train.config.schema import TrainConfig
    from idlm.train.prepare import Prepared


def stage_directory(output_dir: str, stage: Stage) -> Path:
    """Where the checkpoint of a stage before the last is published."""
    return Path(output_dir) / STAGE_FOLDER / f"{stage.index + 1}-stride-{stage.stride}"


def publish_weights(config: TrainConfig, prepared: Prepared, *, stride: int, target: Path) -> None:
    """Publish the weights as they are now, as a checkpoint that decodes with `stride`. Collective: parts of
    ZeRO-3 are gathered, rank 0 writes.
    """
    adapter = prepared.adapter
    weights = whole_weights(prepared.model, wanted=is_trained if adapter is not None else lambda name: True)
    semantics = dataclasses.replace(
        prepared.objective.semantics(stride),
        gated=adapter is not None,
        base_identity=prepared.base_identity,
        stop_token_ids=stop_token_ids(prepared.tokenizer, prepared.model.generation_config.to_dict()),
    )
    dtype = None if config.export.dtype is None else getattr(torch, config.export.dtype)
    model, tokenizer = prepared.model, prepared.tokenizer
    if adapter is None:
        from_rank_zero(lambda: export(model, tokenizer, semantics, target, dtype=dtype, weights=weights))
    else:
        from_rank_zero(
            lambda: export_adapter(weights or {}, tokenizer, semantics, adapter, target, dtype=dtype)
        )


class StageExports(TrainerCallback):
    """Calls `publish_stage` on every rank after the last step of each stage but the last."""

    def __init__(self, curriculum: Curriculum, publish_stage: Callable[[Stage], None]) -> None:
        ends = itertools.accumulate(stage.num_steps for stage in curriculum.stages[:-1])
        self.stage_by_end = dict(zip(ends, curriculum.stages, strict=False))
        self.publish_stage = publish_stage

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        stage = self.stage_by_end.get(state.global_step)
        if stage is not None:
            self.publish_stage(stage)
