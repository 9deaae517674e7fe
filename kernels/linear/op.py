"""Linear layers of few rows: our kernel with a `Launch`, the library without one. Contract in README.md.

R rows, D input width, E output width, F half of it for a SwiGLU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from idlm.kernels.backend import runs_kernels
from idlm.kernels.linear.fp8 import Fp8Weight

if TYPE_CHECKING:
    from idlm.kernels.gated_lora import GatedLora
    from idlm.kernels.linear.launch import Launch, Workspace

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def linear(
    x_RD: Tensor,
    weight_ED: Tensor | Fp8Weight,
    *,
    bias_E: Tensor | None = None,
    launch: Launch | None = None,
    workspace: Workspace | None = None,
    out_RE: Tensor | None = None,
) -> Tensor:
    """x W^T (+ bias), rounded: [R, E] in the dtype of `x_RD`.

    Without a launch, or on a CPU, the library computes it. A launch with splits needs a workspace that no
    other stream uses meanwhile; without one it allocates its own.
    """
    _check(x_RD, weight_ED, bias_E)
    if launch is None or not _takes(x_RD):
        return _library(x_RD, weight_ED, bias_E, out_RE)
    from idlm.kernels.linear.launch import run

    values_ED, scale_E = _parts(weight_ED)
    out_RE = x_RD.new_empty(len(x_RD), len(values_ED)) if out_RE is None else out_RE
    return run(
        x_RD,
        values_ED,
        out_RE,
        launch=launch,
        scale_E=scale_E,
        bias_E=bias_E,
        workspace=workspace,
    )


def linear_swiglu(
    x_RD: Tensor,
    weight_ED: Tensor | Fp8Weight,
    *,
    bias_E: Tensor | None = None,
    lora: GatedLora | None = None,
    launch: Launch | None = None,
    workspace: Workspace | None = None,
    out_RF: Tensor | None = None,
) -> Tensor:
    """silu(gate) * up, [R, F]. Rows 0..F of the weight belong to gate, F..2F to up; with `lora` the rows of
    its A follow (zeros in the bias), which needs a launch for which `adds_lora` holds.

    Rounded as torch rounds the separate ops: both products, the silu, the result.
    """
    _check(x_RD, weight_ED, bias_E)
    assert lora is None or launch is not None, "without a launch the adapter has a kernel of its own"
    width = (len(weight_ED) - (0 if lora is None else lora.num_ranks)) // 2
    if launch is None or not _takes(x_RD):
        gate_RF, up_RF = _library(x_RD, weight_ED, bias_E, None).chunk(2, dim=-1)
        result_RF = F.silu(gate_RF) * up_RF
        return result_RF if out_RF is None else out_RF.copy_(result_RF)
    from idlm.kernels.linear.launch import run

    values_ED, scale_E = _parts(weight_ED)
    out_RF = x_RD.new_empty(len(x_RD), width) if out_RF is None else out_RF
    return run(
        x_RD,
        values_ED,
        out_RF,
        launch=launch,
        scale_E=scale_E,
        bias_E=bias_E,
        gated=True,
        lora=lora,
        workspace=workspace,
    )


def _library(
    x_RD: Tensor,
    weight_ED: Tensor | Fp8Weight,
    bias_E: Tensor | None,
    out_RE: Tensor | None,
) -> Tensor:
    if isinstance(weight_ED, Fp8Weight):
        y_RE = weight_ED.linear(x_RD, bias_E)
    else:
        y_RE = F.linear(x_RD, weight_ED, bias_E)
    return y_RE if out_RE is None else out_RE.copy_(y_RE)


def _parts(weight_ED: Tensor | Fp8Weight) -> tuple[Tensor, Tensor | None]:
    if isinstance(weight_ED, Fp8Weight):
        return weight_ED.values_ED, weight_ED.scale_E
    return weight_ED, None


def _takes(x_RD: Tensor) -> bool:
    """Whether our kernel computes this dtype on this device."""
    return runs_kernels(x_RD) and x_RD.dtype in DTYPES


def _check(x_RD: Tensor, weight_ED: Tensor | Fp8Weight, bias_E: Tensor | None) -> None:
    values_ED, _ = _parts(weight_ED)
    assert x_RD.shape[1] == values_ED.shape[1], f"{x_RD.shape=} {values_ED.shape=}"
    assert x_RD.stride(1) == 1 and values_ED.stride(1) == 1, f"{x_RD.stride()=} {values_ED.stride()=}"
    assert bias_E is None or bias_E.shape == values_ED.shape[:1], f"{bias_E=}"
