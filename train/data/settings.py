"""The section `data` of the configuration of `idlm-train`, typed and documented."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError
from idlm.train.data.files import SUFFIXES, find_files

MAX_DEFAULT_WORKERS = 8
"""Processes that tokenise when `data.workers` is not given, on a machine with more cores."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class DataConfig:
    """What it is trained on."""

    source: str = _setting("jsonl", "a registered source: jsonl, parquet, hf (a saved dataset) or task")
    path: str | None = _setting(None, "file, folder or pattern of the source; for hf a folder or a hub name")
    split: str = _setting("train", "split of an hf dataset")
    shape: str = _setting(
        "auto",
        "shape of the records: messages, sharegpt, pair, alpaca, text, answers; auto: the first record's",
    )
    task: str = _setting("ledger", "generated task of the task source")
    level: str = _setting("tiny", "level of the task")
    task_args: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "knobs of the task that differ from its level"}
    )
    seed: int = _setting(0, "order of a file's samples, or seed of a task")
    chat_template: bool = _setting(
        True, "render prompt+response through the tokenizer's chat template if it has one"
    )
    thinking: str = _setting(
        "keep",
        "<think> blocks: keep the text as it is, strip the blocks, or off: strip and render without thinking",
    )
    turns: str = _setting(
        "all", "supervised assistant turns: all, last, or each, in a sample of its own that ends with it"
    )
    on_bad_record: str = _setting("error", "a record that cannot be used: error, or skip and count it")
    workers: int | None = _setting(
        None,
        f"processes that tokenise; 0 or 1: this process; null: one per core, at most {MAX_DEFAULT_WORKERS}",
    )
    cache_dir: str | None = _setting(
        None, "where tokenised data is kept; null: folder data_cache beside output_dir"
    )


def data_problems(data: DataConfig, held_out: str | None) -> list[str]:
    """Everything that is wrong with the section and with `eval.path`, as sentences; looks for the files but
    opens none.
    """
    # Not above: the readers import torch, which help and refusals of keys do not wait for.
    from idlm.train.data.base import SOURCES, THINKING, TURNS
    from idlm.train.data.build import ON_BAD_RECORD
    from idlm.train.data.shapes import SHAPE_CHOICES

    choices = {
        "source": (data.source, tuple(SOURCES.names())),
        "shape": (data.shape, SHAPE_CHOICES),
        "thinking": (data.thinking, THINKING),
        "turns": (data.turns, TURNS),
        "on_bad_record": (data.on_bad_record, ON_BAD_RECORD),
    }
    problems = [
        f"data.{key}={value!r} is not one of {', '.join(allowed)}{did_you_mean(str(value), allowed)}"
        for key, (value, allowed) in choices.items()
        if value not in allowed
    ]
    if data.workers is not None and data.workers < 0:
        problems.append(f"data.workers={data.workers} must be at least 0")
    for key, path in (("data.path", data.path), ("eval.path", held_out)):
        if data.source in SUFFIXES and path is not None and path.strip():
            try:
                find_files(path, SUFFIXES[data.source])
            except UserError as error:
                problems.append(f"{key}: {error.message}")
    return problems
