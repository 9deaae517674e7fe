"""Kernels whose sums have a fixed order, for runs that are compared bit for bit."""

from __future__ import annotations

import os


def fix_order_of_sums() -> None:
    """Make kernels of this process deterministic; call it before any is launched."""
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
