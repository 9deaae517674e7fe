"""Linear layers of a model: our kernel if it is faster than the library, or always if deterministic.

R rows, D input width, E output width, F half of it for a SwiGLU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from idlm.kernels.backend import has_pdl, runs_kernels
from idlm.kernels.gated_lora import GatedLora, expand_add, expand_swiglu
from idlm.kernels.linear import op
from idlm.kernels.linear.fp8 import Fp8Weight
from idlm.kernels.swiglu import swiglu

if TYPE_CHECKING:
    from idlm.kernels.linear.launch import Launch, Workspace

Weight = Tensor | Fp8Weight
WORKSPACE_FLOATS = 1 << 23
WORKSPACE_TILES = 1 << 14


class Linears:
    """Linear layers of one stream, whose split products share a workspace. `deterministic`: the bits of a row
    do not depend on the number of rows (needs a GPU).
    """

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self._workspace: Workspace | None = None

    def linear(
        self,
        x_RD: Tensor,
        weight_ED: Weight,
        *,
        bias_E: Tensor | None = None,
        lora: GatedLora | None = None,
    ) -> Tensor:
        """x W^T (+ bias), [R, E]. `lora`, whose A are the last rows of the weight, is added to MASK rows and
        changes no bit of the others.
        """
        launch = self._launch(x_RD, weight_ED, _num_outputs(weight_ED, lora), gated=False)
        y_RE = op.linear(x_RD, weight_ED, bias_E=bias_E, launch=launch, workspace=self._workspace)
        if lora is None:
            return y_RE
        y_RE, h_RX = _apart(y_RE, lora)
        return expand_add(y_RE, lora.is_mask_R, h_RX, lora.b_Er, sizes=lora.sizes, scaling=lora.scaling)

    def swiglu(
        self,
        x_RD: Tensor,
        weight_ED: Weight,
        *,
        bias_E: Tensor | None = None,
        lora: GatedLora | None = None,
    ) -> Tensor:
        """silu(gate) * up, [R, F], of the stacked gate and up projections; `lora` as in `linear`."""
        width = _num_outputs(weight_ED, lora) // 2
        launch = self._launch(x_RD, weight_ED, width, gated=True)
        if lora is not None and not self._adds(launch, weight_ED, lora):
            return self._swiglu_behind(x_RD, weight_ED, bias_E, lora, launch)
        if launch is None:
            return swiglu(op.linear(x_RD, weight_ED, bias_E=bias_E))
        return op.linear_swiglu(
            x_RD, weight_ED, bias_E=bias_E, lora=lora, launch=launch, workspace=self._workspace
        )

    def _adds(self, launch: Launch | None, weight_ED: Weight, lora: GatedLora) -> bool:
        """Whether the SwiGLU's own kernel adds the adapter's part."""
        if launch is None or self.deterministic or isinstance(weight_ED, Fp8Weight):
            return False
        from idlm.kernels.linear.launch import adds_lora

        return adds_lora(launch, len(lora.is_mask_R), lora.sizes[0], rank=lora.b_Er.shape[1])

    def _swiglu_behind(
        self,
        x_RD: Tensor,
        weight_ED: Weight,
        bias_E: Tensor | None,
        lora: GatedLora,
        gated: Launch | None,
    ) -> Tensor:
        """The product of gate, up and A, then adapter and SwiGLU in a second kernel. `gated`: the launch
        without `lora`, whose splits are kept in deterministic mode so that rows without adapter have the same
        bits.
        """
        launch = self._launch(x_RD, weight_ED, _num_outputs(weight_ED, lora), gated=False)
        if self.deterministic and launch is not None and gated is not None:
            launch = replace(launch, splits=gated.splits)
        both_RE = op.linear(x_RD, weight_ED, bias_E=bias_E, launch=launch, workspace=self._workspace)
        y_RE, h_RX = _apart(both_RE, lora)
        return expand_swiglu(y_RE, lora.is_mask_R, h_RX, lora.b_Er, scaling=lora.scaling)

    def _launch(self, x_RD: Tensor, weight_ED: Weight, num_outputs: int, *, gated: bool) -> Launch | None:
        if not runs_kernels(x_RD) or x_RD.dtype not in op.DTYPES:
            return None
        from idlm.kernels.linear.launch import few_rows_launch, fixed_launch, make_workspace, with_pdl

        if self._workspace is None:
            self._workspace = make_workspace(
                x_RD.device, num_floats=WORKSPACE_FLOATS, num_tiles=WORKSPACE_TILES
            )
        shape = len(x_RD), num_outputs, x_RD.shape[1], x_RD.dtype
        launch: Launch | None
        if self.deterministic:
            launch = fixed_launch(*shape, gated=gated)
        else:
            launch = few_rows_launch(*shape, gated=gated, is_fp8=isinstance(weight_ED, Fp8Weight))
        return None if launch is None else with_pdl(launch, has_pdl(x_RD.device))


def _num_outputs(weight_ED: Weight, lora: GatedLora | None) -> int:
    return len(weight_ED) - (0 if lora is None else lora.num_ranks)


def _apart(both_RE: Tensor, lora: GatedLora) -> tuple[Tensor, Tensor]:
    """The projection's own outputs, and A x."""
    return both_RE[:, : -lora.num_ranks], both_RE[:, -lora.num_ranks :]


def check_rows_agree(device: torch.device, dtype: torch.dtype, *, E: int = 256, D: int = 2048) -> bool:
    """Whether the fixed launches give a row the same bits at every number of rows on this device.

    Deterministic mode relies on it; run it once at engine start. Waits for the device.
    """
    from idlm.kernels.linear.launch import fixed_launch

    generator = torch.Generator().manual_seed(0)
    x_RD, weight_ED = (torch.randn(n, D, generator=generator).to(device, dtype) for n in (300, E))
    rows_of = (1, 7, 16, 17, 40, 64, 100, 128, 129, 300)
    results = [op.linear(x_RD[:n], weight_ED, launch=fixed_launch(n, E, D, dtype)) for n in rows_of]
    return all(torch.equal(result, results[-1][: len(result)]) for result in results)
