"""A dataset of the Hugging Face `datasets` library as a data source.

`data.path` is a folder written by `save_to_disk`, an `.arrow` file, a folder of data files or a name of the
hub. Code of a dataset is never run. Data files are converted under the run's data cache, a hub dataset in the
library's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError
from idlm.train.config.data import DataConfig
from idlm.train.data.base import SOURCES, Encoder
from idlm.train.data.build import cache_folder, cached_source
from idlm.train.data.cache import CachedSource
from idlm.train.data.files import SAVED_DATASET, Row, identity_of
from idlm.train.data.records.detect import wanted_columns
from idlm.train.data.records.values import without_nulls

BATCH_ROWS = 256


class DatasetReader:
    """Rows of one split; `place` is the 1-based row."""

    def __init__(self, path: str, split: str, cache: Path) -> None:
        self.split = split
        self.dataset = _load(path, split, cache)
        self.names: tuple[str, ...] = (f"{path}[{split}]",)
        self.share_read = 0.0

    def identity(self) -> list[Any]:
        files = [Path(entry["filename"]) for entry in self.dataset.cache_files]
        return [self.split, len(self.dataset), *identity_of(files)]

    def rows(self) -> Iterator[Row]:
        names = self.dataset.column_names
        columns = wanted_columns(names)
        unread = tuple(name for name in names if name not in columns)
        dataset = self.dataset.with_format(None).select_columns(columns)
        place = 0
        for batch in dataset.iter(BATCH_ROWS):
            for values in zip(*batch.values(), strict=True):
                place += 1
                record = without_nulls(dict(zip(batch, values, strict=True)))
                yield Row(file=0, place=place, value=record, unread=unread)
            self.share_read = place / len(dataset)


def _load(path: str, split: str, cache: Path) -> Any:
    """The split as a map-style dataset whose rows lie in files; UserError IDLM-0232 where that fails."""
    import datasets

    place = Path(path).expanduser()
    try:
        if place.suffix == ".arrow" and place.is_file():
            return datasets.Dataset.from_file(str(place))
        if not place.exists():
            return datasets.load_dataset(path, split=split)
        if not any((place / name).is_file() for name in SAVED_DATASET):
            return datasets.load_dataset(str(place), split=split, cache_dir=str(cache / "datasets"))
        loaded = datasets.load_from_disk(str(place))
    # Network, hub, cache and format errors come as a dozen types of several libraries.
    except Exception as error:
        raise UserError(
            "IDLM-0232",
            f"the dataset data.path={path} (data.split={split}) cannot be loaded: {error}",
            fix="give a folder written by save_to_disk; a name of the hub needs a network or its cache",
        ) from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise UserError(
            "IDLM-0232",
            f"{path} has no split {split!r}{did_you_mean(split, list(loaded))}",
            fix=f"set data.split to one of: {', '.join(loaded)}",
        )
    return loaded[split]


@SOURCES.register("hf")
def hf_source(config: DataConfig, encoder: Encoder) -> CachedSource:
    """Read the split `data.split` of `data.path`."""
    if not config.path:
        raise UserError("IDLM-0209", "the data path is empty", fix="set data.path to a folder or a hub name")
    reader = DatasetReader(config.path, config.split, cache_folder(config))
    return cached_source(reader, config, encoder)
