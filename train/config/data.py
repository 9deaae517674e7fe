"""The section `data` of the configuration of `idlm-train`: typed fields with their help."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

MAX_DEFAULT_WORKERS = 8
"""Processes that tokenise when `data.workers` is not given, on a machine with more cores."""


def setting(default: Any, text: str) -> Any:
    """A field of a section with its default, a copy for each instance, and its line of `--help`."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.copy(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class DataConfig:
    """The training data."""

    source: str = setting("jsonl", "a registered source: jsonl, parquet, hf (a saved dataset) or task")
    path: str | None = setting(None, "file, folder or pattern of the source; for hf a folder or a hub name")
    split: str = setting("train", "split of an hf dataset")
    shape: str = setting(
        "auto",
        "shape of the records: messages, sharegpt, pair, alpaca, text, answers; auto: as the first record",
    )
    task: str = setting("ledger", "generated task of the task source")
    level: str = setting("tiny", "level of the task")
    task_args: dict[str, Any] = setting({}, "arguments of the task that differ from those of its level")
    seed: int = setting(0, "seed of the order of a file's samples, or of a task")
    chat_template: bool = setting(
        True, "render prompt and response with the tokenizer's chat template if it has one"
    )
    thinking: str = setting(
        "keep",
        "<think> blocks: keep the text as it is, strip the blocks, or off: strip and render without thinking",
    )
    turns: str = setting(
        "all", "supervised assistant turns: all, last, or each, in a sample of its own that ends with it"
    )
    on_bad_record: str = setting("error", "a record that cannot be used: error, or skip and count it")
    workers: int | None = setting(
        None,
        f"processes that tokenise; 0 or 1: this process; null: one per core, at most {MAX_DEFAULT_WORKERS}",
    )
    cache_dir: str | None = setting(
        None, "folder of tokenised data; null: the folder data_cache next to output_dir"
    )
