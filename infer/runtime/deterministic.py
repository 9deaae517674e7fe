"""Deterministic mode: products whose bits of a row do not depend on how many rows there are.

On a GPU our kernels compute them. On a CPU MKL does in its strict mode, which it reads from the environment
at its first product.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from idlm.errors import UserError
from idlm.infer.models.loader import LoadedModel
from idlm.kernels.linear import check_rows_agree

MKL_VARIABLE, STRICT = "MKL_CBWR", "AUTO,STRICT"
CHECK = """
import sys, torch
from idlm.kernels.linear import check_rows_agree
torch.set_num_threads(int(sys.argv[1]))
sys.exit(0 if check_rows_agree(torch.device("cpu"), torch.float32) else 1)
"""


def request_strict_products(device: torch.device) -> None:
    """Set the strict mode of MKL for this whole process, unless the environment names a mode."""
    if device.type == "cpu":
        os.environ.setdefault(MKL_VARIABLE, STRICT)


def check_products(model: LoadedModel) -> None:
    """UserError IDLM-0456 on a device where the bits of a product's row depend on how many rows there are."""
    if not check_rows_agree(model.device, model.dtype):
        on_gpu = model.device.type == "cuda"
        device = torch.cuda.get_device_name(model.device) if on_gpu else "this CPU"
        raise UserError(
            "IDLM-0456",
            f"deterministic=true: on {device} the bits of a product's row depend on how many rows there are, "
            f"with {model.dtype}",
            fix="use deterministic=false, or a Hopper GPU" if on_gpu else _fix_on_a_cpu(model.dtype),
        )


def _fix_on_a_cpu(dtype: torch.dtype) -> str:
    """What helps: another dtype, MKL's mode in the environment of a new process, or nothing on this CPU."""
    float32 = "" if dtype == torch.float32 else "dtype=float32"
    if float32 and check_rows_agree(torch.device("cpu"), torch.float32):
        return f"use {float32}"
    command = [sys.executable, "-c", CHECK, str(torch.get_num_threads())]
    environment = os.environ | {MKL_VARIABLE: STRICT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0:
        with_dtype = f", with {float32}" if float32 else ""
        return f"set {MKL_VARIABLE}={STRICT} before Python starts (MKL already has another mode){with_dtype}"
    return "use deterministic=false, or a Hopper GPU: strict mode of MKL has no effect on this CPU"
