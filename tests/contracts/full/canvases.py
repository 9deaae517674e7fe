"""Engines of tiny full-diffusion checkpoints and mixed requests, for tests of `memory=mosaic`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from tests.contracts.engines import build_engine, prompts_of
from tests.numerics import full_reference

FAMILIES = tuple(full_reference.CONFIGS)
PROMPTS = prompts_of([1, 7, 12, 3, 9])
LENGTHS = (12, 8, 16, 4, 24)


def directory_of(kind: str, directory: Path) -> Path:
    """A tiny random checkpoint of a family."""
    save_file(full_reference.random_tensors(kind), directory / "model.safetensors")
    config = full_reference.CONFIGS[kind] | {"stop_token_ids": None, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def engine_of(directory: Path, memory: str = "mosaic", **options: Any) -> Engine:
    defaults = {"max_length": 64, "max_num_batched_tokens": 40}
    return build_engine(directory, None, memory=memory, **{**defaults, **options})


def params_of(number: int) -> SamplingParams:
    settings: dict[str, Any] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.8},
    ][number % 3]
    return SamplingParams(**settings, seed=number, max_tokens=LENGTHS[number], ignore_eos=True)
