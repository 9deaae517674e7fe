"""A pass that ran out of device memory: how to tell, and what its request is told. What is done about it is
in `Engine`, `Scheduler.halve_budget` and `Worker.relieve`.
"""

from __future__ import annotations

import torch

from idlm.errors import UserError

LEAST_IN_A_ROW = 2
"""Passes in a row that run out of memory before a request is given up."""


def is_shortage(error: BaseException | None) -> bool:
    """Whether device memory was short. What is undone behind that (a capture) may fail with an error of its
    own.
    """
    while isinstance(error, RuntimeError):
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False


def given_up(request_id: str, num_in_a_row: int, reason: str, *, max_prompt_rows: int) -> UserError:
    """Why a request ends without its answer. `max_prompt_rows`: the engine's setting."""
    return UserError(
        "IDLM-0448",
        f"request {request_id!r} was given up: {num_in_a_row} passes in a row ran out of memory ({reason})",
        fix=f"lower max_prompt_rows to {max(1, max_prompt_rows // 2)}, max_num_seqs, or num_pages, which "
        "leaves more beside the KV cache",
    )
