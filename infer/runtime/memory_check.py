"""Memory checks while an engine is built. `infer/errors.py` is about steps that run out of memory later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from idlm.errors import UserError
from idlm.infer.decoders.base import Decoder, max_rows
from idlm.infer.errors import is_out_of_memory
from idlm.infer.memory.base import LOGITS, MemoryDemand, Transient
from idlm.infer.models.loader import LoadedModel
from idlm.infer.settings import EngineSettings
from idlm.infer.state.kv_cache import KV_STORES

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


def memory_demand(
    settings: EngineSettings,
    model: LoadedModel,
    decoder: Decoder,
    kv_dtype: torch.dtype,
    accelerator_bytes: int,
) -> MemoryDemand:
    """The KV pages that full lanes could use, and the logits of the largest pass. `accelerator_bytes`: what
    accelerators keep of each page.
    """
    assert settings.max_length is not None
    spec, policy, page_size = model.local, decoder.kv_policy, settings.slots_per_page
    num_buffers = 2 * KV_STORES[policy.kind].num_buffers(spec.num_layers)
    slot_bytes = num_buffers * spec.num_kv_heads * spec.head_dim * kv_dtype.itemsize
    num_rows = max_rows(decoder, settings.max_length)
    most_rows = policy.max_rows(settings.max_num_seqs, num_rows, budget=settings.max_num_batched_tokens)
    max_slots = policy.num_slots(settings.max_length, num_rows)
    max_pages = -(-max_slots // page_size) * settings.max_num_seqs
    if policy.kind == "none":
        # Canvases of one pass, each of which may leave part of a page unused.
        max_pages = min(max_pages, -(-most_rows // page_size) + settings.max_num_seqs)
    return MemoryDemand(
        device=model.device,
        page_bytes=slot_bytes * page_size + accelerator_bytes,
        max_pages=max_pages,
        transients={LOGITS: Transient(row_bytes=spec.vocab_size * model.dtype.itemsize, num_rows=most_rows)},
    )


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
