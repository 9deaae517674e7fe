"""The section `data` of the configuration of `idlm-train`: typed fields with their help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from idlm.config.schema import option
from idlm.files.records import SUFFIXES, source_of

AUTO_SOURCE, FILE_SOURCES = "auto", (*SUFFIXES, "hf")
OWN_DATA = ("path", "sources")
"""Given, they are what a run reads, whatever source a recipe has."""
MAX_DEFAULT_WORKERS = 8
"""Processes that tokenise when `data.workers` is not given, on a machine with more cores."""
DEFAULT_SPLITS = ("train", "validation")
"""Splits of an hf dataset that are trained on and evaluated where none is given."""


@dataclass(kw_only=True)
class SourceConfig:
    """One of several sources; what it leaves out is that of `data`."""

    path: str | None = option("file, folder or pattern; for hf a folder or a hub name", None, is_path=True)
    weight: float = option("share of the samples, relative to the other sources", 1.0)
    source: str | None = option(
        "jsonl, parquet, csv or hf; null: data.source, by the path where that is auto", None
    )
    shape: str | None = option("shape of its records; null: data.shape", None)
    split: str | None = option("split of an hf dataset; null: data.split", None)
    subset: str | None = option("configuration of an hf dataset; null: data.subset", None)


@dataclass(kw_only=True)
class DataConfig:
    """The training data."""

    section: ClassVar[str] = "data"
    """The section of the configuration that `path` and `split` come from."""

    source: str = option(
        "jsonl, parquet, csv, hf (a saved dataset), task or another registered source; auto: what path or "
        "sources hold",
        AUTO_SOURCE,
        reset_by=OWN_DATA,
    )
    path: str | None = option(
        "file, folder or pattern of the source; for hf a folder or a hub name", None, is_path=True
    )
    sources: list[SourceConfig] = option("sources to mix by weight, in place of path", [])
    split: str = option("split of an hf dataset", DEFAULT_SPLITS[0])
    subset: str | None = option("configuration of an hf dataset that has several", None)
    shape: str = option(
        "shape of the records: messages, sharegpt, pair, alpaca, calls, preference (its chosen answers), "
        "text, answers; auto: as the first record",
        "auto",
    )
    task: str = option("generated task of the task source", "ledger", reset_by=OWN_DATA)
    level: str = option("level of the task", "tiny", reset_by=OWN_DATA)
    task_args: dict[str, Any] = option(
        "arguments of the task that differ from those of its level", {}, reset_by=OWN_DATA
    )
    seed: int = option("seed of the order of a file's samples, or of a task", 0)
    chat_template: bool = option(
        "render prompt and response with the tokenizer's chat template if it has one", True
    )
    thinking: Literal["keep", "strip", "off"] = option(
        "thoughts (<think>, reasoning_content); off: strip them and render without thinking", "keep"
    )
    turns: Literal["all", "last", "each"] = option(
        "supervised assistant turns; each: in a sample of its own that ends with it", "all"
    )
    left_out: Literal["error", "accept"] = option(
        "text that the chat template leaves out: error, or accept and count it", "error"
    )
    date: str | None = option(
        "YYYY-MM-DD, for a chat template that writes the day's date; null: the day the run began", None
    )
    on_bad_record: Literal["error", "skip"] = option(
        "a record that cannot be used: error, or skip and count it", "error"
    )
    workers: int | None = option(
        f"processes that tokenise; 0 or 1: this process; null: one per core, at most {MAX_DEFAULT_WORKERS}",
        None,
    )
    cache_dir: str | None = option(
        "folder of tokenised data; null: the folder data_cache next to output_dir", None, is_path=True
    )

    def __post_init__(self) -> None:
        if self.source == AUTO_SOURCE:
            for one in self.sources:
                one.source = one.source or source_of(one.path or "")
            first = self.sources[0].source if self.sources else None
            self.source = first or source_of(self.path or "")

    def parts(self) -> list[DataConfig]:
        """Return the configuration of each of `sources`, or this one where there are none."""
        if not self.sources:
            return [self]
        parts = []
        for one in self.sources:
            given = {name: value for name, value in vars(one).items() if value is not None}
            del given["weight"]
            parts.append(replace(self, **{"sources": [], "path": None} | given))
        return parts

    def split_fix(self, splits: Sequence[str]) -> str:
        """Return what to do where an hf dataset has `splits`, and not the one that is requested."""
        trained = getattr(self, "trained_split", "")
        if others := [split for split in splits if split != trained]:
            return f"set {self.section}.split to one of: {', '.join(others)}"
        return "it has no other split: leave eval.path and eval.split out, and eval.holdout holds out a share"


@dataclass(kw_only=True)
class HeldOutConfig(DataConfig):
    """Held-out data: `data` with the path and the split of `eval`.

    `trained_split` of the same dataset is trained on; "" where it is another dataset."""

    section: ClassVar[str] = "eval"
    trained_split: str = ""


def held_out_config(
    data: DataConfig, path: str | None, split: str | None, subset: str | None = None
) -> HeldOutConfig:
    same = path is None or path == data.path
    return HeldOutConfig(
        **vars(data)
        | {
            "path": data.path if path is None else path,
            "split": DEFAULT_SPLITS[1] if split is None else split,
            "subset": data.subset if same and subset is None else subset,
            "sources": [],
            "trained_split": data.split if same and subset in (None, data.subset) else "",
        }
    )
