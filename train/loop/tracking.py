"""Mirrors metrics to Weights & Biases. A service that fails never ends the run."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from idlm.errors import UserError
from idlm.files.disk import replace_text
from idlm.train.config.schema import WandbConfig
from idlm.train.loop.metrics import EVALUATION, read_metrics

log = logging.getLogger(__name__)
ID_FILE = "wandb-run-id.txt"
NOT_CURVES = ("first_item", "last_item", "step")


def open_tracker(config: WandbConfig, folder: Path, values: dict[str, Any]) -> WandbTracker:
    """The tracker of a run, on rank 0; a resumed run goes on in the same run of the service, whose id lies in
    `folder`, and sends nothing twice. UserError IDLM-0551 where wandb is missing or refuses to start."""
    stored = folder / ID_FILE
    run_id = stored.read_text().strip() if stored.is_file() else secrets.token_hex(8)
    replace_text(stored, run_id + "\n")
    sent = {_place(record) for record in read_metrics(folder / "metrics.jsonl")}
    try:
        import wandb

        run = wandb.init(
            project=config.project,
            name=config.name,
            id=run_id,
            resume="allow",
            mode=cast(Literal["offline", "online"], config.mode),
            dir=str(folder),
            config=values,
            settings=wandb.Settings(silent=True, console="off"),
        )
    except ImportError as error:
        raise UserError(
            "IDLM-0551",
            f"wandb.mode={config.mode}, but wandb cannot be imported: {error}",
            fix="pip install wandb, or wandb.mode=disabled",
        ) from error
    # The exceptions for a missing key, a refused one and no network have no common base class.
    except Exception as error:
        raise UserError(
            "IDLM-0551",
            f"wandb.mode={config.mode}: Weights & Biases does not start: {error}",
            fix="run `wandb login`, or use wandb.mode=offline and `wandb sync` later",
        ) from error
    return WandbTracker(run, sent)


class WandbTracker:
    """One run of Weights & Biases; sends nothing more after the first failure."""

    def __init__(self, run: Any, sent: set[tuple[int, bool]]) -> None:
        self._run: Any = run
        self._sent = sent

    def log(self, record: dict[str, Any]) -> None:
        """Mirror a record: numbers by name, acceptance by position, evaluations under `held_out/`. A
        resumed run repeats steps, whose records are the same."""
        if _place(record) not in self._sent:
            self._send(lambda run: run.log(curves(record), step=record["step"]))

    def close(self, *, failed: bool) -> None:
        self._send(lambda run: run.finish(exit_code=int(failed)))
        self._run = None

    def _send(self, call: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        # Training goes on, whatever the service or its client raises.
        except Exception as error:
            what = "Weights & Biases failed and gets no more metrics: %s (metrics.jsonl has them all)"
            log.warning(what, error)
            self._run = None


def _place(record: dict[str, Any]) -> tuple[int, bool]:
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
            flat |= {f"{prefix}{name}/{place}": one for place, one in enumerate(value, start=1)}
    return flat
