"""Checkpoints of a run: all ranks write them into a staging directory, rank 0 publishes them with a manifest.
Weights that are not finite are never saved. `writer.py` decides whether training waits for the files.

Under DeepSpeed every rank writes its shard of the optimizer into the same staging directory; the manifest
covers all of them. DeepSpeed restores its state by unpickling: that happens only for a checkpoint of the
run's own directory, after `idlm.checkpoint.verify` found every file as it was published and no further file
next to them. Nothing else here unpickles."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import SAFE_WEIGHTS_NAME

from idlm.errors import UserError
from idlm.files.disk import translate_disk_errors
from idlm.publish import publish
from idlm.train.checkpoint.reshard import RESHARDED_FOLDER, SeparateStepCounts, remove_resharded
from idlm.train.checkpoint.same_run import SHAPE_FILE, RunShape
from idlm.train.checkpoint.writer import CheckpointWriter
from idlm.train.distributed.collectives import from_rank_zero, highest
from idlm.train.distributed.deepspeed import local_part
from idlm.train.loop.watchdog import Watchdog
from idlm.train.model.gated_lora import gate_of, save_trained, trained_tensors

# Scripts of DeepSpeed that nothing here reads.
LEFT_OUT = ("zero_to_fp32.py", "zero_to_torch.py")


class SavingTrainer(Trainer):
    """A Trainer whose checkpoints appear whole or not at all. They store `shape`."""

    shape: RunShape
    writer: CheckpointWriter
    watchdog: Watchdog | None = None
    saved_step = 0
    """That of the newest checkpoint of this process."""
    _staging: str | None = None

    def resume(self, checkpoint: Path) -> None:
        """Train on from `checkpoint`, which `idlm.train.checkpoint.reshard` may have made for DeepSpeed."""
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
        bad = [name for name, value in self.model.named_parameters() if not _is_finite(local_part(value))]
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
        """Tell the watchdog, if there is one, what this rank does now."""
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
        """Let the writer allocate the memory of an asynchronous save while training goes on. Collective."""
        self.at("save")
        # DeepSpeed makes small files of its own beside what it puts.
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


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    # One pass without temporaries: isfinite().all() takes ten times as long on a CPU.
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())
