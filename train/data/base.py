"""The contract of a data source.

A source is map-style and pure: sample i does not depend on what was read before. It neither packs samples nor
depends on the objective. A new source is one new file in `train/data/sources`, registered in `SOURCES`."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from idlm.registry import Registry
from idlm.train.config.data import DataConfig
from idlm.train.data.cache import MixedSource
from idlm.train.data.encoder import Encoder as Encoder
from idlm.train.data.layout import Sample

CACHE_FOLDER = "data_cache"
CORRECT = "correct"


class Source(Protocol):
    """`num_samples` is None for an endless source; `sample(i)` is a pure function of i."""

    num_samples: int | None

    def sample(self, index: int) -> Sample: ...


@runtime_checkable
class JudgedSource(Source, Protocol):
    """A source that checks a model's answers to its prompts."""

    def question(self, index: int) -> str: ...

    def verdict(self, index: int, answer: str) -> str: ...


SOURCES: Registry[Callable[..., Source]] = Registry("source", "idlm.train.data.sources")
"""Factories `(config: DataConfig, encoder: Encoder) -> Source`. `is_endless` and `has_splits` are attributes
of the factory, because they must be known before it opens anything."""


def has(source: str, attribute: str) -> bool:
    """Return whether a source, if there is one of the name, `is_endless` or `has_splits` for validation."""
    return source in SOURCES.names() and bool(getattr(SOURCES.get(source), attribute, False))


def open_source(data: DataConfig, encoder: Encoder, *, output_dir: str) -> Source:
    """Return the source of `data`, or its mixture of sources; this process tokenises what is not cached."""
    folder = data.cache_dir or str(Path(output_dir).absolute().parent / CACHE_FOLDER)
    opened: list[Any] = [
        SOURCES.get(one.source)(dataclasses.replace(one, cache_dir=folder), encoder) for one in data.parts()
    ]
    if not data.sources:
        source: Source = opened[0]
        return source
    return MixedSource(opened, [one.weight for one in data.sources], seed=data.seed)


def make_encoder(
    config: DataConfig, tokenizer: Any, mask_token_id: int | None, *, date: datetime.date | None = None
) -> Encoder:
    """Return the encoder for a run's data settings; `mask_token_id` None allows every token. `date`: the day
    that a chat template writes; None: `data.date`, else today."""
    if date is None and config.date is not None:
        date = datetime.date.fromisoformat(config.date)
    return Encoder(
        tokenizer,
        mask_token_id=mask_token_id,
        use_chat_template=config.chat_template,
        thinking=config.thinking,
        turns=config.turns,
        left_out=config.left_out,
        date=date,
    )
