"""Reshards a checkpoint of ZeRO-1, 2 or 3 for another number of processes.

ZeRO stores one part of the optimizer's state per process. DeepSpeed's `ds_to_universal` writes it parameter
by parameter instead, which any number of processes can load. It unpickles: the files of the checkpoint have
been verified right before, and what it writes is published with a manifest, like a checkpoint, and verified
before it is loaded. The state of random generators, one per process, is left out: it decides dropout alone.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback

from idlm.checkpoint import MANIFEST, verify
from idlm.errors import UserError
from idlm.files.disk import translate_disk_errors
from idlm.log import note_progress, rank
from idlm.publish import publish
from idlm.train.distributed.collectives import while_others_wait

log = logging.getLogger(__name__)
RESHARDED_FOLDER = "resharded"
SECONDS_BETWEEN_LOOKS = 5.0


def reshard(checkpoint: Path) -> Path:
    """Return a checkpoint that holds the state of `checkpoint`, which is intact, for any number of processes;
    rank 0 makes it where it is missing or damaged. Collective.

    UserError IDLM-0513 where DeepSpeed cannot convert it; those of `idlm.publish.publish`."""
    target = checkpoint.parent / RESHARDED_FOLDER / checkpoint.name
    while_others_wait((lambda: _make(checkpoint, target)) if rank() == 0 else None)
    return target


class SeparateStepCounts(TrainerCallback):
    """Corrects what DeepSpeed 0.19 leaves wrong under ZeRO-3 when it has loaded a resharded checkpoint.

    All groups of weights share one tensor as AdamW's count of steps, which then grows once for every group.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        # accelerate wraps DeepSpeed's optimizer, which wraps torch's.
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        for values in optimizer.state.values():
            values["step"] = copy.deepcopy(values["step"])


def remove_resharded(run: Path) -> None:
    """Remove what a run has left behind once it has a checkpoint of its own."""
    shutil.rmtree(run / RESHARDED_FOLDER, ignore_errors=True)


def _make(checkpoint: Path, target: Path) -> None:
    if target.is_dir():
        try:
            verify(target, sealed=True)
            return
        except UserError as error:
            log.warning("%s is damaged and is made again: %s", target, error.message)
            shutil.rmtree(target)
    log.info("resharding %s for another number of processes", checkpoint)
    with publish(target) as staging, translate_disk_errors(target, written=staging), _noting_growth(staging):
        _convert(checkpoint, staging)


def _convert(checkpoint: Path, staging: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    (parts,) = (
        path for path in checkpoint.iterdir() if path.is_dir() and path.name.startswith("global_step")
    )
    for file in checkpoint.iterdir():
        if file.is_file() and file.name not in (MANIFEST, "latest") and not file.name.startswith("rng_state"):
            shutil.copy2(file, staging / file.name)
    arguments = SimpleNamespace(
        input_folder=str(parts),
        output_folder=str(staging / f"{parts.name}_universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
            ds_to_universal.main(arguments)
    # DeepSpeed reports what it cannot convert by a dozen types of exceptions.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            # A full disk, say.
            raise
        raise UserError(
            "IDLM-0513",
            f"DeepSpeed cannot reshard {checkpoint} for another number of processes: {type(error).__name__}: "
            f"{error}",
            fix="continue on as many processes as saved it, or start a new run from the weights of the last "
            "finished stage (model.path)",
        ) from error


@contextlib.contextmanager
def _noting_growth(folder: Path) -> Iterator[None]:
    """Inside, growth of `folder` counts as progress: for a large model the conversion takes minutes."""
    done = threading.Event()

    def look() -> None:
        before = -1
        while not done.wait(SECONDS_BETWEEN_LOOKS):
            sizes = []
            for path in folder.rglob("*"):
                with contextlib.suppress(OSError):
                    sizes.append(path.stat().st_size)
            if sum(sizes) != before:
                note_progress()
            before = sum(sizes)

    thread = threading.Thread(target=look, name="conversion", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(SECONDS_BETWEEN_LOOKS)
