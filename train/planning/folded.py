"""The configuration as the dry run shows it: what differs from the recipe, or from the defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from idlm.config.compose import FROZEN, RECIPE, compose
from idlm.train.checkpoint.resume import config_text
from idlm.train.config.schema import TrainConfig

FILES = (f"{RECIPE}=", f"+{RECIPE}=", f"{FROZEN}=")


def config_lines(config: TrainConfig, arguments: Sequence[str]) -> list[str]:
    """Lines about `config`, which the command line `arguments` gave; whole YAML with plan.full_config."""
    if config.plan.full_config:
        return config_text(config).rstrip().splitlines()
    files = [argument for argument in arguments if argument.startswith(FILES)]
    before = asdict(compose("train", TrainConfig, files))
    changed = [
        f"{key}={_typed(value)}" for key, value in _changes(before, asdict(config)) if key != "dry_run"
    ]
    base = " ".join(files).removeprefix("+") or "the defaults"
    return [f"what differs from {base}; plan.full_config=true shows all of it", *(changed or ["nothing"])]


def _changes(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in now.items():
        old = before.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            yield from _changes(old, value, f"{prefix}{name}.")
        elif value != old:
            yield f"{prefix}{name}", value


def _typed(value: Any) -> str:
    """A value as a user would give it."""
    return value if isinstance(value, str) else json.dumps(_given(value))


def _given(value: Any) -> Any:
    """`value` without what is null in items of a list."""
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if one is not None}
    return [_given(one) for one in value] if isinstance(value, list) else value
