"""The losses of one optimizer step: what is summed, how its terms are weighted, and the stop on a loss that
is not finite. The host never waits for the device here, except for a flag set before the backward pass.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from idlm.errors import UserError
from idlm.log import rank
from idlm.train.distributed.collectives import all_reduce, is_distributed
from idlm.train.objectives.base import Batch, Overlap
from idlm.train.objectives.curriculum import Stage

if TYPE_CHECKING:
    from idlm.train.loop.trainer import IdlmTrainer


@dataclass(slots=True)
class StepLosses:
    """What one optimizer step computed, over all its micro-batches: tensors, so that reading them is the
    caller's cost.

    `counts` [num_terms] are over all ranks; `sums` [num_terms], the overlap per draft position [num_masks],
    `num_tokens` (document tokens, a scalar) and `fed` [6] (`idlm.train.planning.flops`) are of this rank alone.
    `weights` [num_terms]; they wait for the losses of the step's one micro-batch where `is_weighted` is
    false.
    """

    stage: Stage
    counts: Tensor
    sums: Tensor
    weights: Tensor
    is_weighted: bool
    overlap_sums: Tensor
    overlap_counts: Tensor
    num_tokens: Tensor
    fed: Tensor

    def add_overlap(self, overlap: Overlap) -> None:
        """Add a micro-batch's."""
        self.overlap_sums += overlap.sums
        self.overlap_counts += overlap.counts

    def weigh(self, weights: Tensor) -> None:
        """Settle the weights of the terms."""
        self.weights, self.is_weighted = weights, True

    def means(self, sums: Tensor) -> Tensor:
        """Global means per token of this rank's `sums` [num_terms], on the device. Collective."""
        total = sums.clone()
        all_reduce(total)
        return total / self.counts.clamp_min(1)


class PreviousMeans(TrainerCallback, ExportableState):
    """The global mean losses of the last optimizer step, for `train.balance=previous`; saved in
    `trainer_state.json`, whose decimals give the same float32 again.
    """

    def __init__(self, trainer: IdlmTrainer) -> None:
        self.trainer = trainer
        self.means: Tensor | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        stored = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("means")
        self.means = None if stored is None else torch.tensor(stored, device=args.device)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = self.trainer.step_losses
        assert step is not None
        # A clean half of weight 0 is summed up only where it is shown.
        self.means = None if step.stage.clean_weight == 0 else step.means(step.sums)

    def state(self) -> dict[str, Any]:
        """What transformers writes with a checkpoint."""
        return {
            "args": {},
            "attributes": {"means": None if self.means is None else self.means.tolist()},
        }


class LossGuard:
    """Ends the run, on every rank, when a loss is not finite, before the optimizer changes a weight.

    `note` sends the verdict to the host beside the running step, `check` reads it once the backward pass is
    on its way. DeepSpeed steps at the end of its backward pass: there the optimizer's own hook checks first.
    Where DeepSpeed finds gradients that are not finite it skips the step, after which the schedule and the
    data part ways: `check_skipped` ends the run there.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._losses: list[Tensor] = []
        self._batches: list[Batch] = []
        self._num_micro_batches = 0
        self._num_bad: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._pinned: Tensor | None = None
        self._step = 0
        self._watched: Any = None

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Look before every step of `optimizer`; safe to call again."""
        if self._watched is not optimizer:
            self._watched = optimizer
            optimizer.register_step_pre_hook(lambda *_: self.check())

    def begin(self, step: int, *, num_micro_batches: int) -> None:
        """Forget the step before; `step` counts from 1."""
        self._step, self._num_micro_batches, self._num_bad = step, num_micro_batches, None
        self._losses, self._batches = [], []

    def note(self, loss: Tensor, batch: Batch) -> None:
        """Take in the loss of a micro-batch. Collective at the last one of the step."""
        self._losses.append(loss.detach())
        self._batches.append(batch)
        if len(self._losses) < self._num_micro_batches:
            return
        num_bad = (~torch.isfinite(torch.stack(self._losses))).sum()
        work = dist.all_reduce(num_bad, async_op=True) if is_distributed() else None
        if not num_bad.is_cuda:
            if work is not None:
                work.wait()
            self._num_bad = num_bad
            return
        if self._stream is None or self._pinned is None:
            self._stream, self._arrived = torch.cuda.Stream(), torch.cuda.Event()
            self._pinned = torch.zeros((), dtype=num_bad.dtype, pin_memory=True)
        # A copy on the step's own stream would arrive only when the backward pass behind it is done.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if work is not None:
                work.wait()
            self._pinned.copy_(num_bad, non_blocking=True)
            num_bad.record_stream(self._stream)
            assert self._arrived is not None
            self._arrived.record()
        self._num_bad = self._pinned

    def check(self) -> None:
        """Raise UserError IDLM-0503 when a loss of this step is not finite on any rank."""
        if self._num_bad is None:
            return
        if self._arrived is not None:
            self._arrived.synchronize()
        if self._num_bad.item() == 0:
            return
        micro_batches = self._micro_batches()
        bad = [part for part in micro_batches if part["loss"] in ("nan", "inf", "-inf")]
        what = f"loss became {bad[0]['loss'] if bad else 'not finite on another rank'}"
        self._refuse(what, bad, micro_batches)

    def check_skipped(self, optimizer: Any) -> None:
        """Raise UserError IDLM-0503 when DeepSpeed's `optimizer` left the step out, as all ranks do."""
        if getattr(optimizer, "overflow", False):
            micro_batches = self._micro_batches()
            self._refuse("gradients became not finite", micro_batches, micro_batches)

    def _micro_batches(self) -> list[dict[str, Any]]:
        return [
            {"loss": repr(float(loss)), "item_ids": batch["item_ids"].tolist()}
            for loss, batch in zip(self._losses, self._batches, strict=True)
        ]

    def _refuse(self, what: str, bad: list[dict[str, Any]], micro_batches: list[dict[str, Any]]) -> NoReturn:
        path = self.run_dir / f"bad-loss-step-{self._step}-rank-{rank()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"step": self._step, "rank": rank(), "micro_batches": micro_batches}) + "\n"
        )
        where = f"data items {[item for part in bad for item in part['item_ids']]}"
        raise UserError(
            "IDLM-0503",
            f"the {what} at step {self._step}{', ' + where if bad else ''}",
            fix="checkpoints saved before are intact: lower train.learning_rate or look at the items of this "
            f"step, which are in {path}",
        )
