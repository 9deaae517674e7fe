"""Which checkpoint a run continues from, and whether it may: only its own, verified, and with the same
configuration.

Training state is read only from the run's own directory, and only after every file was found as it was
published, with no further file next to them: torch files with weights_only, DeepSpeed's own by DeepSpeed,
which unpickles.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from idlm.checkpoint import MANIFEST, read_json, verify
from idlm.errors import UserError
from idlm.files.disk import replace_text
from idlm.publish import clear_stale
from idlm.train.config.schema import TrainConfig

log = logging.getLogger(__name__)
RUN_FOLDER = "run"
STAGE_FOLDER = "stages"
CONFIG_FILE = "config.yaml"
SHAPE_FILE = "shape.json"
FINISHED_FILE = "finished.json"
REPORT_FILE = "report.md"
FREE_KEYS = ("resume", "dry_run", "output_dir", "report", "export", "wandb", "plan")
# Batch and accumulation are compared as what they make together: rows of an optimizer step (`RunShape`).
FREE_LOOP_KEYS = (
    *("log_every", "save_every", "save_total_limit", "threads", "workers", "device", "hang_seconds"),
    "cache_dir",
    *("batch_size", "accumulation", "global_batch"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """How a run spreads one optimizer step over processes; `zero_stage` None is a run without DeepSpeed."""

    world_size: int
    batch_size: int
    accumulation: int
    zero_stage: int | None

    @property
    def global_batch(self) -> int:
        """Packed rows of one optimizer step."""
        return self.world_size * self.batch_size * self.accumulation

    def as_dict(self) -> dict[str, Any]:
        """For `shape.json`."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.world_size} processes x {self.batch_size} rows x {self.accumulation} micro-batches = "
            f"{self.global_batch} rows per step"
        )


def choose_checkpoint(config: TrainConfig, shape: RunShape) -> Path | None:
    """The checkpoint to continue from, None to start anew. `resume=never` renames an old run and keeps it.

    UserError IDLM-0506, 0507, 0512, 0513 and 0302: another run's, configuration, rows per step or number of
    ZeRO ranks; damaged files.
    """
    run = Path(config.output_dir) / RUN_FOLDER
    clear_stale(run)
    if config.resume == "never":
        _move_aside(run)
        return None
    if config.resume == "auto":
        found = _newest_intact(run)
    else:
        found = named_checkpoint(config)
        verify(found, sealed=True)
    if found is not None:
        _require_same_config(config, run)
        _require_same_shape(shape, found)
    elif run.exists():
        _move_aside(run)
    return found


def named_checkpoint(config: TrainConfig) -> Path:
    """The checkpoint that `resume` names. UserError IDLM-0506 where it is not one of this run."""
    run, found = Path(config.output_dir) / RUN_FOLDER, Path(config.resume)
    if found.resolve().parent != run.resolve() or not found.is_dir():
        raise UserError(
            "IDLM-0506",
            f"resume={config.resume} is not a checkpoint of this run; they lie in {run}",
            fix="use resume=auto, or start from those weights with model.path",
        )
    return found


def store_config(config: TrainConfig) -> None:
    """Store the configuration: to compare when the run is resumed, and to start it again with `idlm-train
    config=<output_dir>/run/config.yaml`.
    """
    run = Path(config.output_dir) / RUN_FOLDER
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / FINISHED_FILE).unlink(missing_ok=True)
        aside = run / f".{CONFIG_FILE}.tmp"
        aside.write_text(config_text(config), encoding="utf-8")
        os.replace(aside, run / CONFIG_FILE)
    except OSError as error:
        raise UserError(
            "IDLM-0515",
            f"cannot write into {run}: {error.strerror}",
            fix="give an output_dir that is writable",
        ) from error


def store_finished(config: TrainConfig, *, num_steps: int) -> None:
    """Store that the run has published its checkpoint and written its report."""
    replace_text(_finished_file(config), json.dumps({"num_steps": num_steps, **_published(config)}))


def finished_text(config: TrainConfig) -> str | None:
    """The message for a run in `output_dir` that is finished, None for any other.

    A run is not finished where the published checkpoint or the report is missing or damaged, where `export`
    or `report` settings differ now, and where `resume` is not auto.
    """
    stored = _finished_file(config)
    if config.resume != "auto" or not stored.is_file():
        return None
    _require_same_config(config, stored.parent)
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
    """The published manifest, and the settings of publishing, which may differ in a later start."""
    manifest = (Path(config.output_dir) / MANIFEST).read_bytes()
    return {
        "manifest": hashlib.sha256(manifest).hexdigest(),
        "export": asdict(config.export),
        "report": asdict(config.report),
    }


def config_text(config: TrainConfig) -> str:
    """The whole configuration as YAML, which `idlm-train config=FILE` reads back."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def config_hash(config: TrainConfig) -> str:
    """A hash to compare the configurations of all ranks."""
    return hashlib.sha256(config_text(config).encode()).hexdigest()[:16]


def _newest_intact(run: Path) -> Path | None:
    checkpoints = [
        path for path in run.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()
    ]
    for path in sorted(
        checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True
    ):
        try:
            verify(path, sealed=True)
        except UserError as error:
            kept = _free_name(path.with_name(f"damaged-{path.name}"))
            log.warning("%s is damaged, passed over and kept as %s: %s", path, kept.name, error.message)
            # In its place it would block the next checkpoint of the same step.
            os.rename(path, kept)
            continue
        return path
    return None


def _require_same_config(config: TrainConfig, run: Path) -> None:
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
    before, now = _comparable(stored), _comparable(yaml.safe_load(config_text(config)))
    differing = [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys(), key=str)
        if before.get(key) != now.get(key)
    ]
    if differing:
        raise UserError(
            "IDLM-0507",
            f"{run} holds a run with another configuration: {'; '.join(differing)}",
            fix="give the same values to continue it, another output_dir, or resume=never to set it aside",
        )


def _require_same_shape(now: RunShape, checkpoint: Path) -> None:
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
    if before.world_size != now.world_size and before.zero_stage:
        raise UserError(
            "IDLM-0513",
            f"{checkpoint} holds the ZeRO-{before.zero_stage} state of {before.world_size} processes, one "
            f"part each; this run has {now.world_size}",
            fix=f"continue on {before.world_size} processes, or start a new run from the weights of the "
            "last finished stage (model.path). DeepSpeed's `ds_to_universal` re-cuts such states for other "
            "numbers of processes, but its output has no manifest, and idlm unpickles nothing without one",
        )


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key in FREE_KEYS:
            continue
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items() if name not in FREE_LOOP_KEYS}
        else:
            flat[key] = value
    return flat


def _move_aside(run: Path) -> None:
    """Rename the run and its published stages, which would be taken for those of the new run."""
    if not run.exists():
        return
    for folder in (run, run.with_name(STAGE_FOLDER)):
        if folder.exists():
            aside = _free_name(folder.with_name(f"{folder.name}.old"))
            os.rename(folder, aside)
            log.info("the earlier run was kept: %s", aside)


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return free
