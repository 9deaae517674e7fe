"""Refuses to continue a run with another configuration or number of rows per step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from idlm.checkpoint import read_json
from idlm.errors import UserError
from idlm.train.checkpoint.inputs import with_paths_of

CONFIG_FILE = "config.yaml"
SHAPE_FILE = "shape.json"
FREE_KEYS = ("resume", "dry_run", "output_dir", "report", "export", "wandb", "plan")
# `RunShape` compares batch size and accumulation by their product, the rows of an optimizer step.
FREE_LOOP_KEYS = (
    *("log_every", "save_every", "save_total_limit", "save", "max_minutes", "threads", "workers", "device"),
    *("hang_seconds", "cache_dir", "date", "num_prompts", "stop_if"),
    *("batch_size", "accumulation", "global_batch"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """How a run divides one optimizer step among its processes; `zero_stage` is None without DeepSpeed."""

    world_size: int
    batch_size: int
    accumulation: int
    zero_stage: int | None

    @property
    def global_batch(self) -> int:
        """Packed rows of one optimizer step."""
        return self.world_size * self.batch_size * self.accumulation

    def __str__(self) -> str:
        return (
            f"{self.world_size} processes x {self.batch_size} rows x {self.accumulation} micro-batches = "
            f"{self.global_batch} rows per step"
        )


def require_same_config(now_text: str, run: Path, *, defaults: dict[str, Any]) -> None:
    """Raise UserError IDLM-0507 where the configuration `now_text` (YAML) trains another model than the run
    in the folder `run` was started with; `defaults` are those of options. Paths may differ where they hold
    the same."""
    path = run / CONFIG_FILE
    if not path.is_file():
        return
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise UserError(
            "IDLM-0303",
            f"{path} cannot be read as YAML: {type(error).__name__}: {error}",
            fix="restore the file, or delete it to resume without comparing the configuration",
        ) from error
    stored = stored if isinstance(stored, dict) else {}
    # An earlier version did what is the default of an option that it did not know.
    completed = {
        key: defaults[key] | value
        if isinstance(value, dict) and isinstance(defaults.get(key), dict)
        else value
        for key, value in stored.items()
    }
    given = yaml.safe_load(now_text)
    moved, changed = with_paths_of(completed, given, run)
    before, now = _comparable(moved), _comparable(given)
    differing = [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys(), key=str)
        if before.get(key) != now.get(key)
    ]
    if differing:
        content = f"; what {' and '.join(changed)} holds differs" if changed else ""
        raise UserError(
            "IDLM-0507",
            f"{run} holds a run with another configuration: {'; '.join(differing)}{content}",
            fix="give the same values and content to continue it, another output_dir, or resume=never to set "
            "it aside",
        )


def require_same_shape(now: RunShape, checkpoint: Path) -> None:
    """Raise UserError IDLM-0512 for another number of rows per step."""
    before = RunShape(**read_json(checkpoint / SHAPE_FILE))
    if now.global_batch != before.global_batch:
        per_pass = now.world_size * now.batch_size
        accumulation, rest = divmod(before.global_batch, per_pass)
        fix = f"set train.accumulation={accumulation} to keep {before.global_batch} rows per step"
        if rest:
            fix = (
                f"choose processes x train.batch_size that divide {before.global_batch}: {per_pass} does "
                f"not; the run was started with {before.world_size} x {before.batch_size}"
            )
        raise UserError(
            "IDLM-0512",
            f"{checkpoint} was trained with {before}, now it would be {now}: data order, curriculum and "
            f"learning rate would shift",
            fix=fix,
        )


def needs_resharding(now: RunShape, checkpoint: Path) -> bool:
    """Return whether `checkpoint` holds ZeRO parts of another number of processes."""
    before = RunShape(**read_json(checkpoint / SHAPE_FILE))
    return bool(before.zero_stage) and before.world_size != now.world_size


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key in config.keys() - set(FREE_KEYS):
        value = config[key]
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items() if name not in FREE_LOOP_KEYS}
        else:
            flat[key] = value
    return flat
