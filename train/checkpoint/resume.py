"""Chooses the checkpoint that a run continues from, and refuses one that does not fit.

A run continues only from its own directory and with the same configuration. Every file of the checkpoint must
be as it was published, and no other file may lie next to them. Only then the training state is read: torch
files with weights_only, DeepSpeed's files by DeepSpeed, which unpickles."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from idlm.checkpoint import MANIFEST, read_json, verify
from idlm.config.compose import yaml_text
from idlm.errors import UserError
from idlm.files.disk import replace_text
from idlm.publish import clear_stale
from idlm.train.checkpoint.same_run import (
    CONFIG_FILE,
    RunShape,
    require_same_config,
    require_same_shape,
    store_inputs,
)
from idlm.train.config.schema import AdapterConfig, TrainConfig

log = logging.getLogger(__name__)
RUN_FOLDER = "run"
STAGE_FOLDER = "stages"
FINISHED_FILE = "finished.json"
REPORT_FILE = "report.md"


def choose_checkpoint(config: TrainConfig, shape: RunShape) -> Path | None:
    """Return the checkpoint to continue from, or None to start a new run. A new run renames the files of an
    older one.

    UserError IDLM-0506: a checkpoint of another run. IDLM-0507, 0512: another configuration, number of rows
    per step. IDLM-0302: damaged files."""
    run = Path(config.output_dir) / RUN_FOLDER
    if run.is_dir():
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
        require_same_config(config_text(config), run, defaults=_defaults())
        require_same_shape(shape, found)
    else:
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
    try:
        (run / FINISHED_FILE).unlink(missing_ok=True)
        replace_text(run / CONFIG_FILE, config_text(config))
        store_inputs(run, asdict(config))
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
    """Return the message if the run in `output_dir` is finished, else None.

    A run is not finished if its published checkpoint or report is missing or damaged, if the settings
    `export` or `report` have changed, or if `resume` is not auto."""
    stored = _finished_file(config)
    if config.resume != "auto" or not stored.is_file():
        return None
    require_same_config(config_text(config), stored.parent, defaults=_defaults())
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
    """Return the whole configuration as YAML, which `idlm-train config=FILE` reads."""
    return yaml_text(asdict(config))


def _defaults() -> dict[str, Any]:
    return asdict(TrainConfig(adapter=AdapterConfig()))


def config_hash(config: TrainConfig) -> str:
    """Return a hash of the configuration, which all ranks must share."""
    return hashlib.sha256(config_text(config).encode()).hexdigest()[:16]


def _newest_intact(run: Path) -> Path | None:
    steps = [path.name.removeprefix("checkpoint-") for path in run.glob("checkpoint-*")]
    for step in sorted((int(step) for step in steps if step.isdigit()), reverse=True):
        path = run / f"checkpoint-{step}"
        try:
            verify(path, sealed=True)
        except UserError as error:
            kept = _free_name(path.with_name(f"damaged-{path.name}"))
            log.warning("%s is damaged, passed over and kept as %s: %s", path, kept.name, error.message)
            # The run will publish a checkpoint of the same step at this path.
            os.rename(path, kept)
            continue
        return path
    return None


def _move_aside(run: Path) -> None:
    """Rename the old run and its published stages, so that they are not mistaken for those of the new run."""
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
