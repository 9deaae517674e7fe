"""Kernel times of a pass of blocks, next to the times that FLOPs and bytes predict.

R rows laid out, X rows whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.engine.block_harness import SteadyBlocks
from benchmarks.engine.decoding.harness import slot_bytes, weights_of
from benchmarks.engine.kernel_profile import KernelTime, kernel_times
from idlm.infer.models.loader import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """FLOPs and bytes of one pass. `row_flops`, `head_flops`: linears, per row and per row with logits."""

    row_flops: float
    head_flops: float
    attention_flops: float
    kv_bytes: float

    def linears(self, num_rows: float, num_head_rows: float) -> float:
        """FLOPs of all linears."""
        return self.row_flops * num_rows + self.head_flops * num_head_rows


def pass_cost(model: LoadedModel, *, num_sequences: int, rows: float, slots: float) -> PassCost:
    """Cost of a pass over `rows` rows that see `slots` slots each."""
    *weights, head = weights_of(model)
    spec = model.local
    return PassCost(
        row_flops=2.0 * sum(weight.numel() for weight in weights),
        head_flops=2.0 * head.numel(),
        attention_flops=4.0 * spec.num_layers * spec.num_heads * spec.head_dim * rows * slots,
        kv_bytes=float(num_sequences * slots * slot_bytes(model)),
    )


def expected_ms(
    model: LoadedModel, cost: PassCost, *, num_rows: int, num_head_rows: int, stream: float, rate: float
) -> dict[str, float]:
    """Expected ms per kind of kernel at the measured rates: arithmetic or bytes, whichever takes longer.
    `num_rows` includes padding, which linears and small kernels compute and attention does not.
    """
    spec, item = model.local, model.dtype.itemsize
    row_bytes = {
        # Two norms a layer: input, residual in and out, output.
        "norms": 8 * spec.width * spec.num_layers,
        "rope": 2 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * spec.num_layers,
        "swiglu": 3 * spec.ffn_width * spec.num_layers,
    }
    weight_bytes = sum(weight.numel() for weight in weights_of(model)) * item
    flops = cost.linears(num_rows, num_head_rows)
    return {
        "linears": 1e3 * max(flops / rate, weight_bytes / stream),
        "attention": 1e3 * max(cost.attention_flops / rate, cost.kv_bytes / stream),
        **{name: 1e3 * num_rows * size * item / stream for name, size in row_bytes.items()},
        "sampling": 1e3 * num_head_rows * spec.vocab_size * item / stream,
    }


def profile_passes(steady: SteadyBlocks, num_passes: int) -> list[KernelTime]:
    """Kernel times of `num_passes` passes in steady decoding."""
    with steady.toggled():
        steady.start_and_warm_up()
        times = kernel_times(steady, num_passes)
        steady.abort_all()
    return times
