"""Explains an out-of-memory error: what was used, and which settings need less."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from idlm.errors import UserError
from idlm.train.distributed.deepspeed import num_elements, num_parameters
from idlm.train.planning.estimate import smaller_runs
from idlm.train.planning.state import GIB, state_setup, state_terms

if TYPE_CHECKING:
    from torch import nn

    from idlm.train.config.schema import TrainConfig

HOST_TEXTS = ("can't allocate memory", "DefaultCPUAllocator: not enough memory", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the GPU or the host refused memory."""
    is_typed = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_typed or (isinstance(error, RuntimeError) and any(text in str(error) for text in HOST_TEXTS))


def explain_out_of_memory(
    error: BaseException, config: TrainConfig, model: nn.Module, *, world_size: int
) -> None:
    """Raise UserError IDLM-0517 if `error` is about memory: what was used, what to set."""
    if not is_out_of_memory(error):
        return
    is_gpu = isinstance(error, torch.OutOfMemoryError)
    where, figures = ("GPU", _gpu_figures()) if is_gpu else ("host", _host_figures())
    num_trained = sum(num_elements(value) for value in model.parameters() if value.requires_grad)
    num_frozen = num_parameters(model) - num_trained
    states = state_bytes(config, num_trained, num_frozen, world_size=world_size)
    settings = advice(config, num_trained=num_trained, num_frozen=num_frozen, world_size=world_size)
    raise UserError(
        "IDLM-0517",
        f"out of {where} memory: {figures}; weights, gradients and optimizer take {states / GIB:.1f} GiB of "
        f"it, activations of {config.train.batch_size} x {config.train.max_length} tokens the rest",
        fix=f"set one of: {'; '.join(settings)}. With another train.batch_size resume=auto continues, other "
        "settings need a new run (resume=never)",
    ) from error


def state_bytes(config: TrainConfig, num_trained: int, num_frozen: int, *, world_size: int) -> int:
    """Bytes per process of weights, gradients and AdamW's state."""
    terms = state_terms(state_setup(config, world_size=world_size), num_trained, num_frozen)
    return sum(term.num_bytes for term in terms)


def advice(config: TrainConfig, *, num_trained: int, num_frozen: int, world_size: int) -> list[str]:
    """Settings that lower memory; for those that lower the training state, what it takes then."""
    before, found = state_bytes(config, num_trained, num_frozen, world_size=world_size), []
    for name, changed in smaller_runs(config, num_gpus=world_size).items():
        after = state_bytes(changed, num_trained, num_frozen, world_size=world_size)
        saved = f"{after / GIB:.1f} GiB of weights, gradients and optimizer instead of {before / GIB:.1f}"
        if after <= before:
            found.append(f"{name} ({saved if after < before else 'fewer activations'})")
    return found


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
