"""Options of `idlm-train` that no code reads because of another one. An option that is read but changes
nothing passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from idlm.files.records import SUFFIXES
from idlm.train.config.data import FILE_SOURCES
from idlm.train.config.schema import TrainConfig, value_of
from idlm.train.objectives.base import OBJECTIVES
from idlm.train.objectives.curriculum import AUTO_BALANCED


class Rule(NamedTuple):
    """`keys`, apart by spaces, are not read where `applies`; `why`: "KEY=VALUE has no effect: ..."."""

    keys: str
    applies: Callable[[TrainConfig], bool]
    why: str


RULES = (
    Rule(
        "data.path data.sources data.shape data.on_bad_record data.workers data.cache_dir",
        lambda c: c.data.source == "task",
        "data.source=task generates its samples; give data.source=jsonl (parquet, hf) to read files",
    ),
    Rule(
        "eval.path eval.split eval.subset eval.holdout",
        lambda c: c.data.source == "task",
        "data.source=task is evaluated on its own validation split",
    ),
    Rule(
        "data.task data.level data.task_args",
        lambda c: c.data.source in FILE_SOURCES,
        "only data.source=task generates samples",
    ),
    Rule(
        "data.split data.subset",
        lambda c: all(one.source in SUFFIXES for one in c.data.parts()),
        "its files have no splits",
    ),
    Rule(
        "data.thinking data.turns data.chat_template data.left_out data.date",
        lambda c: c.data.shape == "text",
        "records of data.shape=text are trained on as they are",
    ),
    Rule(
        "model.recomputed_layers",
        lambda c: not c.model.gradient_checkpointing and c.train.sizes == "given",
        "only model.gradient_checkpointing=true recomputes activations",
    ),
    Rule(
        "eval.num_items eval.num_prompts",
        lambda c: c.eval.every is None,
        "nothing is evaluated without eval.every",
    ),
    Rule(
        "eval.path eval.split",
        lambda c: c.eval.every is None and not (c.report.enabled and c.report.num_samples),
        "nothing is evaluated without eval.every, and the report has no samples",
    ),
    Rule("eval.stop_if", lambda c: not c.eval.num_prompts, "nothing is decoded without eval.num_prompts"),
    Rule("eval.split", lambda c: c.data.source in SUFFIXES, "its files have no splits; give eval.path"),
    Rule(
        "eval.subset",
        lambda c: c.data.source in SUFFIXES or (c.eval.path, c.eval.split) == (None, None),
        "it is of an hf dataset, and needs eval.path or eval.split",
    ),
    Rule(
        "eval.split",
        lambda c: bool(c.data.sources) and c.eval.path is None,
        "it is a split of one dataset; give eval.path with it",
    ),
    Rule(
        "eval.holdout",
        lambda c: (c.eval.path, c.eval.split) != (None, None),
        "eval.path and eval.split give the held-out data",
    ),
    Rule(
        "report.num_samples",
        lambda c: not c.report.enabled and c.report.num_samples > 0,
        "report.enabled=false writes no report",
    ),
    Rule(
        "wandb.project wandb.name", lambda c: c.wandb.mode == "disabled", "wandb.mode=disabled sends nothing"
    ),
    Rule("model.config", lambda c: c.model.path is not None, "model.path has its own config.json"),
    Rule(
        "model.mask_token_id", lambda c: not objective_has(c, "places_masks"), "the objective places no masks"
    ),
    Rule(
        "train.max_padding",
        lambda c: not objective_has(c, "pads_answers"),
        "the objective does not pad answers",
    ),
    Rule(
        "train.steps train.epochs",
        lambda c: any(stage.steps is not None for stage in c.train.stages),
        "train.stages give steps, whose sum is the length of the run; give fractions instead",
    ),
    Rule(
        "train.balance train.max_clean_weight",
        lambda c: all(stage.clean_weight != AUTO_BALANCED for stage in c.train.stages),
        "no stage has clean_weight=auto",
    ),
    Rule("train.phase", lambda c: c.objective != "idlm", "only objective=idlm has blocks of masks alone"),
    Rule("train.draft_input", lambda c: c.objective != "idlm", "only objective=idlm drafts from mask rows"),
    Rule(
        "train.noise_range",
        lambda c: c.train.draft_input == "mask",
        "train.draft_input=mask feeds one id; give train.draft_input=uniform",
    ),
    Rule(
        "model.mask_token_id",
        lambda c: c.train.draft_input == "uniform",
        "train.draft_input=uniform has no mask",
    ),
    Rule("train.distill_share", lambda c: c.train.distill == "none", "train.distill=none uses labels"),
    Rule("train.decay", lambda c: c.train.schedule != "wsd", "only train.schedule=wsd has such an end"),
    Rule("plan.num_gpus", lambda c: not c.dry_run, "a run counts its processes; dry_run=true plans"),
)


def objective_has(config: TrainConfig, flag: str) -> bool:
    """A flag of the objective's class; true for an unknown objective, which is reported by its name alone."""
    known = config.objective in OBJECTIVES.names()
    return not known or bool(getattr(OBJECTIVES.get(config.objective), flag))


def unused_options(config: TrainConfig) -> list[str]:
    """Return a sentence about each option that is set and not read; blank paths are refused in `check`."""
    defaults, found = TrainConfig(), {}
    for rule in RULES:
        for key in rule.keys.split():
            value, default = value_of(config, key), value_of(defaults, key)
            if key not in found and value not in (default, "") and rule.applies(config):
                shown = "null" if default is None else default
                found[key] = (
                    f"{key}={value} has no effect: {rule.why}; else leave it out, or set {key}={shown}"
                )
    return list(found.values())
