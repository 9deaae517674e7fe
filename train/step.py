"""One optimizer step, from packed rows to the optimizer, in the order in which it runs.

    rows       `TrainingStep.start` takes the micro-batches of the step, packed rows `[x_t | x_0]`
               (train/data/layout.py), and counts the supervised tokens of each loss term over all ranks.
    model      `BodyAndHead` runs the model's own forward pass under our visibility mask (idlm/masks.py).
    terms      Inside that pass, in place of the output head, the objective (train/objectives/) sums the
               negative log-likelihood of each term: L_mask and L_clean for `idlm`.
    weights    s in L_mask + s * L_clean: a number, or L_mask / L_clean of global means.
    base       With `train.base_kl` KL(base || model) is one more term (train/base_kl.py).
    loss       sum over terms of weight * sum / count, times the ranks that gradients are averaged over: 1
               where ZeRO adds them. So they become those of the global mean, for any ranks and micro-batches.
    guard      `LossGuard` ends the run on every rank before a loss that is not finite changes a weight.
    optimizer  transformers' Trainer: backward pass, gradient clipping, AdamW, learning rate schedule.
               Its subclass in train/loop/trainer.py calls `start`, `loss` and the guard, and nothing else.

The host does not wait for the device, except for the guard's flag, which is set before the backward pass.
Paper arXiv 2604.11035, section 3.1, equations 1 and 2.

Shape letters: B packed rows of a micro-batch, T rows of one packed row, D width, V vocabulary."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from idlm.errors import UserError
from idlm.log import note_progress, rank
from idlm.masks import PADDING_DOC, RowMeta
from idlm.train.distributed.collectives import all_reduce, is_distributed
from idlm.train.model.attention import SEEN, STORED, mask_arguments
from idlm.train.model.checks import logit_divisor
from idlm.train.model.graphs import BodyGraphs, CaptureError, filled_up
from idlm.train.objectives.base import Batch, Head, Losses, TermRequest, Terms
from idlm.train.objectives.curriculum import Curriculum, Stage

Compute = Callable[[Head, Tensor], Terms]
ROW_COLUMNS = ("input_ids", "position_ids", "doc_ids", "block_starts", "is_noisy", "reach")


@dataclass(slots=True, kw_only=True)
class StepLosses:
    """What one optimizer step computes, summed over its micro-batches; tensors on the device.

    `counts` [num_terms], supervised tokens per term, are over all ranks. `sums` [num_terms], nats, the
    `overlap` [2, num_masks] of `Terms` and `fed` [6] (`train.data.dataset.count_fed`) are of this rank.
    `weights` [num_terms] are None until they are known. `is_logged`: the metrics show this step."""

    stage: Stage
    is_logged: bool
    counts: Tensor
    sums: Tensor
    overlap: Tensor
    fed: Tensor
    weights: Tensor | None = None

    def means(self, sums: Tensor) -> Tensor:
        """Global means per token [num_terms] of this rank's `sums` [num_terms], on the device. Collective."""
        total = sums.clone()
        all_reduce(total)
        return total / self.counts.clamp_min(1)


class TrainingStep:
    """Computes the losses of optimizer steps: `start` once per step, then `loss` once per micro-batch.

    `autocast`: context of a forward pass. `previous`: means of the step before, for train.balance=previous.
    `averaged_ranks`: the number that gradients are divided by after the sum over ranks; 1 where they are not.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        objective: Losses,
        curriculum: Curriculum,
        attention: str,
        log_every: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        previous: PreviousMeans | None = None,
    ) -> None:
        self.model, self.args = model, args
        self.objective, self.curriculum = objective, curriculum
        self.attention, self.log_every, self.autocast = attention, log_every, autocast
        self.runner = BodyAndHead(model)
        self.guard = LossGuard(Path(args.output_dir))
        self.previous = previous
        self.averaged_ranks = args.world_size
        self.losses: StepLosses | None = None

    def is_logged(self, step: int) -> bool:
        """Whether the metrics get a line after this 1-based step; a line covers steps of one stage only."""
        return step == 1 or step % self.log_every == 0 or self.curriculum.ends_stage(step)

    def release(self) -> None:
        """Give back the device memory that is not the model's."""
        if self.runner.graphs is not None:
            self.runner.graphs.release()
        self.objective.release()

    def start(self, step: int, batches: list[Batch], to_device: Callable[[Batch], Batch]) -> Tensor:
        """Begin the 0-based optimizer step with its micro-batches. Returns `counts`. Collective."""
        device = self.args.device
        self.guard.begin(step + 1, num_micro_batches=len(batches))
        stage, is_logged = self.curriculum.stage_of_step(step), self.is_logged(step + 1)
        per_batch = [self.objective.counts(batch, stage=stage, want_overlap=is_logged) for batch in batches]
        counts = torch.stack(per_batch).sum(dim=0).to(device, non_blocking=True)
        all_reduce(counts)
        self.losses = StepLosses(
            stage=stage,
            is_logged=is_logged,
            counts=counts,
            sums=torch.zeros(len(counts), device=device),
            overlap=torch.zeros(2, stage.stride - 1, device=device),
            fed=torch.stack([batch["fed"] for batch in batches]).sum(dim=0),
        )
        if self.objective.needs_means(stage):
            self._balance(self.losses, batches, to_device)
        else:
            weights = self.objective.weights(stage, None)
            self.losses.weights = weights.to(device, non_blocking=True)
        return counts

    def _balance(self, step: StepLosses, batches: list[Batch], to_device: Callable[[Batch], Batch]) -> None:
        """Set the weights of a balanced stage before the first forward pass, where that is possible.

        Balance (s = L_mask / L_clean) needs the losses of the whole step before its gradients. With one
        micro-batch `loss` takes them from its own forward pass, for one more product with the head. With
        accumulation a pass without gradients over all micro-batches computes them here, about a third more
        compute for the step. With balance=previous the losses of the step before are used, at no cost."""
        if self.previous is not None and self.previous.means is not None:
            step.weights = self.objective.weights(step.stage, self.previous.means)
        elif len(batches) > 1:
            sums = torch.zeros_like(step.sums)
            # Dropout draws the same numbers in the pass that trains.
            with torch.random.fork_rng(devices=[sums.device] if sums.is_cuda else []):
                self.model.train()
                for batch in map(to_device, batches):
                    sums += self.evaluate(step.stage, batch).sums
            step.weights = self.objective.weights(step.stage, step.means(sums))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """This rank's share of the step's loss, a scalar; `model` may be wrapped (DDP, DeepSpeed)."""
        step, objective = self.losses, self.objective
        assert step is not None, "start() begins a step"

        def in_place_of_head(head: Head, hidden_BTD: Tensor) -> Terms:
            if step.weights is None:
                sums = objective.terms(head, hidden_BTD.detach(), batch, TermRequest(stage=step.stage)).sums
                step.weights = objective.weights(step.stage, step.means(sums))
            coefficients = step.weights / step.counts.clamp_min(1) * self.averaged_ranks
            request = TermRequest(stage=step.stage, coefficients=coefficients, want_overlap=step.is_logged)
            return objective.terms(head, hidden_BTD, batch, request)

        terms = self.forward(model, batch, in_place_of_head, trains=True)
        assert terms.loss is not None
        step.sums += terms.sums
        if terms.overlap is not None:
            step.overlap += terms.overlap
        self.guard.note(terms.loss, batch)
        return terms.loss

    @torch.no_grad()
    def evaluate(self, stage: Stage, batch: Batch, *, want_overlap: bool = False) -> Terms:
        """The summed losses of a batch on the device, and its overlap, in a forward pass of its own."""
        note_progress()
        request = TermRequest(stage=stage, want_overlap=want_overlap)
        return self.forward(
            self.model, batch, lambda head, rows_BTD: self.objective.terms(head, rows_BTD, batch, request)
        )

    def forward(self, model: nn.Module, batch: Batch, compute: Compute, *, trains: bool = False) -> Terms:
        """`compute(head, hidden_BTD)` in one forward pass of `model`."""
        graphs = self.runner.graphs if trains else None
        # accelerate puts the wrapped model's forward pass under autocast, not that of the model inside.
        with self.autocast():
            if graphs is not None:
                with contextlib.suppress(CaptureError), graphs.running():
                    return self.runner.terms(model, batch, self.attention, compute)
            return self.runner.terms(model, batch, self.attention, compute)


class BodyAndHead:
    """Runs a model with a function in place of its output head, so that logits of [B, T, V] never exist.

    The model's own `forward` is called, never that of a submodule, and the function runs inside the forward
    pass of the head module. So wrappers (DDP, DeepSpeed, autocast) keep working, and a wrapper that gathers
    the head's weight for its forward and backward pass, as ZeRO-3 does, gathers it for the function too. The
    loss is what the head returns: it comes back as the model's `logits`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.model, self.divisor = model, logit_divisor(model)
        # Set by `train.model.gated_lora.add_adapter`.
        self.gate = getattr(model, "mask_gate", None)
        # Set by `train.prepare.prepare`, where the host may be slower than the device.
        self.graphs: BodyGraphs | None = getattr(model, "body_graphs", None)

    def terms(self, model: nn.Module, batch: Batch, attention: str, compute: Compute) -> Terms:
        """`compute(head, hidden_BTD)` of a collated batch in one forward pass of `model`, which may be
        wrapped. Where it has a loss, the result's loss is the one that the wrapped model returned."""
        computed: list[Terms] = []

        def forward(hidden_BTD: Tensor) -> Tensor:
            head = Head(weight_VD=self.lm_head.weight, bias_V=self.lm_head.bias)
            computed.append(compute(head, hidden_BTD if self.divisor == 1 else hidden_BTD / self.divisor))
            loss = computed[0].loss
            return hidden_BTD.new_zeros(1, 1, 1) if loss is None else loss.reshape(1, 1, 1)

        if self.gate is not None and self.gate.is_gated:
            logits = self._apart(model, batch, attention, forward)
        else:
            if self.gate is not None:
                self.gate.rows_M = batch["gate_index"]
            meta = _row_meta(batch)
            logits = self._run(model, batch, forward, **mask_arguments(meta, attention))
        assert len(computed) == 1, f"the head ran {len(computed)} times in one forward pass"
        return computed[0] if computed[0].loss is None else replace(computed[0], loss=logits.reshape(()))

    def _apart(
        self, model: nn.Module, batch: Batch, attention: str, forward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """What `model` returns in place of logits, for a model with a gated adapter.

        Clean rows are the base model's: they run first, without gradients, through the base. Then the noisy
        rows of the whole batch run by themselves, through base and adapter, and see the clean keys. So no row
        is gathered in a layer, and the backward pass covers noisy rows only. `forward` gets the hidden states
        of all rows in their places; those of padding are zero."""
        assert self.gate is not None
        shape = batch["doc_ids"].shape
        noisy_M, clean_M = batch["gate_index"], batch["clean_rows"]
        noisy, clean = flat_rows(batch, noisy_M), flat_rows(batch, clean_M)
        if self.graphs is not None and self.graphs.is_running:
            noisy, clean = _filled_up(noisy, clean, of_rows=shape.numel())
            self.graphs.pair = (noisy["doc_ids"].shape[1], clean["doc_ids"].shape[1])
        both = {name: torch.cat([noisy[name], clean[name]], dim=1) for name in noisy}
        hidden: list[Tensor] = []

        def collect(hidden_BTD: Tensor) -> Tensor:
            hidden.append(hidden_BTD[0])
            return hidden_BTD.new_zeros(1, 1, 1)

        def scatter(hidden_BTD: Tensor) -> Tensor:
            noisy_MD, clean_MD = hidden_BTD[0, : len(noisy_M)], hidden[0][: len(clean_M)]
            all_RD = noisy_MD.new_zeros(shape.numel(), noisy_MD.shape[1])
            all_RD = all_RD.index_copy(0, clean_M, clean_MD.to(all_RD.dtype))
            return forward(all_RD.index_copy(0, noisy_M, noisy_MD).unflatten(0, shape))

        self.gate.is_open = False
        with torch.no_grad():
            seen = mask_arguments(_row_meta(clean), attention)
            self._run(self.model, clean, collect, **seen, clean_keys=STORED)
        # It stays so until the next batch: checkpointed layers run again in the backward pass.
        self.gate.is_open = True
        seen = mask_arguments(_row_meta(both), attention, num_queries=noisy["doc_ids"].shape[1])
        return self._run(model, noisy, scatter, **seen, clean_keys=SEEN)

    def _run(
        self, model: nn.Module, rows: Batch, forward: Callable[[Tensor], Tensor], **arguments: Any
    ) -> Tensor:
        """What `model` returns as logits with `forward` in place of its head."""
        head_attributes = vars(self.lm_head)
        # Wrappers may have set a forward of their own on the module.
        before = head_attributes.get("forward")
        head_attributes["forward"] = forward
        try:
            given = {"input_ids": rows["input_ids"], "position_ids": rows["position_ids"]}
            logits: Tensor = model(**given, use_cache=False, **arguments).logits
            return logits
        finally:
            if before is None:
                del head_attributes["forward"]
            else:
                head_attributes["forward"] = before


def flat_rows(batch: Batch, rows_M: Tensor) -> Batch:
    """Some rows of a batch [B, T], by their index [M] into B*T, as one row [1, M], in which documents of
    different packed rows have different numbers."""
    num_rows, length = batch["doc_ids"].shape
    numbers_BT = torch.arange(num_rows, device=rows_M.device)[:, None] * length
    flat = {**batch, "doc_ids": batch["doc_ids"] + numbers_BT}
    return {name: flat[name].flatten()[rows_M][None] for name in ROW_COLUMNS if name in flat}


def _filled_up(noisy: Batch, clean: Batch, *, of_rows: int) -> tuple[Batch, Batch]:
    """Noisy and clean rows [1, M] of a batch, filled up so that few shapes come up (`filled_up`). More noisy
    rows are blocks of one row in a document of their own, with no clean rows; more clean ones are padding."""
    num_noisy, num_clean = noisy["doc_ids"].shape[1], clean["doc_ids"].shape[1]
    more = filled_up(num_noisy, of_rows) - num_noisy
    order = torch.arange(more, device=noisy["doc_ids"].device)[None]
    values = {"doc_ids": torch.full_like(order, 2 * of_rows), "is_noisy": torch.ones_like(order)}
    longer = {
        name: torch.cat([rows, values.get(name, order).to(rows.dtype)], dim=1) for name, rows in noisy.items()
    }
    # Any id will do, but it must have a row in the embedding.
    longer["input_ids"][:, num_noisy:] = 0
    fill = {"doc_ids": PADDING_DOC}
    more = filled_up(num_clean, of_rows) - num_clean
    return longer, {
        name: nn.functional.pad(rows, (0, more), value=fill.get(name, 0)) for name, rows in clean.items()
    }


def _row_meta(rows: Batch) -> RowMeta:
    return RowMeta(
        doc_ids=rows["doc_ids"],
        positions=rows["position_ids"],
        block_starts=rows["block_starts"],
        is_noisy=rows["is_noisy"],
        reach=rows.get("reach"),
    )


class PreviousMeans(TrainerCallback, ExportableState):
    """Stores the global mean losses of the last optimizer step for `train.balance=previous`. They are saved
    in `trainer_state.json`, whose decimals give the same float32 again."""

    def __init__(self) -> None:
        self.step: TrainingStep | None = None
        self.means: Tensor | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        stored = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("means")
        self.means = None if stored is None else torch.tensor(stored, device=args.device)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        assert self.step is not None and self.step.losses is not None
        losses = self.step.losses
        # A clean half of weight 0 is summed only in steps that are logged.
        self.means = None if losses.stage.clean_weight == 0 else losses.means(losses.sums)

    def state(self) -> dict[str, Any]:
        """What transformers writes with a checkpoint."""
        return {"args": {}, "attributes": {"means": None if self.means is None else self.means.tolist()}}


class LossGuard:
    """Ends the run, on every rank, when a loss is not finite, before the optimizer changes a weight.

    `note` sends the verdict to the host while the step runs, `check` reads it once the backward pass is
    launched. DeepSpeed steps at the end of its backward pass: there the optimizer's own hook checks first.
    DeepSpeed skips a step whose gradients are not finite, after which schedule and data disagree:
    `check_skipped` ends the run then."""

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

    def watch(self, optimizer: torch.optim.Optimizer) -> bool:
        """Check before every step of `optimizer`. Further calls change nothing and return False."""
        if self._watched is optimizer:
            return False
        self._watched = optimizer
        optimizer.register_step_pre_hook(lambda *_: self.check())
        return True

    def begin(self, step: int, *, num_micro_batches: int) -> None:
        """Forget the previous step; `step` counts from 1."""
        self._step, self._num_micro_batches, self._num_bad = step, num_micro_batches, None
        self._losses, self._batches = [], []

    def note(self, loss: Tensor, batch: Batch) -> None:
        """Record the loss of a micro-batch. Collective at the last one of the step."""
        self._losses.append(loss.detach())
        self._batches.append(batch)
        if len(self._losses) < self._num_micro_batches:
            return
        num_bad = (~torch.isfinite(torch.stack(self._losses))).sum()
        work = dist.all_reduce(num_bad, async_op=True) if is_distributed() else None
        if num_bad.is_cuda:
            self._num_bad = self._copied(num_bad, work)
            return
        if work is not None:
            work.wait()
        self._num_bad = num_bad

    def _copied(self, num_bad: Tensor, work: dist.Work | None) -> Tensor:
        """Host memory that gets `num_bad` once `work` is done, on a stream of its own: on that of the step
        the copy would arrive only after the backward pass."""
        if self._stream is None or self._pinned is None:
            self._stream, self._arrived = torch.cuda.Stream(), torch.cuda.Event()
            self._pinned = torch.zeros((), dtype=num_bad.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if work is not None:
                work.wait()
            self._pinned.copy_(num_bad, non_blocking=True)
            num_bad.record_stream(self._stream)
            assert self._arrived is not None
            self._arrived.record()
        return self._pinned

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
        """Raise UserError IDLM-0503 when DeepSpeed's `optimizer` skipped the step, on all ranks."""
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
