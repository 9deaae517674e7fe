"""Errors that end a request without its answer. `Engine._recover_from_oom` tries other ways before."""

from __future__ import annotations

import torch

from idlm.errors import UserError

MIN_CONSECUTIVE_OOM = 2
"""Steps in a row that run out of memory before a request fails."""


def out_of_memory(
    request_id: str, num_consecutive: int, message: str, *, max_num_batched_tokens: int
) -> UserError:
    budget = max(1, max_num_batched_tokens // 2)
    return UserError(
        "IDLM-0448",
        f"request {request_id!r} failed: {num_consecutive} steps in a row ran out of memory ({message})",
        fix=f"lower max_num_batched_tokens to {budget}, max_num_seqs, or num_pages, which leaves more memory "
        "outside the KV cache",
    )


def decoded_otherwise(request_id: str, num_tokens: int) -> UserError:
    return UserError(
        "IDLM-0473",
        f"request {request_id!r} failed: it was preempted, and decoding its {num_tokens} tokens again gave "
        "other ones, because passes of other sizes round otherwise",
        fix="use accelerators.focus.commit=clean, fewer sequences (max_num_seqs) or more num_pages, so that "
        "none is preempted, or dtype=float32",
    )


def grammar_failed(request_id: str, num_tokens: int, problem: str) -> UserError:
    return UserError(
        "IDLM-0478",
        f"request {request_id!r} failed: after {num_tokens} tokens its constraint cannot be followed: "
        f"{problem}",
        fix="simplify the constraint, and write it so that tokens of this checkpoint can spell every answer",
    )


def nonfinite_logits(request_id: str, num_tokens: int, *, dtype: torch.dtype) -> UserError:
    advice = "use dtype=bfloat16 or float32, which hold larger numbers, or " * (dtype == torch.float16)
    return UserError(
        "IDLM-0457",
        f"request {request_id!r} failed: after {num_tokens} tokens of its answer the model's logits are not "
        "finite, so no token can be sampled",
        fix=f"{advice}look for what overflows: an adapter that diverged, a damaged checkpoint",
    )
