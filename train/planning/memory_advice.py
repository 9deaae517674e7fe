"""Explains an out-of-memory error: what was used, which settings to change, and what each of them frees."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from idlm.errors import UserError
from idlm.train.distributed.deepspeed import SHARDS_WEIGHTS, num_elements, num_parameters, zero_stage
from idlm.train.planning.state import GIB, state_setup, state_terms

if TYPE_CHECKING:
    from torch import nn

    from idlm.train.config.schema import TrainConfig

HOST_TEXTS = ("can't allocate memory", "DefaultCPUAllocator: not enough memory", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the GPU or the host refused memory."""
    is_typed = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_typed or (isinstance(error, RuntimeError) and any(text in str(error) for text in HOST_TEXTS))


@contextlib.contextmanager
def explain_out_of_memory(config: TrainConfig, model: nn.Module, *, world_size: int) -> Iterator[None]:
    """Inside, running out of GPU or host memory raises UserError IDLM-0517: what was used, what to set."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        is_gpu = isinstance(error, torch.OutOfMemoryError)
        where, figures = ("GPU", _gpu_figures()) if is_gpu else ("host", _host_figures())
        raise _explained(where, figures, config, model, world_size=world_size) from error


def state_bytes(config: TrainConfig, num_trained: int, num_frozen: int, *, world_size: int) -> int:
    """Bytes per process of weights, gradients and AdamW's state."""
    terms = state_terms(state_setup(config, world_size=world_size), num_trained, num_frozen)
    return sum(term.num_bytes for term in terms)


def advice(config: TrainConfig, *, num_trained: int, num_frozen: int, world_size: int) -> list[str]:
    """Settings that lower memory, the cheapest first, each with its value for this run."""
    loop, settings = config.train, []

    def state_gib(**changes: Any) -> float:
        changed = replace(config, train=replace(loop, **changes))
        return state_bytes(changed, num_trained, num_frozen, world_size=world_size) / GIB

    if loop.batch_size > 1:
        half, rows = loop.batch_size // 2, loop.batch_size * loop.accumulation
        same = "same rows per step, " if rows % half == 0 else ""
        settings.append(
            f"train.batch_size={half} train.accumulation={rows // half} ({same}half the activations)"
        )
    if not config.model.gradient_checkpointing:
        settings.append(
            "model.gradient_checkpointing=true (activations of one layer at a time, 1/3 more compute)"
        )
    if loop.deepspeed is None and world_size > 1:
        settings += [
            f"train.zero_stage={stage} (weights, gradients and optimizer take "
            f"{state_gib(zero_stage=stage):.1f} GiB per process instead of {state_gib():.1f})"
            for stage in range((zero_stage(config) or 0) + 1, SHARDS_WEIGHTS + 1)
        ]
    if loop.zero_stage and not loop.offload_optimizer:
        saved = state_gib() - state_gib(offload_optimizer=True)
        settings.append(f"train.offload_optimizer=true ({saved:.1f} GiB less per process, slow)")
    if loop.batch_size == 1:
        half = loop.max_length // 2
        settings.append(f"train.max_length={half} train.overlong=truncate or drop (half the activations)")
    return settings


def _explained(
    where: str, figures: str, config: TrainConfig, model: nn.Module, *, world_size: int
) -> UserError:
    num_trained = sum(num_elements(value) for value in model.parameters() if value.requires_grad)
    num_frozen = num_parameters(model) - num_trained
    states = state_bytes(config, num_trained, num_frozen, world_size=world_size)
    settings = advice(config, num_trained=num_trained, num_frozen=num_frozen, world_size=world_size)
    return UserError(
        "IDLM-0517",
        f"out of {where} memory: {figures}; weights, gradients and optimizer take {states / GIB:.1f} GiB of "
        f"it, activations of {config.train.batch_size} x {config.train.max_length} tokens the rest",
        fix="then resume=auto with one of: " + "; ".join(settings),
    )


def _gpu_figures() -> str:
    free, total = torch.cuda.mem_get_info()
    return (
        f"{torch.cuda.max_memory_allocated() / GIB:.1f} GiB allocated at most, "
        f"{torch.cuda.memory_reserved() / GIB:.1f} GiB reserved, {free / GIB:.1f} of {total / GIB:.1f} GiB "
        "free"
    )


def _host_figures() -> str:
    page = os.sysconf("SC_PAGE_SIZE")
    statm = Path("/proc/self/statm")
    resident = int(statm.read_text().split()[1]) * page if statm.exists() else 0
    return f"{resident / GIB:.1f} GiB resident of {os.sysconf('SC_PHYS_PAGES') * page / GIB:.1f} GiB"
