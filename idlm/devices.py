"""What training and inference share about devices: the check of a requested GPU, memory that ends, and values
that are not finite."""

from __future__ import annotations

import gc

import torch

from idlm.errors import UserError

HOST_TEXTS = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""Parts of the RuntimeError of torch when the host refuses memory."""


def free_cached_memory() -> None:
    """Give back the memory of what nothing refers to any more, which may lie in circles of references."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN."""
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    # One pass without temporaries: isfinite().all() takes ten times as long on a CPU.
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, is a refusal of memory by a GPU or the host.

    Cleaning up after one (of a graph capture) may raise a RuntimeError of its own."""
    while isinstance(error, RuntimeError):
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in HOST_TEXTS):
            return True
        error = error.__context__
    return isinstance(error, MemoryError)


def require_gpu(device: str, *, key: str) -> None:
    """Raise UserError IDLM-0418 if `device`, the value of setting `key`, is a GPU that does not exist."""
    wanted = torch.device(device)
    num_seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.type == "cuda" and (wanted.index or 0) >= num_seen:
        seen = f"{num_seen} GPUs" if num_seen else "no GPU"
        raise UserError(
            "IDLM-0418", f"{key}={device!r}, but torch sees {seen}", fix=f"use {key}=cpu or {key}=auto"
        )
