"""Which checkpoint a run continues from, and whether it may: only its own, verified, and with the same
configuration.

Training state is a torch file; it is read with weights_only, and only from the run's own directory after its
manifest was checked.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from idlm.checkpoint import verify
from idlm.errors import UserError
from idlm.train.config import TrainConfig

log = logging.getLogger(__name__)
RUN_FOLDER = "run"
CONFIG_FILE = "config.json"
FREE_KEYS = ("resume", "dry_run", "output_dir", "report", "export")
FREE_LOOP_KEYS = ("log_every", "save_every", "save_total_limit", "threads", "workers", "device")


def choose_checkpoint(config: TrainConfig) -> Path | None:
    """The checkpoint to continue from, or None to start. `resume=never` moves an old run aside instead of
    losing it.
    """
    run = Path(config.output_dir) / RUN_FOLDER
    if config.resume == "never":
        _move_aside(run)
        return None
    if config.resume == "auto":
        found = _newest_intact(run)
    else:
        found = Path(config.resume)
        if found.resolve().parent != run.resolve() or not found.is_dir():
            raise UserError(
                "IDLM-0506",
                f"resume={config.resume} is not a checkpoint of this run; they lie in {run}",
                fix="use resume=auto, or start from those weights with model.path",
            )
        verify(found)
    if found is not None:
        _require_same_config(config, run)
    elif run.exists():
        _move_aside(run)
    return found


def store_config(config: TrainConfig) -> None:
    """Remember what the run was started with, for the comparison when it is resumed."""
    run = Path(config.output_dir) / RUN_FOLDER
    run.mkdir(parents=True, exist_ok=True)
    aside = run / f".{CONFIG_FILE}.tmp"
    aside.write_text(json.dumps(asdict(config), indent=2) + "\n")
    os.replace(aside, run / CONFIG_FILE)


def _newest_intact(run: Path) -> Path | None:
    checkpoints = [
        path for path in run.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()
    ]
    for path in sorted(
        checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True
    ):
        try:
            verify(path)
        except UserError as error:
            log.warning("%s is damaged and is passed over: %s", path, error.message)
            continue
        return path
    return None


def _require_same_config(config: TrainConfig, run: Path) -> None:
    path = run / CONFIG_FILE
    if not path.is_file():
        return
    before, now = (
        _comparable(json.loads(path.read_text())),
        _comparable(json.loads(json.dumps(asdict(config)))),
    )
    differing = [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if differing:
        raise UserError(
            "IDLM-0507",
            f"{run} holds a run with another configuration: {'; '.join(differing)}",
            fix="give the same values to continue it, another output_dir, or resume=never to set it aside",
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
    if not run.exists():
        return
    number = 1
    while (aside := run.with_name(f"{run.name}.old-{number}")).exists():
        number += 1
    os.rename(run, aside)
    log.info("the earlier run was kept as %s", aside)
