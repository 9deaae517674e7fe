"""Memory checks while an engine is built. `infer/errors.py` is about steps that run out of memory later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from idlm.errors import UserError
from idlm.infer.errors import is_out_of_memory

FIX = "lower max_num_seqs, max_length or num_pages"
# The CPU allocator, and sizes beyond 64 bits, raise a plain RuntimeError with one of these texts.
TEXTS = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed", "invalid size")


def check_memory(what: str, num_bytes: int, device: torch.device) -> None:
    """Raise UserError IDLM-0405 if `what` takes more bytes than the whole memory of `device`."""
    size = _total_bytes(device)
    if num_bytes > size:
        raise UserError("IDLM-0405", f"{what}: {num_bytes:,} bytes; {device} has {size:,}", fix=FIX)


@contextmanager
def translate_memory_errors(device: torch.device) -> Iterator[None]:
    """Within this context, a failed allocation raises UserError IDLM-0405."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError) as error:
        is_known = not isinstance(error, RuntimeError) or any(text in str(error) for text in TEXTS)
        if not is_known and not is_out_of_memory(error):
            raise
        raise UserError(
            "IDLM-0405", f"KV pages and the state of sequences do not fit on {device}: {error}", fix=FIX
        ) from error


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
