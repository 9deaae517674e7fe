"""What ends a request without its answer: device memory that stays short, logits that are no law.

What is done about a shortage is in `Engine`, `Scheduler.halve_budget` and `Worker.relieve`.
"""

from __future__ import annotations

import torch

from idlm.errors import UserError

MIN_CONSECUTIVE_OOM = 2
"""Passes in a row that run out of memory before a request is given up."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether device memory was short. What is undone behind that (a capture) may fail with an error of its
    own.
    """
    while isinstance(error, RuntimeError):
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False


def given_up(request_id: str, num_in_a_row: int, reason: str, *, max_num_batched_tokens: int) -> UserError:
    """Why a request ends without its answer. `max_num_batched_tokens`: the engine's setting."""
    return UserError(
        "IDLM-0448",
        f"request {request_id!r} was given up: {num_in_a_row} passes in a row ran out of memory ({reason})",
        fix=f"lower max_num_batched_tokens to {max(1, max_num_batched_tokens // 2)}, max_num_seqs, or num_pages, which "
        "leaves more beside the KV cache",
    )


def not_finite(request_id: str, num_tokens: int, *, dtype: torch.dtype) -> UserError:
    """The same, for logits in `dtype` that are not finite behind `num_tokens` tokens of the answer."""
    advice = "use dtype=bfloat16 or float32, which hold larger numbers, or " * (dtype == torch.float16)
    return UserError(
        "IDLM-0457",
        f"request {request_id!r} was given up: behind {num_tokens} tokens of its answer the model's logits "
        "are not finite, so nothing can be drawn",
        fix=f"{advice}look for what overflows: an adapter that diverged, a checkpoint that is damaged",
    )
