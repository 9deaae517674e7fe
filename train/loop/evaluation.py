"""Held-out losses and acceptance by draft position while training, and greedy samples of the running weights.

Both go through the objective and the attention that train, one packed row at a time, without gradients; no
random number is drawn, so that a run with them trains the same weights. Every rank takes part: ZeRO-3 needs
all of them to run a layer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from idlm.files.disk import replace_text, translate_disk_errors
from idlm.text.detokenizer import answer_text
from idlm.train.data.dataset import PackedDataset, collate
from idlm.train.data.layout import IGNORE_LABEL, Sample, SampleRows, clean_rows, no_rows, pack_rows
from idlm.train.distributed.collectives import all_reduce, is_distributed
from idlm.train.loop.progress import EVALUATION, Progress
from idlm.train.objectives.base import Batch, Head, Terms
from idlm.train.objectives.curriculum import Curriculum, Stage

if TYPE_CHECKING:
    from idlm.train.loop.trainer import IdlmTrainer

T = TypeVar("T")
SAMPLES_FILE = "samples.jsonl"
PROMPT_TOKENS = 512


class HeldOut(TrainerCallback):
    """Evaluates every `every` steps and at the end of every stage."""

    def __init__(self, dataset: PackedDataset, progress: Progress, *, every: int, num_items: int) -> None:
        rows = dataset.rows_per_epoch()
        self.dataset, self.progress, self.every = dataset, progress, every
        self.num_items = num_items if rows is None else min(rows, num_items)
        self.trainer: IdlmTrainer | None = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.trainer is not None
        curriculum, step = self.trainer.curriculum, state.global_step
        stage = curriculum.stage_of_step(step - 1)
        if step % self.every and not curriculum.ends_stage(step):
            return
        with self.progress.paused():
            record = {"step": step, EVALUATION: self.num_items, **self.measure(stage)}
            if state.is_world_process_zero:
                self.progress.write(record)

    def measure(self, stage: Stage) -> dict[str, Any]:
        """Mean losses and acceptance of the held-out rows laid out for `stage`. Collective."""
        trainer = self.trainer
        assert trainer is not None
        # Held-out rows are laid out for the stage under way; the clean half is always of interest.
        shown = dataclasses.replace(stage, index=0, num_steps=self.num_items, clean_weight=1.0)
        self.dataset.start(Curriculum(stages=(shown,), global_batch=1))
        device, num_terms = trainer.args.device, len(trainer.objective.term_names)
        totals = torch.zeros(2, num_terms, device=device, dtype=torch.float64)
        overlap = torch.zeros(2, stage.stride - 1, device=device, dtype=torch.float64)
        world, own = trainer.args.world_size, trainer.args.process_index
        for start in range(0, self.num_items, world):
            # A rank without an item of its own repeats one, and counts it not.
            batch = collate([self.dataset[min(start + own, self.num_items - 1)]])
            terms = forward_terms(trainer, batch, shown)
            if start + own < self.num_items:
                counts = trainer.objective.counts(batch, stage=shown, want_overlap=True)
                totals += torch.stack([terms.sums.double(), counts.to(device).double()])
                if terms.overlap is not None:
                    overlap += torch.stack([terms.overlap.sums, terms.overlap.counts]).double()
        all_reduce(totals)
        all_reduce(overlap)
        means = (totals[0] / totals[1].clamp_min(1)).tolist()
        return {
            "stage": stage.index,
            "stride": stage.stride,
            **{f"{name}_loss": mean for name, mean in zip(trainer.objective.term_names, means, strict=True)},
            "acceptance": (overlap[0] / overlap[1])[overlap[1] > 0].tolist(),
        }


def forward_terms(trainer: IdlmTrainer, batch: Batch, stage: Stage) -> Terms:
    """The objective's sums and overlap of a batch, without gradients."""

    def compute(head: Head, hidden_BTD: Tensor) -> Terms:
        return trainer.objective.terms(
            head, hidden_BTD, moved, stage=stage, coefficients=None, want_overlap=stage.stride > 1
        )

    moved = {name: value.to(trainer.args.device) for name, value in batch.items()}
    return _without_training(
        trainer, lambda: trainer.runner.terms(trainer.model, moved, trainer.attention, compute)
    )


class RunningSamples(TrainerCallback):
    """Every `every` steps: greedy continuations of `prompts`, next token by next token, into `samples.jsonl`.

    All prompts grow in one packed row of the training shape, so that compiled layers serve them; the whole
    row runs again for every token, which needs no cache and takes `num_tokens` forward passes.
    """

    def __init__(
        self,
        prompts: list[Sample],
        tokenizer: Any,
        progress: Progress,
        *,
        path: Path,
        every: int,
        num_tokens: int,
        row_length: int,
    ) -> None:
        self.tokenizer, self.progress, self.path, self.every = tokenizer, progress, path, every
        self.num_tokens, self.row_length = num_tokens, row_length
        self.prompts = fitting_prompts(prompts, num_tokens=num_tokens, row_length=row_length)
        self.trainer: IdlmTrainer | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self.path.exists():
            kept = [one for one in read_samples(self.path) if one["step"] <= state.global_step]
            replace_text(self.path, "".join(json.dumps(one) + "\n" for one in kept))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % self.every or not self.prompts:
            return
        with self.progress.paused():
            texts = self.generate()
        if not state.is_world_process_zero:
            return
        with translate_disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            for prompt, text in zip(self.prompts, texts, strict=True):
                shown = self.tokenizer.decode(prompt, skip_special_tokens=False)
                file.write(json.dumps({"step": state.global_step, "prompt": shown, "response": text}) + "\n")

    def generate(self) -> list[str]:
        """A greedy continuation of every prompt, up to eos. Collective."""
        trainer = self.trainer
        assert trainer is not None
        answers: list[list[int]] = [[] for _ in self.prompts]
        for _ in range(self.num_tokens):
            for answer, token in zip(answers, self._next_tokens(answers), strict=True):
                if not answer or answer[-1] != self.tokenizer.eos_token_id:
                    answer.append(token)
            if not is_distributed() and all(a[-1] == self.tokenizer.eos_token_id for a in answers):
                break
        return [answer_text(self.tokenizer, answer) for answer in answers]

    def _next_tokens(self, answers: list[list[int]]) -> list[int]:
        trainer = self.trainer
        assert trainer is not None
        documents: list[SampleRows] = []
        ends: list[int] = []
        for prompt, answer in zip(self.prompts, answers, strict=True):
            ids = np.asarray([*prompt, *answer], dtype=np.int64)
            whole = Sample(token_ids=ids, supervised=np.zeros(len(ids), dtype=bool))
            documents.append(SampleRows(noisy=no_rows(), clean=clean_rows(whole, "response")))
            ends.append(len(ids) + (ends[-1] if ends else 0))
        row = pack_rows(documents, self.row_length, pad_token_id=self.tokenizer.eos_token_id)
        batch = collate([row | {"item_id": 0, "stage": 0}])
        assert bool((batch["labels"] == IGNORE_LABEL).all())
        moved = {name: value.to(trainer.args.device) for name, value in batch.items()}
        last = torch.tensor(ends, device=trainer.args.device) - 1

        def best() -> Tensor:
            hidden_BTD = trainer.runner.hidden(trainer.model, moved, trainer.attention)
            return trainer.runner.head(hidden_BTD[0].index_select(0, last)).argmax(dim=-1)

        tokens = _without_training(trainer, best)
        if is_distributed():
            # Ranks may round differently; they must run the same passes on the same text.
            dist.broadcast(tokens, src=0)
        return [int(token) for token in tokens]


def fitting_prompts(samples: list[Sample], *, num_tokens: int, row_length: int) -> list[list[int]]:
    """Prompts up to their first target, as many as fit one row with `num_tokens` each."""
    prompts: list[list[int]] = []
    used = 0
    for sample in samples:
        prompt = sample.token_ids[: max(1, int(sample.supervised.argmax()))][-PROMPT_TOKENS:].tolist()
        if used + len(prompt) + num_tokens <= row_length:
            prompts.append(prompt)
            used += len(prompt) + num_tokens
    return prompts


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Records of `samples.jsonl`; a torn last line is ignored."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _without_training(trainer: IdlmTrainer, compute: Callable[[], T]) -> T:
    was_training = trainer.model.training
    trainer.model.eval()
    try:
        with torch.no_grad(), trainer.accelerator.autocast():
            return compute()
    finally:
        trainer.model.train(was_training)
