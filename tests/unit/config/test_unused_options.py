"""Options that do nothing are refused by name, and committed recipes have none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from idlm.config.compose import compose, recipes
from idlm.errors import UserError
from idlm.train.check import check_config
from idlm.train.config.schema import TrainConfig, value_of
from idlm.train.unused import RULES, Rule, unused_options
from tests.integration.inference.command_lines import TINY

STEPS = "train.stages=[{stride: 2, steps: 4, clean_weight: auto}]"
FRACTIONS = "train.stages=[{stride: 2, fraction: 1.0, clean_weight: auto}]"
USED = {
    "data.path": "data.source=jsonl",
    "data.sources": "data.source=jsonl",
    "data.shape": "data.source=jsonl",
    "data.on_bad_record": "data.source=hf",
    "data.workers": "data.source=jsonl",
    "data.cache_dir": "data.source=parquet",
    "data.split": "data.source=hf",
    "data.subset": "data.source=hf",
    "data.task": "data.source=task",
    "data.level": "data.source=task",
    "data.task_args": "data.source=task",
    "data.thinking": "data.shape=messages",
    "data.turns": "data.shape=messages",
    "data.chat_template": "data.shape=messages",
    "data.left_out": "data.shape=messages",
    "data.date": "data.shape=messages",
    "model.recomputed_layers": "model.gradient_checkpointing=true",
    "eval.num_items": "eval.every=1",
    "eval.path": "eval.every=1",
    "eval.split": "data.source=hf eval.every=1",
    "eval.subset": "data.source=hf eval.every=1 eval.split=test",
    "eval.holdout": "eval.every=1",
    "eval.num_prompts": "eval.every=1",
    "eval.stop_if": "eval.num_prompts=2",
    "report.num_samples": "report.enabled=true",
    "wandb.project": "wandb.mode=offline",
    "wandb.name": "wandb.mode=online",
    "model.config": "model.path=null",
    "model.mask_token_id": "objective=idlm",
    "train.max_padding": "objective=full",
    "train.steps": FRACTIONS,
    "train.epochs": FRACTIONS,
    "train.balance": STEPS,
    "train.max_clean_weight": STEPS,
    "train.phase": "objective=idlm",
    "train.draft_input": "objective=idlm",
    "train.noise_range": "train.draft_input=uniform",
    "train.distill_share": "train.distill=kl",
    "train.decay": "train.schedule=wsd",
    "plan.num_gpus": "dry_run=true",
}
"""For every key of the table a setting with which it is read."""
UNUSED = (
    ("data.source=task", "data.path=my.jsonl"),
    ("data.source=task", "data.sources=[{path: a}]"),
    ("data.source=task", "data.shape=pair"),
    ("data.source=task", "data.on_bad_record=skip"),
    ("data.source=task", "data.workers=2"),
    ("data.source=task", "data.cache_dir=/c"),
    ("data.source=task eval.every=1", "eval.path=/e.jsonl"),
    ("data.source=task eval.every=1", "eval.split=test"),
    ("data.source=task eval.every=1", "eval.subset=b"),
    ("data.source=task eval.every=1", "eval.holdout=0.5"),
    ("data.source=jsonl", "data.task=recall"),
    ("data.source=parquet", "data.level=small"),
    ("data.source=hf", "+data.task_args.steps=3"),
    ("data.source=jsonl", "data.split=test"),
    ("data.source=jsonl", "data.subset=main"),
    ("data.shape=text", "data.thinking=strip"),
    ("data.shape=text", "data.turns=last"),
    ("data.shape=text", "data.chat_template=false"),
    ("data.shape=text", "data.left_out=accept"),
    ("data.shape=text", "data.date=2025-01-31"),
    ("model.gradient_checkpointing=false train.sizes=given", "model.recomputed_layers=2"),
    ("eval.every=null", "eval.num_items=3"),
    ("eval.every=null", "eval.num_prompts=3"),
    ("eval.every=null report.num_samples=0", "eval.path=/e.jsonl"),
    ("eval.every=null report.num_samples=0", "eval.split=test"),
    ("eval.num_prompts=0", "+eval.stop_if.exact_match=0.1"),
    ("data.source=jsonl eval.every=1", "eval.split=test"),
    ("data.source=hf eval.every=1", "eval.subset=b"),
    ("data.source=hf eval.every=1 data.sources=[{path: a}]", "eval.split=test"),
    ("eval.every=1 eval.path=/e.jsonl", "eval.holdout=0.5"),
    ("report.enabled=false", "report.num_samples=3"),
    ("wandb.mode=disabled", "wandb.project=mine"),
    ("wandb.mode=disabled", "wandb.name=mine"),
    ("model.path=/m", "+model.config.model_type=qwen3"),
    ("objective=ar", "model.mask_token_id=3"),
    ("objective=ar", "train.max_padding=9"),
    (STEPS, "train.steps=9"),
    (STEPS, "train.epochs=9"),
    ("train.stages=[{stride: 2, steps: 4}]", "train.balance=previous"),
    ("train.stages=[{stride: 2, steps: 4}]", "train.max_clean_weight=3"),
    ("objective=block", "train.phase=random"),
    ("objective=block", "train.draft_input=uniform"),
    ("train.draft_input=mask", "train.noise_range=[1,9]"),
    ("train.draft_input=uniform", "model.mask_token_id=3"),
    ("train.distill=none", "train.distill_share=0.5"),
    ("train.schedule=cosine_per_stage", "train.decay=0.3"),
    ("dry_run=false", "plan.num_gpus=8"),
)
"""In the order of the table: a setting under which a key is not read, and the key with a value."""
CASES = [(rule, key) for rule in RULES for key in rule.keys.split()]


def composed(*overrides: str) -> TrainConfig:
    return compose("train", TrainConfig, list(overrides))


def settings(text: str) -> list[str]:
    return [text] if text.startswith("train.stages") else re.split(r" (?=[a-z_.]+=)", text)


def key_of(override: str) -> str:
    return ".".join(override.removeprefix("+").partition("=")[0].split(".")[:2])


def test_the_cases_go_over_the_whole_table() -> None:
    assert [key_of(override) for _, override in UNUSED] == [key for _, key in CASES]


@pytest.mark.parametrize(("case", "unused"), list(zip(CASES, UNUSED, strict=True)))
def test_an_option_that_does_nothing_is_refused_and_one_that_is_read_is_not(
    case: tuple[Rule, str], unused: tuple[str, str]
) -> None:
    (rule, key), (setting, override) = case, unused
    config, default = composed(*settings(setting), override), value_of(TrainConfig(), key)
    shown = "null" if default is None else default
    advice = f"{rule.why}; else leave it out, or set {key}={shown}"
    assert f"{key}={value_of(config, key)} has no effect: {advice}" in unused_options(config)
    read = composed(*settings(USED[key]), override)
    assert not any(line.startswith(f"{key}=") for line in unused_options(read))


def refused(*overrides: str) -> str:
    with pytest.raises(UserError, match="IDLM-0504") as caught:
        check_config(composed(*overrides))
    return caught.value.message


def test_a_file_for_the_generated_task_is_refused_before_a_run_trains_without_it() -> None:
    shown = refused("recipe=tiny", "data.source=task", "data.path=my.jsonl", "eval.path=/e.jsonl")
    assert (
        "2 problems" in shown and "data.path=my.jsonl has no effect" in shown and "data.source=jsonl" in shown
    )


@pytest.mark.parametrize("name", recipes())
def test_no_recipe_sets_what_does_nothing(name: str) -> None:
    assert not unused_options(composed(f"recipe={name}"))


def test_the_commands_of_the_documentation_set_nothing_that_does_nothing() -> None:
    root = Path(__file__).parents[3]
    texts = [
        path.read_text().replace("\\\n", " ") for path in (root / "README.md", *(root / "docs").glob("*.md"))
    ]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("idlm-train ")]
    commands = [line.partition("#")[0].split()[1:] for line in lines]
    assert len(commands) >= 5
    for command in commands:
        assert not unused_options(composed(*command)), command


def fractions(*values: float) -> str:
    return f"train.stages=[{', '.join(f'{{stride: 2, fraction: {value}}}' for value in values)}]"


@pytest.mark.parametrize("values", [(0.7,), (0.5, 0.7), (0.25, 0.25)])
def test_fractions_that_are_no_shares_of_the_whole_run_are_refused(values: tuple[float, ...]) -> None:
    assert f"add up to {sum(values):g}" in refused("recipe=tiny", fractions(*values))


@pytest.mark.parametrize("values", [(1.0,), (0.33, 0.33, 0.33), (0.334, 0.333, 0.333)])
def test_fractions_that_add_up_are_taken(values: tuple[float, ...]) -> None:
    config: Any = composed("recipe=tiny", f"model.path={TINY}", fractions(*values), "train.device=cpu")
    check_config(config)


def test_one_mask_over_several_packed_rows_of_a_gated_adapter_is_refused() -> None:
    """It would grow with the square of all rows of the batch."""
    words = ["recipe=tiny_lora", "model.path=x", "model.attention=idlm_sdpa", "train.batch_size=2"]
    with pytest.raises(UserError, match="idlm_sdpa with a gated adapter"):
        check_config(compose("train", TrainConfig, words))
