"""Room for what an engine allocates when it is built: one error for what can never fit, or does not.

Passes that run out of memory later on are another matter: failures.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from idlm.errors import UserError
from idlm.infer.errors import is_out_of_memory

FIX = "lower max_num_seqs, max_length or num_pages"
# A CPU's allocator, and sizes beyond what 64 bits count, are told by a plain RuntimeError.
TEXTS = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed", "invalid size")


def check_memory(what: str, num_bytes: int, device: torch.device) -> None:
    """UserError IDLM-0405 where `what` takes more than the device has when it is empty."""
    size = _size_of(device)
    if num_bytes > size:
        raise UserError("IDLM-0405", f"{what}: {num_bytes:,} bytes; {device} has {size:,}", fix=FIX)


@contextmanager
def translate_memory_errors(device: torch.device) -> Iterator[None]:
    """Inside, an allocation that fails raises UserError IDLM-0405."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError) as error:
        is_known = not isinstance(error, RuntimeError) or any(text in str(error) for text in TEXTS)
        if not is_known and not is_out_of_memory(error):
            raise
        raise UserError(
            "IDLM-0405", f"KV pages and the state of sequences do not fit on {device}: {error}", fix=FIX
        ) from error


def _size_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
