"""Deterministic mode: products whose bits of a row do not depend on how many rows there are.

On a GPU our kernels compute them. On a CPU MKL does in its strict mode, which it reads from the environment
at its first product."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from idlm.errors import UserError
from idlm.infer.decoders.base import Decoder, max_rows
from idlm.infer.models.loader import LoadedModel
from idlm.infer.runtime.model_runner import head_shape
from idlm.infer.settings import EngineSettings
from idlm.kernels.backend import has_gluon
from idlm.kernels.linear import check_rows_agree
from idlm.kernels.paged_attention import problems

CHEAP_LOADS = ((1, 64), (7, 16), (15, 1))
"""Decoding rows of a sequence, and the sequences of a pass up to which deterministic kernels add at most 3 %
to its time: AR 1.02 times at most; stride 4 1.01 at most, and 1.04 at 64; stride 8 1.02 at 1, 1.03 at 4 and
1.04 at 16 (Qwen3-8B's shape in bfloat16, contexts of 1,024 tokens, one H100)."""
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


def is_cheap(settings: EngineSettings, model: LoadedModel, decoder: Decoder) -> bool:
    """What `deterministic=auto` is: whether the largest passes of an engine are among `CHEAP_LOADS`, and all
    else is as it was when those were measured."""
    is_measured = (
        *(has_gluon(model.device), model.dtype == torch.bfloat16, model.spec.moe is None),
        *(not settings.is_lossy, not settings.accelerators, settings.tensor_parallel == 1),
        *(settings.attention != "torch", decoder.kv_policy.kind == "append"),
    )
    heads = head_shape(model, model.dtype)
    if not all(is_measured) or problems("triton", heads, device=model.device, deterministic=True):
        return False
    num_rows = max_rows(decoder, model.spec.max_positions)
    maximum = next((num for rows, num in CHEAP_LOADS if num_rows <= rows), 0)
    return settings.max_sequences <= maximum and check_rows_agree(model.device, model.dtype)


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
