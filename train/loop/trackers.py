"""Mirrors the metrics of a run to Weights & Biases and to files of TensorBoard. A tracker that fails never
ends the run, for `metrics.jsonl` has all records."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

from idlm.errors import naming
from idlm.files.disk import replace_text
from idlm.train.config.schema import TrainConfig
from idlm.train.loop.progress import EVALUATION, read_metrics

log = logging.getLogger(__name__)
ID_FILE, TENSORBOARD_FOLDER = "wandb-run-id.txt", "tensorboard"
NOT_CURVES = ("first_item", "last_item", "step")


def open_trackers(config: TrainConfig, folder: Path) -> list[Tracker]:
    """The trackers of a run, on rank 0; a resumed run continues them, and sends nothing twice. UserError
    IDLM-0551 where a service refuses to start."""
    records, found = read_metrics(folder / "metrics.jsonl"), []
    if config.wandb.mode != "disabled":
        found.append(Tracker("Weights & Biases", _wandb(config, folder), set(map(_index, records))))
    if config.tensorboard.enabled:
        is_new = not (folder / TENSORBOARD_FOLDER).is_dir()
        board = Tracker("TensorBoard", _TensorBoard(folder), set() if is_new else set(map(_index, records)))
        for record in records:
            board.log(record)
        found.append(board)
    return found


def _wandb(config: TrainConfig, folder: Path) -> Any:
    """The run of the service, whose id lies in `folder`."""
    stored = folder / ID_FILE
    run_id = stored.read_text().strip() if stored.is_file() else secrets.token_hex(8)
    replace_text(stored, run_id + "\n")
    what = f"wandb.mode={config.wandb.mode}: Weights & Biases does not start"
    fix = "run `wandb login`, or use wandb.mode=offline and `wandb sync` later"
    with naming("IDLM-0551", what, fix=fix):
        import wandb

        return wandb.init(
            project=config.wandb.project,
            name=config.wandb.name,
            id=run_id,
            resume="allow",
            mode=cast(Literal["offline", "online"], config.wandb.mode),
            dir=str(folder),
            config=asdict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )


class _TensorBoard:
    """Files of TensorBoard in the run's folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / TENSORBOARD_FOLDER))

    def log(self, values: dict[str, float], *, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # A run that is killed has lost none of what it does not send again.
        self._writer.flush()

    def finish(self, *, exit_code: int) -> None:
        self._writer.close()


class Tracker:
    """One run of a service or library, called `name`; sends nothing more after the first failure."""

    def __init__(self, name: str, run: Any, sent: set[tuple[int, bool]]) -> None:
        self._name, self._run, self._sent = name, run, sent

    def log(self, record: dict[str, Any]) -> None:
        """Mirror a record: numbers by name, acceptance by position, evaluations under `held_out/`. A
        resumed run repeats steps, whose records are the same."""
        if _index(record) not in self._sent:
            self._sent.add(_index(record))
            self._send(lambda run: run.log(curves(record), step=record["step"]))

    def close(self, *, failed: bool) -> None:
        self._send(lambda run: run.finish(exit_code=int(failed)))
        self._run = None

    def _send(self, call: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        # Training continues, whatever the service or its client raises.
        except Exception as error:
            what = "%s failed and gets no more metrics: %s (metrics.jsonl has them all)"
            log.warning(what, self._name, error)
            self._run = None


def _index(record: dict[str, Any]) -> tuple[int, bool]:
    return record["step"], EVALUATION in record


def curves(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a metrics record under flat names."""
    prefix = "held_out/" if EVALUATION in record else ""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if name in NOT_CURVES or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            flat[prefix + name] = value
        elif isinstance(value, list):
            flat |= {f"{prefix}{name}/{index}": one for index, one in enumerate(value, start=1)}
    return flat
