"""One arm of `benchmarks.training.train_step` in one process group, started by the driver through torchrun.

The product's trainer runs on random weights of a true shape and real text; rank 0 writes the times."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from transformers import PrinterCallback, TrainerCallback

from benchmarks.stream import matmul_rate
from benchmarks.training.packed_text import TextSource
from idlm.config.compose import compose
from idlm.train import pipeline
from idlm.train.config.schema import TrainConfig
from idlm.train.data.base import SOURCES
from idlm.train.distributed.deepspeed import zero_stage
from idlm.train.loop.progress import Progress
from idlm.train.loop.trainer import IdlmTrainer
from idlm.train.planning.estimate import estimate_run
from idlm.train.planning.sizes import with_sizes

WARM_STEPS = 1
LEARNT_STEPS = 1_000_000
"""Length of the schedule, so that the learning rate of measured steps is not that of the end of a run."""


@SOURCES.register("benchmark_text")
def _text_source(config: Any, encoder: Any) -> TextSource:
    return TextSource(**config.task_args)


@dataclass(slots=True)
class _Clock(TrainerCallback):
    """Ends of optimizer steps, events of a GPU or seconds, and their mean losses by term. The host does not
    wait, as in training, where it prepares a step while the device computes the one before."""

    ends: list[Any]
    losses: list[torch.Tensor] = field(default_factory=list)
    trainer: IdlmTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The first passes of a shape count: what CUDA graphs hold does not.
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        assert self.trainer is not None and self.trainer.step.losses is not None
        losses = self.trainer.step.losses
        self.losses.append(losses.means(losses.sums))
        if not torch.cuda.is_available():
            self.ends.append(time.perf_counter())
            return control
        self.ends.append(torch.cuda.Event(enable_timing=True))
        self.ends[-1].record()
        return control

    def gaps(self) -> list[float]:
        ends = self.ends[WARM_STEPS - 1 :]
        pairs = zip(ends, ends[1:], strict=False)
        if not torch.cuda.is_available():
            return [end - start for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairs]


def main() -> int:
    """`python -m benchmarks.train_step_worker <result file> <measured steps> <overrides of idlm-train>`."""
    target, num_steps, overrides = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    config = with_sizes(compose("train", TrainConfig, overrides))
    args = pipeline.training_arguments(config)
    prepared = pipeline.prepare(config, world_size=args.world_size, device=args.device)
    estimate = estimate_run(
        config, prepared.model, prepared.dataset, prepared.curriculum, gpus=args.world_size
    )
    args.max_steps = WARM_STEPS + num_steps
    args.save_strategy = "no"
    rate = matmul_rate(device=str(args.device)) if args.device.type == "cuda" else 1.0
    clock = _Clock(ends=[])
    trainer = IdlmTrainer(
        model=prepared.model,
        args=args,
        train_dataset=prepared.dataset,
        objective=prepared.losses,
        attention=prepared.attention,
        loop=replace(config.train, log_every=LEARNT_STEPS),
        callbacks=[clock],
    )
    clock.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    # As in a run: otherwise transformers waits for DeepSpeed's gradient norm in every step.
    Progress(Path(args.output_dir) / "metrics.jsonl", console=None).attach(trainer)
    trainer.train()
    num_rows = config.train.batch_size * config.train.accumulation
    items = [prepared.dataset[item] for item in range(num_rows)]
    num_tokens = sum(int((~item["is_noisy"] & (item["doc_ids"] >= 0)).sum()) for item in items)
    found = {
        "seconds_per_step": clock.gaps(),
        "losses": [losses.tolist() for losses in clock.losses],
        "data_tokens_per_step": num_tokens,
        "matmul_flops": rate,
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "planned_peak": estimate.memory.peak_allocated if estimate else None,
        "planned_seconds": estimate.time.seconds_per_step if estimate and estimate.time else None,
        "world_size": args.world_size,
        "attention": prepared.attention,
        "zero_stage": zero_stage(config.train),
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        target.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
