"""A dataset of the Hugging Face `datasets` library as a data source: a saved folder, or a name of the
hub.

A folder written by `save_to_disk`, an `.arrow` file, or a folder of data files without a script. Code of
a dataset is never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError
from idlm.train.data.base import SOURCES, Encoder
from idlm.train.data.build import cached_source
from idlm.train.data.cache import CachedSource
from idlm.train.data.files import Row, identity_of
from idlm.train.data.sources.parquet import BATCH_ROWS, wanted_columns, without_nulls

if TYPE_CHECKING:
    from idlm.train.data.settings import DataConfig


class DatasetReader:
    """Rows of one split; `place` is the 1-based row."""

    def __init__(self, path: str, split: str) -> None:
        self.split = split
        self.dataset = _load(path, split)
        self.names: tuple[str, ...] = (f"{path}[{split}]",)
        self.share_read = 0.0

    def identity(self) -> list[Any]:
        files = [Path(entry["filename"]) for entry in self.dataset.cache_files]
        return [self.split, len(self.dataset), *identity_of(files)]

    def rows(self) -> Iterator[Row]:
        dataset = self.dataset.with_format(None).select_columns(wanted_columns(self.dataset.column_names))
        for start in range(0, len(dataset), BATCH_ROWS):
            columns = dataset[start : start + BATCH_ROWS]
            for offset, values in enumerate(zip(*columns.values(), strict=True)):
                record = without_nulls(dict(zip(columns, values, strict=True)))
                yield Row(file=0, place=start + offset + 1, value=record)
            self.share_read = start / len(dataset)


def _load(path: str, split: str) -> Any:
    """The split as a map-style dataset whose rows lie in files."""
    import datasets

    place = Path(path).expanduser()
    try:
        if place.suffix == ".arrow" and place.is_file():
            return datasets.Dataset.from_file(str(place))
        is_saved = (place / "state.json").is_file() or (place / "dataset_dict.json").is_file()
        if not is_saved:
            return datasets.load_dataset(str(place) if place.exists() else path, split=split)
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
    if config.path is None:
        raise UserError(
            "IDLM-0209", "data.source=hf needs data.path", fix="set data.path to a folder or a hub name"
        )
    return cached_source(DatasetReader(config.path, config.split), config, encoder)
