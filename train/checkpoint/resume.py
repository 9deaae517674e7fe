"""The folder of a run: one run at a time has it. The checkpoint that a run continues from, which must fit.

A run continues only from its own directory, with the same configuration, inputs and rows per step. Every file
of the checkpoint must be as it was published, and no other file may lie next to them. Only then the training
state is read: torch files with weights_only, DeepSpeed's files by DeepSpeed, which unpickles.

Data, base and folder may have been moved. Data is compared by sizes and sampled blocks, as its cache is; its
tokens are compared once they are made. Of a base the files count that training reads. A name of the hub has
no content here and is compared as text."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from idlm.checkpoint import MANIFEST, read_json, verify
from idlm.config.compose import yaml_text
from idlm.errors import UserError, naming
from idlm.files.disk import cannot_save, release_lock, replace_text, take_lock
from idlm.files.paths import translate_path_errors
from idlm.files.records import SUFFIXES, content_digest, files_below, search
from idlm.publish import clear_stale
from idlm.train.config.schema import AdapterConfig, TrainConfig
from idlm.train.distributed.collectives import from_rank_zero

log = logging.getLogger(__name__)
RUN_FOLDER = "run"
STAGE_FOLDER = "stages"
FINISHED_FILE = "finished.json"
REPORT_FILE = "report.md"
CONFIG_FILE = "config.yaml"
SHAPE_FILE = "shape.json"
FREE_KEYS = ("resume", "dry_run", "output_dir", "report", "export", "wandb", "tensorboard", "plan")
# `RunShape` compares batch size and accumulation by their product, the rows of an optimizer step.
FREE_LOOP_KEYS = (
    *("log_every", "save_every", "save_total_limit", "save", "max_minutes", "threads", "workers", "device"),
    *("hang_seconds", "cache_dir", "date", "num_prompts", "stop_if"),
    *("batch_size", "accumulation", "global_batch"),
)
INPUTS_FILE = "inputs.json"
OF_A_MODEL = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken")
"""Endings of the files in a model's folder that training reads."""
Config = dict[str, Any]


@contextlib.contextmanager
def exclusive_output(output_dir: str) -> Iterator[None]:
    """Inside, no other run may use `output_dir`; UserError IDLM-0525 on all ranks while one does. Collective.

    The lock file lies next to output_dir, because publishing replaces output_dir itself."""
    target = Path(output_dir).resolve()
    path = target.with_name(f".{target.name}.lock")
    from_rank_zero(lambda: _lock(path, f"output_dir={output_dir}"))
    try:
        yield
    finally:
        release_lock(path)


def _lock(path: Path, output: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        owner = take_lock(path, of=output)
    except OSError as error:
        raise cannot_save(path, error.strerror or str(error)) from error
    if owner is not None:
        fix = "wait for its end or stop it, or give another output_dir"
        raise UserError("IDLM-0525", f"{owner} is running in {output}", fix=fix)


def choose_checkpoint(config: TrainConfig, shape: RunShape) -> Path | None:
    """Return the checkpoint to continue from, or None to start a new run. A new run renames the files of an
    older one.

    UserError IDLM-0506: a checkpoint of another run. IDLM-0507, 0512: another configuration, number of rows
    per step. IDLM-0302: damaged files."""
    run, found = Path(config.output_dir) / RUN_FOLDER, None
    if run.is_dir():
        clear_stale(run)
    if config.resume not in ("auto", "never"):
        found = named_checkpoint(config)
        verify(found, sealed=True)
    elif config.resume == "auto" and run.is_dir():
        found = _newest_intact(run)
    if found is not None:
        require_same_config(config, run)
        require_same_shape(shape, found)
    elif run.exists():
        _move_aside(run)
    return found


def named_checkpoint(config: TrainConfig) -> Path:
    """Return the checkpoint that `resume` names. UserError IDLM-0506 if it does not belong to this run."""
    run, found = Path(config.output_dir) / RUN_FOLDER, Path(config.resume)
    if found.resolve().parent != run.resolve() or not found.is_dir():
        raise UserError(
            "IDLM-0506",
            f"resume={config.resume} is not a checkpoint of this run; they lie in {run}",
            fix="use resume=auto, or start from those weights with model.path",
        )
    return found


def store_config(config: TrainConfig) -> None:
    """Store the configuration, which a resumed run is compared with, for config=run/config.yaml too."""
    run = Path(config.output_dir) / RUN_FOLDER
    with translate_path_errors("IDLM-0515", run, fix="give an output_dir that is writable"):
        (run / FINISHED_FILE).unlink(missing_ok=True)
        replace_text(run / CONFIG_FILE, config_text(config))
        contents = {key: _content(path, kind) for key, path, kind in _paths(asdict(config))}
        replace_text(run / INPUTS_FILE, json.dumps(contents))


def store_finished(config: TrainConfig, *, num_steps: int) -> None:
    replace_text(_finished_file(config), json.dumps({"num_steps": num_steps, **_published(config)}))


def finished_text(config: TrainConfig) -> str | None:
    """Return the message if the run in `output_dir` is finished, else None.

    A run is not finished if its published checkpoint or report is missing or damaged, if the settings
    `export` or `report` have changed, or if `resume` is not auto."""
    stored = _finished_file(config)
    if config.resume != "auto" or not stored.is_file():
        return None
    require_same_config(config, stored.parent)
    target = Path(config.output_dir)
    report = target / REPORT_FILE if config.report.enabled else None
    try:
        known = read_json(stored)
        verify(target)
    except UserError as error:
        log.warning("the run is finished, but what it published is not intact: %s", error.message)
        return None
    num_steps = known.pop("num_steps", None)
    if known != _published(config) or not (report is None or report.is_file()):
        return None
    message = (
        f"this run finished {num_steps} steps, and its checkpoint in {target} is intact: nothing is left to "
        "do. resume=never trains it anew"
    )
    return message if report is None else f"{message}\nreport: {report}"


def _finished_file(config: TrainConfig) -> Path:
    return Path(config.output_dir) / RUN_FOLDER / FINISHED_FILE


def _published(config: TrainConfig) -> dict[str, Any]:
    """Return the hash of the published manifest and the settings of publishing, to compare them later."""
    manifest = (Path(config.output_dir) / MANIFEST).read_bytes()
    return {
        "manifest": hashlib.sha256(manifest).hexdigest(),
        "export": asdict(config.export),
        "report": asdict(config.report),
    }


def config_text(config: TrainConfig) -> str:
    return yaml_text(asdict(config))


def config_hash(config: TrainConfig) -> str:
    return hashlib.sha256(config_text(config).encode()).hexdigest()[:16]


def _newest_intact(run: Path) -> Path | None:
    steps = [path.name.removeprefix("checkpoint-") for path in run.glob("checkpoint-*")]
    for step in sorted((int(step) for step in steps if step.isdigit()), reverse=True):
        path = run / f"checkpoint-{step}"
        try:
            verify(path, sealed=True)
        except UserError as error:
            aside = _free_name(path.with_name(f"damaged-{path.name}"))
            log.warning("%s is damaged, passed over and renamed to %s: %s", path, aside.name, error.message)
            # The run will publish a checkpoint of the same step at this path.
            os.rename(path, aside)
            continue
        return path
    return None


def _move_aside(run: Path) -> None:
    """Rename the old run and its published stages, so that they are not mistaken for those of the new run."""
    for folder in (run, run.with_name(STAGE_FOLDER)):
        if folder.exists():
            aside = _free_name(folder.with_name(f"{folder.name}.old"))
            os.rename(folder, aside)
            log.info("the earlier run was moved to %s", aside)


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return free


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """How a run divides one optimizer step among its processes; `zero_stage` is None without DeepSpeed."""

    world_size: int
    batch_size: int
    accumulation: int
    zero_stage: int | None

    @property
    def global_batch(self) -> int:
        return self.world_size * self.batch_size * self.accumulation

    def __str__(self) -> str:
        return (
            f"{self.world_size} processes x {self.batch_size} rows x {self.accumulation} micro-batches = "
            f"{self.global_batch} rows per step"
        )


def require_same_config(config: TrainConfig, run: Path) -> None:
    """Raise UserError IDLM-0507 where `config` trains another model than the run in the folder `run` was
    started with. Paths may differ where they hold the same."""
    path = run / CONFIG_FILE
    if not path.is_file():
        return
    fix = "restore the file, or delete it to resume without comparing the configuration"
    causes = (yaml.YAMLError, ValueError, RecursionError, OSError)
    with naming("IDLM-0303", f"{path} cannot be read as YAML", fix=fix, of=causes):
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    stored = stored if isinstance(stored, dict) else {}
    # An earlier version did what is the default of an option that it did not have.
    defaults = asdict(TrainConfig(adapter=AdapterConfig()))
    for key, value in stored.items():
        if isinstance(value, dict) and isinstance(defaults.get(key), dict):
            stored[key] = defaults[key] | value
    given = yaml.safe_load(config_text(config))
    before, now = _values(stored), _values(given)
    changed = take_moved_paths(before, given, run)
    differing = [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _is_free(key)
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


def _values(config: Any, key: str = "") -> dict[str, Any]:
    """Return the values of a configuration by their dotted keys, such as `data.sources.0.path`."""
    items = (
        config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    )
    found: dict[str, Any] = {}
    for name, value in items:
        found |= _values(value, f"{key}.{name}" if key else str(name))
    return found or {key: config}


def _is_free(key: str) -> bool:
    """Return whether a run may continue with another value."""
    section, _, name = key.partition(".")
    return section in FREE_KEYS or name.partition(".")[0] in FREE_LOOP_KEYS


def take_moved_paths(stored: Config, now: Config, run: Path) -> list[str]:
    """Put into `stored`, values by their dotted keys, the paths of `now` that hold the same; return the keys
    of paths that do not."""
    held = read_json(run / INPUTS_FILE) if (run / INPUTS_FILE).is_file() else {}
    changed = []
    for key, path, kind in _paths(now):
        known, before = held.get(key), stored.get(key)
        if known is None or before is None or before == path:
            continue
        if known == _content(path, kind):
            stored[key] = path
        else:
            changed.append(key)
    return changed


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
            files = list(search(path, SUFFIXES[kind]).paths)
        elif kind == "model":
            files = sorted(file for file in node.iterdir() if file.suffix in OF_A_MODEL)
        else:
            files = files_below(node) if node.is_dir() else [node]
        return content_digest(files)
    except (UserError, OSError):
        return None
