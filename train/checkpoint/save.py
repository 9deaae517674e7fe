"""Checkpoints of a run: all ranks write them into a staging directory, rank 0 publishes them with a manifest.
Weights that are not finite are never saved. `writer.py` decides whether training waits for the files.

Under DeepSpeed every rank writes its shard of the optimizer into the same staging directory; the manifest
covers all of them. DeepSpeed restores its state by unpickling: that happens only for a checkpoint of the
run's own directory, after `idlm.checkpoint.verify` found every file as it was published and no further file
next to them. `reshard` makes a checkpoint of ZeRO for another number of processes: DeepSpeed's
`ds_to_universal` writes its state parameter by parameter, which any number can load. It unpickles too; what
it writes is published and verified like a checkpoint. The state of random generators, one per process, is
left out: it decides dropout alone. Nothing else here unpickles."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import SAFE_WEIGHTS_NAME

from idlm.checkpoint import MANIFEST, verify
from idlm.devices import is_finite
from idlm.errors import UserError
from idlm.files.disk import translate_disk_errors
from idlm.log import note_progress, rank
from idlm.publish import publish
from idlm.train.checkpoint.resume import SHAPE_FILE, RunShape
from idlm.train.checkpoint.writer import CheckpointWriter
from idlm.train.distributed.collectives import from_rank_zero, highest, while_others_wait
from idlm.train.distributed.deepspeed import local_part
from idlm.train.loop.watchdog import Watchdog
from idlm.train.model.gated_lora import gate_of, save_trained, trained_tensors

log = logging.getLogger(__name__)
RESHARDED_FOLDER = "resharded"
SECONDS_BETWEEN_LOOKS = 5.0
LEFT_OUT = ("zero_to_fp32.py", "zero_to_torch.py")
"""Scripts of DeepSpeed that nothing here reads."""


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
    """Remove what a run has left once it has a checkpoint of its own."""
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
            # For example a full disk.
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


class SavingTrainer(Trainer):
    """A Trainer whose checkpoints appear whole or not at all. They store `shape`."""

    shape: RunShape
    writer: CheckpointWriter
    watchdog: Watchdog | None = None
    saved_step = 0
    """That of the newest checkpoint of this process."""
    _staging: str | None = None

    def resume(self, checkpoint: Path) -> None:
        """Train on from `checkpoint`, which `idlm.train.checkpoint.save` may have made for DeepSpeed."""
        if checkpoint.parent.name == RESHARDED_FOLDER:
            plugin = self.accelerator.state.deepspeed_plugin
            plugin.deepspeed_config["checkpoint"] = {"load_universal": True}
            self.add_callback(SeparateStepCounts())
        self.train(resume_from_checkpoint=str(checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # A checkpoint holds tied weights once.
        every, once = (
            dict(self.model.named_parameters(remove_duplicate=removes)).keys() for removes in (False, True)
        )
        missing = [key for key in load_result.missing_keys if key not in every - once]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def refuse_bad_weights(self) -> None:
        """Raise UserError IDLM-0503 on every rank when a weight of any rank is not finite. Collective."""
        bad = [name for name, value in self.model.named_parameters() if not is_finite(local_part(value))]
        if highest(len(bad)):
            where = f"{len(bad)} of them, {bad[0]} first" if bad else "on another rank"
            raise UserError(
                "IDLM-0503",
                f"step {self.state.global_step} left weights that are not finite ({where})",
                fix="checkpoints saved before are intact: lower train.learning_rate and resume=auto",
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Under DeepSpeed write no weights: its own state holds them."""
        if not self.is_deepspeed_enabled:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save and output_dir is not None:
            os.makedirs(output_dir, exist_ok=True)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.args.should_save:
            return
        assert output_dir is not None
        os.makedirs(output_dir, exist_ok=True)
        model, path = self.model, Path(output_dir) / SAFE_WEIGHTS_NAME
        if gate_of(model) is not None:
            self.writer.put(path, trained_tensors(model), partial(save_trained, path=path))
            return
        save = model.save_pretrained
        self.writer.put(path, model.state_dict(), lambda state: save(output_dir, state_dict=state))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_deepspeed_enabled:
            engine = self.model_wrapped
            save = engine.checkpoint_engine.save

            def put(state_dict: Any, path: str) -> None:
                self.writer.put(Path(path), state_dict, lambda state: save(state, path))

            with _replaced(engine.checkpoint_engine, "save", put):
                # transformers leaves frozen weights out for PeftModel only.
                whole = engine.save_checkpoint
                chosen = partial(whole, exclude_frozen_parameters=True) if gate_of(self.model) else whole
                with _replaced(engine, "save_checkpoint", chosen):
                    super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            for name, part in ((OPTIMIZER_NAME, self.optimizer), (SCHEDULER_NAME, self.lr_scheduler)):
                path = Path(output_dir) / name
                self.writer.put(path, part.state_dict(), partial(torch.save, f=path))

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging if self._staging is not None else super()._get_output_dir(trial)

    def at(self, phase: str) -> None:
        if self.watchdog is not None:
            self.watchdog.move(phase, self.state.global_step)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.at("save")
        self.writer.begin()
        self.refuse_bad_weights()
        target = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        with contextlib.ExitStack() as stack:
            staging = from_rank_zero(lambda: str(stack.enter_context(publish(target))))
            self._staging = staging
            try:
                with translate_disk_errors(target, written=Path(staging)):
                    super()._save_checkpoint(model, trial)
            finally:
                self._staging = None
            complete = partial(self._complete, Path(staging), target)
            self.writer.publish(target, Path(staging), stack.pop_all(), complete, self._remove_old)
        self.saved_step = self.state.global_step
        self.at("data")

    def expect_saves(self) -> None:
        """Start to allocate the memory of an asynchronous save during training. Collective."""
        self.at("save")
        # DeepSpeed makes small files of its own besides what it puts.
        with tempfile.TemporaryDirectory() as folder, self.writer.expecting():
            self.save_model(folder, _internal_call=True)
            self._save_optimizer_and_scheduler(folder)
        self.at("data")

    def finish_save(self) -> None:
        """Wait until the running save is published, and raise its error. Collective."""
        self.at("save")
        self.writer.wait()

    def _complete(self, staging: Path, target: Path) -> None:
        """What all ranks have written becomes the files of the checkpoint. On rank 0."""
        written = staging / target.name
        for entry in sorted(written.iterdir()):
            os.rename(entry, staging / entry.name)
        shutil.rmtree(written)
        for name in LEFT_OUT:
            (staging / name).unlink(missing_ok=True)
        (staging / SHAPE_FILE).write_text(json.dumps(asdict(self.shape)) + "\n")

    def _remove_old(self) -> None:
        """What the checkpoint that has just been published replaces. On rank 0."""
        run = Path(self.args.output_dir)
        rotate_checkpoints(output_dir=str(run), save_total_limit=self.args.save_total_limit, use_mtime=False)
        remove_resharded(run)


@contextlib.contextmanager
def _replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, the instance `target` has `value` in place of its method `name`."""
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name)
