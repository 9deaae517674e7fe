"""The check of a requested GPU that training and inference share."""

from __future__ import annotations

import torch

from idlm.errors import UserError


def require_gpu(device: str, *, key: str) -> None:
    """Raise UserError IDLM-0418 if `device`, the value of setting `key`, is a GPU that does not exist."""
    wanted = torch.device(device)
    num_seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.type == "cuda" and (wanted.index or 0) >= num_seen:
        seen = f"{num_seen} GPUs" if num_seen else "no GPU"
        raise UserError(
            "IDLM-0418", f"{key}={device!r}, but torch sees {seen}", fix=f"use {key}=cpu or {key}=auto"
        )
