"""Checkpoints of a run: all ranks write them into a staging directory, rank 0 publishes them with a manifest.
Weights that are not finite are never saved.

Under DeepSpeed every rank writes its shard of the optimizer into the same staging directory; the manifest
covers all of them. DeepSpeed restores its state by unpickling: that happens only for a checkpoint of the
run's own directory, after `idlm.checkpoint.verify` found every file as it was published and no further file
next to them. Nothing else here unpickles.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from idlm.errors import UserError
from idlm.files.disk import translate_disk_errors
from idlm.publish import publish
from idlm.train.checkpoint.recut import RECUT_FOLDER, MendLoaded, remove_recut
from idlm.train.checkpoint.same_run import SHAPE_FILE, RunShape
from idlm.train.distributed.collectives import barrier, from_rank_zero, highest
from idlm.train.distributed.deepspeed import local_part
from idlm.train.loop.watchdog import Watchdog
from idlm.train.model.gated_lora import gate_of, save_trained

# Pickled arguments and scripts that nothing here reads: the run's config.yaml holds the same as text.
LEFT_OUT = ("training_args.bin", "zero_to_fp32.py", "zero_to_torch.py")


class SavingTrainer(Trainer):
    """A Trainer whose checkpoints appear whole or not at all. They store `zero_stage`."""

    zero_stage: int | None = None
    watchdog: Watchdog | None = None
    _staging: str | None = None

    def resume(self, checkpoint: Path) -> None:
        """Train on from `checkpoint`, which `idlm.train.checkpoint.recut` may have made for DeepSpeed."""
        if checkpoint.parent.name == RECUT_FOLDER:
            plugin = self.accelerator.state.deepspeed_plugin
            plugin.deepspeed_config["checkpoint"] = {"load_universal": True}
            self.add_callback(MendLoaded())
        self.train(resume_from_checkpoint=str(checkpoint))

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
        if gate_of(self.model) is None:
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            assert output_dir is not None
            os.makedirs(output_dir, exist_ok=True)
            save_trained(self.model, Path(output_dir))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_deepspeed_enabled or gate_of(self.model) is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        whole = self.model_wrapped.save_checkpoint
        # transformers does this for PeftModel only.
        self.model_wrapped.save_checkpoint = functools.partial(whole, exclude_frozen_parameters=True)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            del self.model_wrapped.save_checkpoint

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging if self._staging is not None else super()._get_output_dir(trial)

    def at(self, phase: str) -> None:
        """Tell the watchdog, if there is one, what this rank does now."""
        if self.watchdog is not None:
            self.watchdog.move(phase, self.state.global_step)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.at("save")
        self.refuse_bad_weights()
        target = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        with contextlib.ExitStack() as stack:
            staging = from_rank_zero(lambda: str(stack.enter_context(publish(target))))
            with translate_disk_errors(target, written=Path(staging)):
                self._write_into(staging, target=target, model=model, trial=trial)
            from_rank_zero(lambda: stack.pop_all().close())
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=self.args.output_dir,
                save_total_limit=self.args.save_total_limit,
                use_mtime=False,
            )
            remove_recut(Path(self.args.output_dir))
        self.at("data")

    def _write_into(self, staging: str, *, target: Path, model: nn.Module, trial: Any) -> None:
        self._staging = staging
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = None
        barrier()
        if not self.args.should_save:
            return
        written = Path(staging) / target.name
        for entry in sorted(written.iterdir()):
            os.rename(entry, Path(staging) / entry.name)
        shutil.rmtree(written)
        for name in LEFT_OUT:
            (Path(staging) / name).unlink(missing_ok=True)
        shape = RunShape(
            world_size=self.args.world_size,
            batch_size=self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            zero_stage=self.zero_stage,
        )
        (Path(staging) / SHAPE_FILE).write_text(json.dumps(asdict(shape)) + "\n")


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.numel() or bool(tensor.isfinite().all())
