"""Where the time of a pass of blocks goes, beside what FLOPs and bytes say it should be.

R rows laid out, X rows whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.engine.block_harness import BlockSeats
from benchmarks.engine.decoding.harness import slot_bytes, weights_of
from benchmarks.kernels.kernel_profile import KernelTime, kernel_times
from idlm.infer.models.loader import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs of one pass. `row_flops`, `head_flops`: of the linears, per row and per row with logits."""

    row_flops: float
    head_flops: float
    attention_flops: float
    kv_bytes: float

    def linears(self, num_rows: float, num_head_rows: float) -> float:
        """Of all linears."""
        return self.row_flops * num_rows + self.head_flops * num_head_rows


def work_of(model: LoadedModel, *, num_sequences: int, rows: float, slots: float) -> Work:
    """Of a pass over `rows` rows that see `slots` slots each."""
    *weights, head = weights_of(model)
    spec = model.local
    return Work(
        row_flops=2.0 * sum(weight.numel() for weight in weights),
        head_flops=2.0 * head.numel(),
        attention_flops=4.0 * spec.num_layers * spec.num_heads * spec.head_dim * rows * slots,
        kv_bytes=float(num_sequences * slots * slot_bytes(model)),
    )


def expected_ms(
    model: LoadedModel, active: Work, *, num_rows: int, num_head_rows: int, stream: float, rate: float
) -> dict[str, float]:
    """Per kind of kernel, at the measured rates, by arithmetic or bytes, whichever takes longer. `num_rows`:
    laid out, padding included, which linears and small kernels compute and attention does not.
    """
    spec, item = model.local, model.dtype.itemsize
    row_bytes = {
        # Two norms a layer: input, residual in and out, output.
        "norms": 8 * spec.width * spec.num_layers,
        "rope": 2 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * spec.num_layers,
        "swiglu": 3 * spec.ffn_width * spec.num_layers,
    }
    weight_bytes = sum(weight.numel() for weight in weights_of(model)) * item
    flops = active.linears(num_rows, num_head_rows)
    return {
        "linears": 1e3 * max(flops / rate, weight_bytes / stream),
        "attention": 1e3 * max(active.attention_flops / rate, active.kv_bytes / stream),
        **{name: 1e3 * num_rows * size * item / stream for name, size in row_bytes.items()},
        "sampling": 1e3 * num_head_rows * spec.vocab_size * item / stream,
    }


def profiled(seats: BlockSeats, num_passes: int) -> list[KernelTime]:
    """Kernels of so many passes in steady decoding."""
    with seats._toggles():
        seats.settle()
        times = kernel_times(seats, num_passes)
        seats.leave()
    return times
