"""Linear layers: our kernel where it is faster than the library, or always if deterministic; the library
elsewhere. Contract in README.md.

R rows, D input width, E output width, F half of it for a SwiGLU, X ranks of an adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from idlm.kernels.backend import computes, has_pdl, library_linear, one_thread
from idlm.kernels.gated_lora import GatedLora, add_low_rank, expand_add, expand_swiglu
from idlm.kernels.linear.fp8 import Fp8Weight
from idlm.kernels.swiglu import swiglu

if TYPE_CHECKING:
    from idlm.kernels.linear.launch import LinearLaunch, Workspace

WORKSPACE_FLOATS = 1 << 23
WORKSPACE_TILES = 1 << 14
Weight = Tensor | Fp8Weight


class Linears:
    """Linear layers of one stream, whose split products share a workspace. `deterministic`: the bits of a row
    do not depend on the number of rows (needs a GPU)."""

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self._workspace: Workspace | None = None

    def linear(
        self, x_RD: Tensor, weight_ED: Weight, *, bias_E: Tensor | None = None, lora: GatedLora | None = None
    ) -> Tensor:
        """x W^T (+ bias), [R, E]. `lora`, whose A are its own or the last rows of the weight, is added to
        MASK rows and changes no bit of the others."""
        launch = self._launch(x_RD, weight_ED, lora, gated=False) if computes(x_RD) else None
        y_RE = linear(x_RD, weight_ED, bias_E=bias_E, launch=launch, workspace=self._workspace)
        if lora is None or lora.a_XD is not None:
            return y_RE if lora is None else add_low_rank(y_RE, x_RD, lora)
        y_RE, h_RX = y_RE[:, : -lora.num_ranks], y_RE[:, -lora.num_ranks :]
        return expand_add(y_RE, lora.gate, h_RX, lora.b_Er, sizes=lora.sizes, scaling=lora.scaling)

    def swiglu(
        self, x_RD: Tensor, weight_ED: Weight, *, bias_E: Tensor | None = None, lora: GatedLora | None = None
    ) -> Tensor:
        """silu(gate) * up, [R, F], of the stacked gate and up projections; `lora` as in `linear`."""
        if lora is not None and lora.a_XD is not None:
            return swiglu(self.linear(x_RD, weight_ED, bias_E=bias_E, lora=lora))
        launch = self._launch(x_RD, weight_ED, lora, gated=True) if computes(x_RD) else None
        if lora is None or self._adds(launch, weight_ED, lora):
            return linear_swiglu(
                x_RD, weight_ED, bias_E=bias_E, lora=lora, launch=launch, workspace=self._workspace
            )
        # The product of gate, up and A, then adapter and SwiGLU in a second kernel. In deterministic mode it
        # has the splits of a SwiGLU without adapter, so that rows that are not MASK have the same bits.
        product = self._launch(x_RD, weight_ED, lora, gated=False) if computes(x_RD) else None
        if self.deterministic and product is not None and launch is not None:
            product = replace(product, splits=launch.splits)
        y_RE = linear(x_RD, weight_ED, bias_E=bias_E, launch=product, workspace=self._workspace)
        y_RE, h_RX = y_RE[:, : -lora.num_ranks], y_RE[:, -lora.num_ranks :]
        return expand_swiglu(y_RE, lora.gate, h_RX, lora.b_Er, scaling=lora.scaling)

    def _adds(self, launch: LinearLaunch | None, weight_ED: Weight, lora: GatedLora) -> bool:
        """Whether the SwiGLU's own kernel adds the adapter's part."""
        if not isinstance(lora.gate, Tensor):
            return False
        if launch is None or self.deterministic or isinstance(weight_ED, Fp8Weight):
            return False
        from idlm.kernels.linear.launch import adds_lora

        return adds_lora(launch, len(lora.gate), lora.sizes[0], rank=lora.b_Er.shape[1])

    def _launch(
        self, x_RD: Tensor, weight_ED: Weight, lora: GatedLora | None, *, gated: bool
    ) -> LinearLaunch | None:
        from idlm.kernels.linear.launch import few_rows_launch, fixed_launch, make_workspace, with_pdl

        if self._workspace is None:
            self._workspace = make_workspace(
                x_RD.device, num_floats=WORKSPACE_FLOATS, num_tiles=WORKSPACE_TILES
            )
        shape = len(x_RD), _num_outputs(weight_ED, lora, gated), x_RD.shape[1], x_RD.dtype
        launch: LinearLaunch | None
        if self.deterministic:
            launch = fixed_launch(*shape, gated=gated)
        else:
            launch = few_rows_launch(*shape, gated=gated, is_fp8=isinstance(weight_ED, Fp8Weight))
        return None if launch is None else with_pdl(launch, has_pdl(x_RD.device))


def linear(
    x_RD: Tensor,
    weight_ED: Weight,
    *,
    bias_E: Tensor | None = None,
    launch: LinearLaunch | None = None,
    workspace: Workspace | None = None,
    out_RE: Tensor | None = None,
) -> Tensor:
    """x W^T (+ bias), rounded: [R, E] in the dtype of `x_RD`.

    Without a launch, or on a CPU, the library computes it. A launch with splits needs a workspace that no
    other stream uses meanwhile; without one it allocates its own."""
    assert x_RD.shape[1] == weight_ED.shape[1] and x_RD.stride(1) == 1, f"{x_RD.shape=} {weight_ED.shape=}"
    if launch is not None and computes(x_RD):
        from idlm.kernels.linear.launch import run

        if out_RE is None:
            out_RE = x_RD.new_empty(len(x_RD), len(weight_ED))
        return run(x_RD, weight_ED, out_RE, launch=launch, bias_E=bias_E, workspace=workspace)
    if isinstance(weight_ED, Fp8Weight):
        y_RE = weight_ED.linear(x_RD, bias_E)
    else:
        return library_linear(x_RD, weight_ED, bias_E=bias_E, out_RE=out_RE, of_model=True)
    return y_RE if out_RE is None else out_RE.copy_(y_RE)


def linear_swiglu(
    x_RD: Tensor,
    weight_ED: Weight,
    *,
    bias_E: Tensor | None = None,
    lora: GatedLora | None = None,
    launch: LinearLaunch | None = None,
    workspace: Workspace | None = None,
    out_RF: Tensor | None = None,
) -> Tensor:
    """silu(gate) * up, [R, F]. Rows 0..F of the weight belong to gate, F..2F to up; with `lora` the rows of
    its A follow (zeros in the bias), which needs a launch for which `adds_lora` holds.

    Rounded as torch rounds the separate ops: both products, the silu, the result."""
    assert lora is None or launch is not None, "without a launch the adapter has a kernel of its own"
    if launch is not None and computes(x_RD):
        from idlm.kernels.linear.launch import run

        if out_RF is None:
            out_RF = x_RD.new_empty(len(x_RD), _num_outputs(weight_ED, lora, True))
        options: dict[str, Any] = {"bias_E": bias_E, "lora": lora, "workspace": workspace}
        return run(x_RD, weight_ED, out_RF, launch=launch, gated=True, **options)
    result_RF = swiglu(linear(x_RD, weight_ED, bias_E=bias_E))
    return result_RF if out_RF is None else out_RF.copy_(result_RF)


def _num_outputs(weight_ED: Weight, lora: GatedLora | None, gated: bool) -> int:
    """Number of columns of the result."""
    height = len(weight_ED) - (0 if lora is None else lora.num_ranks)
    return height // 2 if gated else height


def check_rows_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fixed launches (on a CPU the library) give a row the same bits at every number of rows.

    Deterministic mode relies on it; run it once at engine start. Waits for the device."""
    E, D, generator = 256, 2048, torch.Generator().manual_seed(0)
    x_RD, weight_ED = (torch.randn(n, D, generator=generator).to(device, dtype) for n in (300, E))

    def product(num_rows: int) -> Tensor:
        launch = None
        if computes(x_RD):
            from idlm.kernels.linear.launch import fixed_launch

            launch = fixed_launch(num_rows, E, D, dtype)
        return linear(x_RD[:num_rows], weight_ED, launch=launch)

    def agrees(num_rows: int) -> bool:
        return torch.equal(product(num_rows), whole_RE[:num_rows])

    whole_RE, few = product(300), (1, 2, 3, 5, 7)
    # As rows of adapters on a CPU.
    with one_thread(is_few=not computes(x_RD)):
        is_same = all(map(agrees, few))
    return is_same and all(map(agrees, (*few, 16, 17, 40, 64, 100, 128, 129)))
