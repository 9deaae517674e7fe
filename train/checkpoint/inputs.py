"""What the paths of a run's configuration hold, so that it may go on where data, base or folder were moved.

Data is compared by sizes and sampled blocks, as its cache is; its tokens are compared once they are made. Of
a base the files count that training reads. A name of the hub has no content here and is compared as text."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from idlm.checkpoint import read_json
from idlm.errors import UserError
from idlm.files.disk import replace_text
from idlm.files.records import SUFFIXES, content_digest, files_below, find_files

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
