"""Sources of files, whose cache lies next to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from idlm.train.config.data import DataConfig
from idlm.train.data.base import SOURCES, Encoder


def write_lines(path: Path, *records: Any) -> Path:
    """JSON lines; a text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in records))
    return path


def config_of(path: Path, **changes: Any) -> DataConfig:
    return DataConfig(path=str(path), **{"cache_dir": str(path.parent / "cache")} | changes)


def read(data: DataConfig | Path, encoder: Encoder, **changes: Any) -> Any:
    config = data if isinstance(data, DataConfig) else config_of(data, **changes)
    return SOURCES.get(config.source)(config, encoder)


def contents(source: Any) -> list[tuple[list[int], list[bool]]]:
    samples = [source.sample(index) for index in range(source.num_samples)]
    return [(sample.token_ids.tolist(), sample.supervised.tolist()) for sample in samples]
