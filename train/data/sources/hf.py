"""A dataset of the Hugging Face `datasets` library as a data source.

`data.path` is a folder written by `save_to_disk`, an `.arrow` file, a folder of data files or a name of the
hub. Code of a dataset is never run. Data files are converted under the run's data cache, a hub dataset in the
library's."""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError, naming
from idlm.files.records import Row, identity_of, is_hidden, is_saved, without_nulls
from idlm.train.config.data import DEFAULT_SPLITS, DataConfig
from idlm.train.data.base import SOURCES, Encoder
from idlm.train.data.build import cache_folder, cached_source
from idlm.train.data.cache import CachedSource
from idlm.train.data.records.detect import wanted_columns
from idlm.train.data.records.parts import VALUE_KEYS
from idlm.train.data.records.turns import with_cells

BATCH_ROWS = 256
WAYS = "give a folder of save_to_disk, or a file with data.source=auto; the hub needs network or its cache"


class DatasetReader:
    """Rows of one split; `number` is the 1-based row."""

    def __init__(self, config: DataConfig, cache: Path) -> None:
        path, self.split = Path(str(config.path)), config.split
        options: dict[str, Any] = {"cache_dir": str(cache / "datasets")} if path.exists() else {}
        key = config.section
        what = f"the dataset {key}.path={path} ({key}.split={self.split}) cannot be loaded"
        # Network, hub, cache and formats have errors of their own.
        with naming("IDLM-0232", what, fix=f"{WAYS}; {key}.subset names one of several configurations"):
            found, data_files, left_out = _load(path, config, options)
        self.dataset = _split_of(found, config)
        self.names: tuple[str, ...] = (f"{config.path}[{self.split}]",)
        self.files = tuple(data_files.get(self.split.partition("[")[0], self.names))
        self.left_out = tuple(left_out)
        self.share_read = 0.0

    def identity(self) -> list[Any]:
        files = [Path(entry["filename"]) for entry in self.dataset.cache_files]
        return [self.split, len(self.dataset), *identity_of(files)]

    def rows(self) -> Iterator[Row]:
        columns, unread = wanted_columns(self.dataset.column_names)
        dataset = self.dataset.with_format(None).select_columns(columns)
        number, is_table = 0, dataset.info.builder_name == "csv"
        for batch in dataset.iter(BATCH_ROWS):
            for values in zip(*batch.values(), strict=True):
                number += 1
                record = without_nulls(dict(zip(batch, values, strict=True)))
                cells = record.keys() if is_table else VALUE_KEYS & record.keys()
                value = with_cells(record, cells, f"{self.names[0]}:{number}")
                yield Row(file=0, number=number, value=value, unread=unread)
            self.share_read = number / len(dataset)


def _load(
    path: Path, config: DataConfig, options: dict[str, Any]
) -> tuple[Any, dict[str, list[str]], list[str]]:
    """Return the split as a map-style dataset whose rows lie in files, or the dataset that may not have it;
    the files of each split of a folder, and those that are left out."""
    import datasets

    name, split = str(config.path), config.split
    if path.suffix == ".arrow" and path.is_file():
        try:
            return datasets.Dataset.from_file(name), {}, []
        except (ValueError, OSError):
            # That is a stream of Arrow; other programs write its file format, which `datasets` converts.
            return datasets.load_dataset("arrow", data_files=name, split="train", **options), {}, []
    if is_saved(path):
        return datasets.load_from_disk(name), {}, []
    if path.is_dir() and glob.has_magic(str(path.resolve())):
        problem = f"{path.resolve()} has *, ? or [ in its name, which datasets takes for a pattern"
        fix = "rename the folder; data.source=auto reads JSON lines, Parquet and CSV under any name"
        raise UserError("IDLM-0232", problem, fix=fix)
    load = functools.partial(datasets.load_dataset_builder, name, config.subset)
    builder = load(**options)
    data_files, left_out = _data_files(path.resolve(), builder.config.data_files if path.is_dir() else None)
    options |= {"data_files": data_files} if left_out else {}
    if is_table := hasattr(builder.config, "keep_default_na"):
        # pandas would read words such as null as missing values.
        options |= {"keep_default_na": False, "na_values": [""]}
    if left_out or is_table:
        builder = load(**options)
    if is_table:
        # pandas would read texts such as 007 and True as numbers and truth values.
        first: Any = next((row for rows in builder.as_streaming_dataset().values() for row in rows), {})
        texts = datasets.Features(dict.fromkeys(first, datasets.Value("string")))
        builder = load(**options, features=texts or None)
    builder.download_and_prepare()
    # It may be parts of several, such as train[:1000]+test.
    if {part.partition("[")[0] for part in split.split("+")} <= {*builder.info.splits, "all"}:
        return datasets.DatasetDict({split: builder.as_dataset(split=split)}), data_files, left_out
    return builder.as_dataset(), data_files, left_out


def _split_of(found: Any, config: DataConfig) -> Any:
    import datasets

    split = config.split
    if isinstance(found, datasets.DatasetDict):
        splits = list(found)
        if split in splits:
            return found[split]
    else:
        # It holds one split, which need not have a name.
        splits = [str(found.split or DEFAULT_SPLITS[0])]
        if split in (*splits, *DEFAULT_SPLITS):
            return found
    raise UserError(
        "IDLM-0232",
        f"{config.path} has no split {split!r}{did_you_mean(split, splits)}",
        fix=config.split_fix(splits),
    )


def _data_files(folder: Path, found: Any) -> tuple[dict[str, list[str]], list[str]]:
    """The files of each split in a folder, of those that `datasets` found; those that are hidden or temporary
    apart."""
    kept: dict[str, list[str]] = {}
    left_out: list[str] = []
    for split, names in (found or {}).items():
        for name in map(str, names):
            is_left_out = any(map(is_hidden, os.path.relpath(name, folder).split(os.sep)))
            (left_out if is_left_out else kept.setdefault(str(split), [])).append(name)
    return kept, left_out


@SOURCES.register("hf")
def hf_source(config: DataConfig, encoder: Encoder) -> CachedSource:
    if not (config.path or "").strip():
        raise UserError("IDLM-0209", "path is empty", fix="set data.path to a folder or a hub name")
    reader = DatasetReader(config, cache_folder(config))
    return cached_source(reader, config, encoder)
