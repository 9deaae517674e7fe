"""Refuses to continue a run with another configuration, other inputs or another number of rows per step.

A run may go on where its data, base or folder were moved. Data is compared by sizes and sampled blocks, as
its cache is; its tokens are compared once they are made. Of a base the files count that training reads. A
name of the hub has no content here and is compared as text."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from idlm.checkpoint import read_json
from idlm.errors import UserError
from idlm.files.disk import replace_text
from idlm.files.records import SUFFIXES, content_digest, files_below, find_files

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


INPUTS_FILE = "inputs.json"
OF_A_MODEL = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken")
"""Endings of the files in a model's folder that training reads."""

Config = dict[str, Any]


def store_inputs(run: Path, config: Config) -> None:
    """Store what every path of `config` holds in the folder of the run."""
    contents = {key: _content(path, source) for key, path, source in _paths(config)}
    replace_text(run / INPUTS_FILE, json.dumps(contents))


def with_paths_of(stored: Config, now: Config, run: Path) -> tuple[Config, list[str]]:
    """Return `stored` with the paths of `now` that hold the same, and keys of paths that do not."""
    held = read_json(run / INPUTS_FILE) if (run / INPUTS_FILE).is_file() else {}
    moved, changed = copy.deepcopy(stored), []
    for key, path, kind in _paths(now):
        node, name = _parent(moved, key)
        before = node.get(name)
        if before is None or before == path:
            continue
        known = held.get(key)
        # An earlier version stored a home as it was written.
        if os.path.expanduser(str(before)) == path or (known is not None and known == _content(path, kind)):
            node[name] = path
        elif known is not None:
            changed.append(key)
    return moved, changed


def _parent(config: Config, key: str) -> tuple[Config, str]:
    """Return the section of a dotted key, {} where there is none, and the key's name there."""
    *sections, name = key.split(".")
    node: Any = config
    for section in sections:
        try:
            node = node[int(section) if isinstance(node, list) else section]
        except (KeyError, IndexError, TypeError):
            return {}, name
    return node if isinstance(node, dict) else {}, name


def _paths(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield the dotted key, the path and the kind of content of every path that a run reads."""
    data, model = config["data"], config["model"]
    found = [
        ("model.path", model["path"], "model"),
        ("model.tokenizer", model["tokenizer"], "model"),
        ("train.deepspeed", config["train"]["deepspeed"], "file"),
        ("data.path", data["path"], data["source"]),
        ("eval.path", config["eval"]["path"], data["source"]),
    ]
    for index, one in enumerate(data["sources"]):
        found.append((f"data.sources.{index}.path", one["path"], one["source"] or data["source"]))
    return ((key, path, kind) for key, path, kind in found if path is not None)


def _content(path: str, kind: str) -> str | None:
    """Return a digest of what `path` holds; None where nothing is there."""
    node = Path(path)
    try:
        if kind in SUFFIXES:
            files = list(find_files(path, SUFFIXES[kind]))
        elif kind == "model":
            files = sorted(file for file in node.iterdir() if file.suffix in OF_A_MODEL)
        else:
            files = files_below(node) if node.is_dir() else [node]
        return content_digest(files)
    except (UserError, OSError):
        return None
