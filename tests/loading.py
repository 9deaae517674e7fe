"""Loads a checkpoint in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from idlm.infer.models.loader import LoadedModel, load_outline, read_outline
from idlm.infer.models.shards import ALONE, Shards


def load_model(
    path: str | Path, *, device: str = "cpu", shards: Shards = ALONE, **options: Any
) -> LoadedModel:
    """Check and load a model; `options` of `read_outline`."""
    return load_outline(read_outline(path, shards=shards, **options), device=device, shards=shards)
