"""DeepSpeed's ZeRO-2 with the same gradients and norms, for fewer bytes, launches and waits; ZeRO-1 too, as
far as its optimizer has the same ways.

`shorten` replaces methods of one optimizer, read in DeepSpeed 0.19.8. An optimizer that lacks what they use
has its own: another version, ZeRO-3, offloaded states, float32 weights. For P weights of a rank's partition:

    sums      a reduced bfloat16 slice is added to the fp32 sums without a converted copy: 10 P bytes per
              micro-batch, not 18 P.
    norm      one pass over the flat sums, 4 P bytes. DeepSpeed copies each gradient to float64, 20 P bytes.
    overflow  the norm shows what is not finite: two passes less, of 8 P bytes and a dozen kernels per weight.
    clipping  is left out where it multiplies by 1, 8 P bytes.
    reduction of a micro-batch's last bucket overlaps the next forward pass, and the host does not wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NORM_PART = 2**30
"""Elements of one call: kernels of `torch._foreach_norm` count in 32 bits."""


def shorten(optimizer: Any) -> None:
    """Replace methods of DeepSpeed's `optimizer` where it sums bfloat16 gradients in fp32."""
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage_1_and_2

    if type(optimizer) is bf16_optimizer.BF16_Optimizer:
        _shorten_whole_sums(optimizer)
        return
    if type(optimizer) is not stage_1_and_2.DeepSpeedZeroOptimizer or optimizer.cpu_offload:
        return
    is_compact = getattr(optimizer, "_use_compact_grad_partition_buffer", lambda group: False)
    if not optimizer.partition_gradients or not all(map(is_compact, range(len(optimizer.bit16_groups)))):
        return
    # It formats texts that are not printed, three times per weight and micro-batch.
    optimizer.report_ipg_memory_usage = lambda *args, **kwargs: None
    optimizer._add_to_grad_partition_buffer = add_reduced
    if optimizer.model_parallel_group is None:
        _shorten_norm(optimizer)
    # Only with this name `step` skips the weights' change for a norm that is not finite.
    if getattr(optimizer, "compute_grad_norm", False) and hasattr(stage_1_and_2, "is_invalid_grad_norm"):
        optimizer.check_overflow = lambda *args, **kwargs: None
    _shorten_clipping(optimizer)
    if optimizer.overlap_comm and optimizer.contiguous_gradients and optimizer.reduction_stream is not None:
        _shorten_epilogue(optimizer)


def add_reduced(output: Tensor | None, source: Tensor) -> None:
    """Add `source` (bfloat16) to the slice `output` (float32) of this rank's sums, in float32."""
    if output is not None:
        output.add_(source)


def _shorten_whole_sums(optimizer: Any) -> None:
    """ZeRO-1, each of whose ranks has the sums of all weights: norm and clipping take the flat sums of a
    group at once, and gradients are added without a converted copy."""
    is_plain = not (optimizer.has_moe_layers or getattr(optimizer, "autoep_folding_tp_group", None))
    if not is_plain or optimizer.mpu is not None or not hasattr(optimizer, "fp32_groups_gradients_flat"):
        return
    own = optimizer.get_grads_for_norm

    def update(param: Any, group: int, index: int, clear_lp_grads: bool) -> None:
        if param.grad is None:
            return
        sums = optimizer.fp32_groups_gradients[group][index]
        sums.data.add_(param.grad.data.view(sums.shape))
        param._hp_grad = sums
        optimizer.fp32_groups_has_gradients[group][index] = True
        if clear_lp_grads:
            param.grad.zero_()

    def sums_of_groups(for_clipping: bool = False) -> Any:
        if not any(map(any, optimizer.fp32_groups_has_gradients)):
            return own(for_clipping)
        # Sums without a gradient and the padding of a group are zero.
        sums = [part for flat in optimizer.fp32_groups_gradients_flat for part in flat.split(NORM_PART)]
        return sums if for_clipping else (sums, {})

    optimizer._update_hp_grad, optimizer.get_grads_for_norm = update, sums_of_groups


def _shorten_norm(optimizer: Any) -> None:
    own = optimizer.get_grad_norm_direct

    def norm(gradients: Any, params: Any, norm_type: float = 2) -> Tensor:
        flat = getattr(gradients, "flat_partition", None)
        if flat is not None and norm_type == 2:
            # Padding between and after the gradients is zero.
            parts = torch._foreach_norm(flat.split(NORM_PART), 2, dtype=torch.float64)
            gradients, params = [torch.stack(parts)], params[:1]
        result: Tensor = own(gradients, params, norm_type)
        return result

    optimizer.get_grad_norm_direct = norm


def _shorten_clipping(optimizer: Any) -> None:
    own = optimizer.unscale_and_clip_grads

    def clip(gradients: list[Tensor], total_norm: Tensor | None) -> None:
        # The host has read the norm before, to refuse one that is not finite. The sum is DeepSpeed's.
        norm = -1.0 if total_norm is None or optimizer.loss_scale != 1 else float(total_norm)
        if norm < 0 or norm + 1e-6 > optimizer.clip_grad:
            own(gradients, total_norm)

    optimizer.unscale_and_clip_grads = clip


def _shorten_epilogue(optimizer: Any) -> None:
    """DeepSpeed ends each backward pass with a wait of the host for the device. The streams' order is enough:
    the optimizer waits for the sums, and buckets stay until they are reduced. The next backward pass waits at
    its start: whatever it runs on other streams, as compiled layers may, comes later."""
    own, own_enter = optimizer.independent_gradient_partition_epilogue, optimizer.enter_backward
    held: list[Tensor] = []

    def wait() -> None:
        torch.cuda.current_stream().wait_stream(optimizer.reduction_stream)
        held.clear()

    def epilogue() -> None:
        optimizer.reduce_ipg_grads()
        held.extend(buffer for bucket in optimizer.ipg_buckets.values() for buffer in bucket.buffer)
        if optimizer.is_gradient_accumulation_boundary():
            wait()
        # With it the host waits; nothing is left to reduce.
        optimizer.overlap_comm = False
        try:
            own()
        finally:
            optimizer.overlap_comm = True

    def enter_backward() -> None:
        if held:
            wait()
        own_enter()

    optimizer.independent_gradient_partition_epilogue, optimizer.enter_backward = epilogue, enter_backward
