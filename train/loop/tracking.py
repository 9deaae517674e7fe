"""Mirrors metrics to Weights & Biases. A service that fails never ends the run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from idlm.errors import UserError
from idlm.train.config.monitoring import WandbConfig

log = logging.getLogger(__name__)
NOT_CURVES = ("first_item", "last_item", "step")


def open_tracker(config: WandbConfig, folder: Path, values: dict[str, Any]) -> WandbTracker:
    """The tracker of a run, on rank 0; `values` is the whole configuration.

    Raises UserError IDLM-0551 where wandb is missing or refuses to start, before anything is trained.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import wandb

        run = wandb.init(
            project=config.project,
            name=config.name,
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
    return WandbTracker(run)


class WandbTracker:
    """One run of Weights & Biases; sends nothing more after the first failure."""

    def __init__(self, run: Any) -> None:
        self._run: Any = run

    def log(self, record: dict[str, Any]) -> None:
        """Mirror a record: numbers by name, acceptance by position, evaluations under `held_out/`."""
        self._send(lambda run: run.log(curves(record), step=record["step"]))

    def close(self, *, failed: bool) -> None:
        """Finish the run; safe to call again."""
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


def curves(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a metrics record under flat names."""
    prefix = "held_out/" if "held_out" in record else ""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if name in NOT_CURVES or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            flat[prefix + name] = value
        elif isinstance(value, list):
            flat |= {f"{prefix}{name}/{place}": one for place, one in enumerate(value, start=1)}
    return flat
