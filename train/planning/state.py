"""Bytes of training state, in memory and on disk: weights, sums of gradients, float32 masters, AdamW moments.

`state_terms` is the one formula: the memory plan, the advice after an out-of-memory error and the check of
the disk use it."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from idlm.errors import UserError
from idlm.train.config.schema import TrainConfig
from idlm.train.distributed.deepspeed import (
    SHARDS_WEIGHTS,
    has_fp32_masters,
    num_parameters,
    num_trained_parameters,
    uses_deepspeed,
    zero_stage,
)
from idlm.train.model.stored import export_dtype
from idlm.train.objectives.curriculum import Curriculum

GIB = 2**30
EXPORT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DISK_FIX = "free space, lower train.save_total_limit or give another output_dir"
GRADIENTS = "gradients, float32 sums"


class Term(NamedTuple):
    """Bytes of one kind of thing on one GPU, and the formula with the names of its numbers."""

    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """How a model is trained. `rows` and `targets` (rows with a label) of a micro-batch; an adapter changes
    `mask_rows` of them: the noisy ones, all if it is not gated. `zero_stage` None: without DeepSpeed.
    `is_bf16`: weights are bfloat16; `autocast`: float32 weights, bfloat16 products. `rank` 0: all weights
    train; else a LoRA with `adapter_parameters`. `attention` is that of `model.attention`. `copies_base`: a
    frozen copy of the base, in the dtype of products (train.base_kl)."""

    rows: int
    targets: int
    mask_rows: int
    world_size: int = 1
    zero_stage: int | None = None
    is_bf16: bool = True
    autocast: bool = False
    is_checkpointed: bool = False
    recomputed_layers: int | None = None
    is_compiled: bool = False
    is_replayed: bool = False
    offloads: bool = False
    rank: int = 0
    adapter_parameters: int = 0
    batch_size: int = 1
    attention: str = "auto"
    copies_base: bool = False

    @property
    def size(self) -> int:
        """e, bytes of a weight."""
        return 2 if self.is_bf16 else 4

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer holds float32 copies: with bfloat16 weights, and with ZeRO."""
        return self.zero_stage is not None and (self.is_bf16 or self.zero_stage >= 1)

    def parts(self, from_stage: int) -> int:
        """Into how many parts the ZeRO stage cuts what it shards from `from_stage` on."""
        return self.world_size if (self.zero_stage or 0) >= from_stage else 1


def state_setup(config: TrainConfig, *, world_size: int) -> RunSetup:
    """The setup that `state_terms` needs: without rows."""
    return RunSetup(
        rows=0,
        targets=0,
        mask_rows=0,
        world_size=world_size,
        zero_stage=zero_stage(config.train),
        is_bf16=has_fp32_masters(config) or config.model.dtype == "bfloat16",
        autocast=config.train.bf16 and not uses_deepspeed(config.train) and config.model.dtype == "float32",
        offloads=config.train.offload_optimizer,
        copies_base=config.train.base_kl > 0,
        rank=0 if config.adapter is None else config.adapter.rank,
    )


def state_terms(run: RunSetup, trained: int, frozen: int) -> list[Term]:
    """Bytes on one GPU of weights, gradients that outlive a micro-batch and the optimizer's state.

    Offloading moves the optimizer to the host, and from ZeRO-2 on the sums of the gradients too. ZeRO-1 sums
    the gradients of all weights on the GPU before it hands a part to the host."""
    weights, gradients, optimizer = run.parts(SHARDS_WEIGHTS), run.parts(2), run.parts(1)
    # Without DeepSpeed an adapter stays float32 next to a bfloat16 base.
    trained_size = run.size if run.has_masters or not run.rank else 4
    on_gpu = 0 if run.offloads else 1
    narrow = 2 if run.autocast else run.size
    sums_on_gpu = 0 if run.offloads and (run.zero_stage or 0) >= 2 else 1
    return [
        Term(
            "weights",
            (trained_size * trained + run.size * frozen) // weights,
            f"({trained_size} P{f' + {run.size} Z' if frozen else ''}) / {weights}",
        ),
        Term(GRADIENTS, sums_on_gpu * 4 * trained // gradients, f"4 P / {gradients}"),
        Term("float32 masters", on_gpu * run.has_masters * 4 * trained // optimizer, f"4 P / {optimizer}"),
        Term("AdamW moments", on_gpu * 8 * trained // optimizer, f"8 P / {optimizer}"),
        Term(
            "frozen base (train.base_kl)",
            run.copies_base * narrow * (frozen or trained),
            f"{narrow} {'Z' if frozen else 'P'}",
        ),
    ]


def state_bytes(config: TrainConfig, num_trained: int, num_frozen: int, *, world_size: int) -> int:
    terms = state_terms(state_setup(config, world_size=world_size), num_trained, num_frozen)
    return sum(term.num_bytes for term in terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlan:
    """Bytes and number of checkpoints; `held_bytes`: taken by earlier checkpoints already."""

    checkpoint_bytes: int
    num_checkpoints: int
    export_bytes: int
    num_exports: int
    free_bytes: int
    location: str
    held_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        return self.checkpoint_bytes * self.num_checkpoints + self.export_bytes * self.num_exports

    @property
    def problem(self) -> str | None:
        """The message when the disk is too small; the fix is `DISK_FIX`."""
        missing_bytes = self.needed_bytes - self.held_bytes
        if missing_bytes <= self.free_bytes:
            return None
        return (
            f"output_dir needs {size_text(missing_bytes)}, and {self.location} has "
            f"{size_text(self.free_bytes)} free"
        )


def plan_disk(config: TrainConfig, model: nn.Module, curriculum: Curriculum) -> DiskPlan:
    """What the run will write; `model` with its adapter, if any.

    A checkpoint holds all training state but gradients. One more than `save_total_limit` exists while the
    newest is written. Every stage publishes the weights, or a gated adapter alone."""
    trained = num_trained_parameters(model)
    whole = replace(state_setup(config, world_size=1), offloads=False, copies_base=False)
    published = trained
    if not config.is_gated:
        published = num_parameters(model) - (0 if config.adapter is None else trained)
    output_dir = Path(config.output_dir).absolute()
    location = next(path for path in (output_dir, *output_dir.parents) if path.exists())
    written = [*output_dir.glob("run/checkpoint-*/**/*"), *output_dir.glob("stages/**/*")]
    return DiskPlan(
        checkpoint_bytes=sum(
            term.num_bytes for term in state_terms(whole, trained, 0) if term.name != GRADIENTS
        ),
        num_checkpoints=min(
            config.train.save_total_limit + 1, math.ceil(curriculum.num_steps / config.train.save_every)
        ),
        export_bytes=published * EXPORT_BYTES[export_dtype(config)],
        # One more while the engine answers from the weights of a step.
        num_exports=len(curriculum.stages) + (config.eval.num_prompts > 0),
        free_bytes=shutil.disk_usage(location).free,
        location=str(location),
        held_bytes=sum(path.stat().st_size for path in written if path.is_file()),
    )


def check_disk(config: TrainConfig, model: nn.Module, curriculum: Curriculum) -> None:
    """Raise UserError IDLM-0520 where the disk is too small for what the run will write."""
    problem = plan_disk(config, model, curriculum).problem
    if problem is not None:
        raise UserError("IDLM-0520", problem, fix=DISK_FIX)


def size_text(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
