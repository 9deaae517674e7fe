"""What training and inference both refuse about a device. Choosing one is theirs."""

from __future__ import annotations

import torch

from idlm.errors import UserError


def require_gpu(device: str, *, key: str) -> None:
    """UserError IDLM-0418 where `device`, the value of the setting `key`, is a GPU and torch sees none."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "IDLM-0418", f"{key}={device!r}, but torch sees no GPU", fix=f"use {key}=cpu or {key}=auto"
        )
