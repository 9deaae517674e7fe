"""Random checks of the trunk's ops against fp64, with NaN in all memory that must not be read.

Run in the interpreter by interpreted_trunk.py (fp32, fp16) and on a GPU by
tests/gpu/kernels/test_trunk_gpu.py. R rows, D width, E output width, F ffn, N query heads, K KV heads, H head
dim, S slots, r rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from idlm.kernels.backend import has_pdl, library_linear, runs_kernels
from idlm.kernels.gated_lora import GatedLora, expand_add, expand_swiglu, group_rows
from idlm.kernels.linear import Fp8Weight, Linears, dequantised, linear, linear_swiglu, quantise_fp8
from idlm.kernels.linear.launch import LinearLaunch, make_workspace, workspace_size
from idlm.kernels.qkv_rope_cache import make_rope, qkv_rope_cache
from idlm.kernels.qkv_rope_cache.op import plain_qkv_rope_cache, rope_tables
from idlm.kernels.rms_norm import add_rms_norm
from idlm.kernels.swiglu import swiglu
from tests.kernels.references.trunk import (
    add_rms_norm_reference,
    gated_lora_reference,
    linear_reference,
    linear_swiglu_reference,
    qkv_rope_cache_reference,
    swiglu_reference,
)

NAN = float("nan")
SLACK = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 2e-6}
"""One rounding of the result in its own dtype, relative to the norm."""


VARIANTS = (
    (64, 16, 128, False, False, False),
    (64, 16, 128, False, True, False),
    (64, 8, 64, False, False, True),
    (128, 32, 64, False, False, True),
    (64, 64, 64, True, True, True),
    (128, 64, 128, True, False, False),
    (64, 32, 64, True, False, True),
    (128, 16, 64, False, True, True),
    (64, 32, 128, False, False, False),
    (64, 32, 64, False, True, False),
)
"""Linears: outputs, rows and columns of a tile, serial, gated, with a bias."""

LORA_VARIANTS = (
    (64, 128, 64, 128, False),
    (64, 64, 128, 128, True),
    (128, 64, 256, 24, False),
    (64, 64, 64, 16, True),
)
"""SwiGLUs with an adapter: outputs and columns of a tile, outputs of a part, rank, with a bias."""


class Draw:
    """Random sizes and tensors of one case. Rows with NaN are multiplied by `library_linear` alone."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype, *, largest: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype, self.largest = device, dtype, largest
        self.num_rows = self.random.choice([1, 2, 7, 16, 17, 33, 70, 130, 300][: 9 if largest > 100 else 5])

    def size(self, *sizes: int) -> int:
        return self.random.choice([size for size in sizes if size <= self.largest])

    def flag(self) -> bool:
        return self.random.random() < 0.5

    def tensor(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=self.generator)).to(self.device, self.dtype)

    def weight(self, num_outputs: int, width: int) -> Tensor:
        """Rows that may have gaps and an odd address."""
        memory = self.tensor(num_outputs, width + 3, scale=width**-0.5)
        return memory[:, 1 : 1 + width] if self.random.random() < 0.2 else memory[:, :width].contiguous()

    def launched_early(self) -> dict[str, int | bool]:
        """Whether a kernel may start before the previous one has ended, and its prefetch."""
        pdl = has_pdl(torch.device(self.device))
        return {"pdl": pdl, "ahead": self.random.choice([0, 32, 128, 256]) if pdl else 0}

    def poisoned(self, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
        """(rows, the memory around them, which is NaN); some rows are NaN as well."""
        memory = torch.full((num_rows + 2, width + 16), NAN, device=self.device, dtype=self.dtype)
        rows = memory[1:-1, :width]
        rows.copy_(self.tensor(num_rows, width))
        return rows, memory


def assert_close(found: Tensor, plain: Tensor, true: Tensor, what: str) -> None:
    """At most twice the error of plain torch in the same dtype."""
    size = true.norm().clamp_min(1e-12)
    ours, theirs = (float((one.double() - true).norm() / size) for one in (found, plain))
    assert ours <= 2 * theirs + SLACK[found.dtype], f"{what} {ours=:.3g} {theirs=:.3g}"


def check_rms_norm(draw: Draw) -> None:
    rows, width = draw.num_rows, draw.size(16, 96, 100, 896, 4096)
    x, _ = draw.poisoned(rows, width)
    residual, memory = draw.poisoned(rows, width)
    weight = draw.tensor(width)
    weight = weight.float() if draw.flag() else weight
    poisoned = rows // 2 if rows > 1 else -1
    if rows > 1:
        x[poisoned] = NAN
    kept = torch.arange(rows, device=draw.device) != poisoned
    adds, num = draw.flag(), 4 if draw.flag() else 1
    before = residual.clone() if adds else None
    true, true_sum = add_rms_norm_reference(x.double(), before, weight, eps=1e-6, groups=num)
    plain_sum = x if before is None else x + before
    plain = F.rms_norm(plain_sum.float().unflatten(1, (num, -1)), (width // num,), eps=1e-6).flatten(1)
    plain = (plain.to(weight.dtype) * weight).to(draw.dtype)
    normed, total = add_rms_norm(x, residual if adds else None, weight, eps=1e-6, groups=num)
    assert total.data_ptr() == (residual if adds else x).data_ptr()
    assert torch.equal(total[kept], plain_sum[kept])
    assert_close(normed[kept], plain[kept], true[kept], f"rms_norm {rows=} {width=}")
    assert true_sum.shape == total.shape
    assert memory[0].isnan().all() and memory[:, width:].isnan().all()
    alone = add_rms_norm(x[:1], before[:1] if adds else None, weight, eps=1e-6, groups=num)[0]
    assert torch.equal(alone, normed[:1])


def check_swiglu(draw: Draw) -> None:
    rows, width = draw.num_rows, draw.size(16, 96, 200, 1100, 12288)
    gate_up, _ = draw.poisoned(rows, 2 * width)
    gate_up[-1, 0] = NAN
    found = swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    true = swiglu_reference(gate_up.double())
    assert found[-1, 0].isnan()
    found, plain, true = (one.nan_to_num() for one in (found, F.silu(gate) * up, true))
    assert_close(found, plain, true, f"swiglu {rows=} {width=}")
    assert torch.equal(swiglu(gate_up[:1]).nan_to_num(), found[:1])


def check_qkv_rope_cache(draw: Draw) -> None:
    # What a kernel is compiled for varies together: a GPU would spend its time on compiling otherwise.
    heads, kv_heads, per_program, norm_dtype = draw.random.choice(
        [(4, 2, 4, draw.dtype), (14, 2, 4, None), (3, 1, 1, None), (1, 1, 1, torch.float32)]
    )
    head_dim, rows = draw.size(16, 32, 64, 96, 128), draw.num_rows
    fused = heads + 2 * kv_heads
    qkv = draw.tensor(rows, fused, head_dim)
    num_slots = rows + 3
    slots = torch.randperm(num_slots, generator=draw.generator)[:rows]
    slots[torch.rand(rows, generator=draw.generator) < 0.3] = -1
    qkv[-1], slots[-1] = NAN, -1
    slots = slots.to(draw.device)
    positions = torch.randint(0, 40_000, (rows,), generator=draw.generator).to(draw.device)
    inv_freq = (10_000.0 ** -(torch.arange(head_dim // 2) * 2 / head_dim)).to(draw.device)
    inv_freq[-1] = 0
    scaling = draw.random.choice([1.0, 1.2])
    weights = None if norm_dtype is None else draw.tensor(heads + kv_heads, head_dim).to(norm_dtype)
    options = {"slot_mapping_R": slots, "qk_norm_YH": weights}
    shape = (num_slots, kv_heads, head_dim)
    caches = [torch.full(shape, NAN, device=draw.device, dtype=draw.dtype) for _ in range(2)]
    exact = [torch.full(shape, NAN, device=draw.device, dtype=torch.float64) for _ in range(2)]
    true = qkv_rope_cache_reference(
        qkv.double(), *exact, positions_R=positions, inv_freq_h=inv_freq, rope_scaling=scaling, **options
    )
    plain = [torch.full(shape, NAN, device=draw.device, dtype=draw.dtype) for _ in range(2)]
    tables = rope_tables(positions, inv_freq, scaling=scaling, dtype=draw.dtype)
    norm = None if weights is None else (weights, 1e-6)
    plain_q = plain_qkv_rope_cache(qkv.clone(), *plain, tables, slots, norm, (None, None))
    before = qkv.clone()
    rope = make_rope(positions, inv_freq, scaling=scaling, dtype=draw.dtype)
    q = qkv_rope_cache(qkv, *caches, rope=rope, heads_per_program=per_program, **options)
    assert q.data_ptr() == qkv.data_ptr()
    assert torch.equal(qkv[:, heads:].nan_to_num(), before[:, heads:].nan_to_num())
    for name, found, rounded, exactly in zip(
        ("q", "k", "v"), (q[:-1], *caches), (plain_q[:-1], *plain), (true[:-1], *exact), strict=True
    ):
        assert torch.equal(found.isnan(), exactly.isnan()), name
        what = f"{name} {rows=} {heads=} {head_dim=}"
        assert_close(found.nan_to_num(), rounded.nan_to_num(), exactly.nan_to_num(), what)


def check_gated_lora(draw: Draw) -> None:
    sizes = draw.random.choice([(48,), (40, 24), (96, 16, 16), (130, 70)])
    rank, width, rows = draw.size(4, 16, 24, 128), draw.size(96, 100, 1100), draw.num_rows
    x, _ = draw.poisoned(rows, width)
    y, memory = draw.poisoned(rows, sum(sizes))
    a, b = draw.tensor(len(sizes) * rank, width, scale=width**-0.5), draw.tensor(sum(sizes), rank)
    is_mask = (torch.rand(rows, generator=draw.generator) < 0.4).to(draw.device)
    x[~is_mask] = NAN
    before = y.clone()
    parts = a.view(len(sizes), rank, width)
    true = gated_lora_reference(before.double(), x, is_mask, parts, b, sizes=sizes, scaling=1.7)
    hidden = library_linear(x, a).split(rank, dim=1)
    gain = torch.cat([library_linear(h, w) for h, w in zip(hidden, b.split(sizes), strict=True)], dim=1) * 1.7
    # As after a projection whose last outputs they are; other rows may hold anything.
    h = torch.full((rows, 7 + len(a)), NAN, device=draw.device, dtype=draw.dtype)[:, 7:]
    h[is_mask] = library_linear(x[is_mask], a)
    pair = (sum(sizes) // 2,) * 2
    if len(sizes) == 2 and sum(sizes) % 2 == 0:
        gated = expand_swiglu(y, is_mask, h, b, scaling=1.7)
        separate = expand_add(before.clone(), is_mask, h, b, sizes=pair, scaling=1.7)
        assert torch.equal(gated, swiglu(separate))
    found = expand_add(y, is_mask, h, b, sizes=sizes, scaling=1.7)
    assert torch.equal(found[~is_mask], before[~is_mask])
    assert memory[0].isnan().all() and memory[:, sum(sizes) :].isnan().all()
    if is_mask.any():
        plain = (before + gain)[is_mask]
        assert_close(found[is_mask], plain, true[is_mask], f"gated_lora {rows=} {width=} {rank=} {sizes=}")


def check_several_adapters(draw: Draw) -> None:
    """Rows of three adapters and of none, each as by the op of its adapter; h of the others is NaN."""
    sizes, scalings = draw.random.choice([(48,), (40, 40), (96, 16, 16), (70, 70)]), (1.7, 0.3, -2.0)
    rank, width, rows, num = draw.size(4, 16, 24, 128), draw.size(96, 100, 1100), draw.num_rows, 3
    x, (y, memory) = draw.poisoned(rows, width)[0], draw.poisoned(rows, sum(sizes))
    a, b = draw.tensor(num * len(sizes) * rank, width, scale=width**-0.5), draw.tensor(num * sum(sizes), rank)
    gate = torch.randint(0, num + 1, (rows,), generator=draw.generator, dtype=torch.uint8).to(draw.device)
    h = torch.full((rows, len(a)), NAN, device=draw.device, dtype=draw.dtype)
    stock, true = y.clone(), y.double()
    for number, (own_a, own_b, own_h) in enumerate(zip(a.chunk(num), b.chunk(num), h.chunk(num, 1))):
        is_own, parts, factor = gate == number + 1, own_a.view(len(sizes), rank, width), scalings[number]
        true = gated_lora_reference(true, x, is_own, parts, own_b, sizes=sizes, scaling=factor)
        own_h[is_own] = library_linear(x[is_own], own_a)
        stock = expand_add(stock, is_own, own_h, own_b, sizes=sizes, scaling=factor)
    factors = torch.tensor(scalings, dtype=torch.float64, device=draw.device)
    groups, is_mask = group_rows(gate, num), gate > 0
    if len(sizes) == 2:
        assert torch.equal(expand_swiglu(y, groups, h, b, scaling=factors), swiglu(stock))
    assert torch.equal(expand_add(y, groups, h, b, sizes=sizes, scaling=factors), stock), f"{rows=} {rank=}"
    assert memory[0].isnan().all() and memory[:, sum(sizes) :].isnan().all()
    if is_mask.any():
        assert_close(y[is_mask], stock[is_mask], true[is_mask], f"several_adapters {rows=} {rank=} {sizes=}")


def check_linear(draw: Draw) -> None:
    width = draw.size(16, 96, 100, 520, 768, 800, 3000, 4096)
    out = draw.size(1, 16, 40, 65, 200, 1000)
    # A result of one or two numbers may be almost zero, which makes relative errors meaningless.
    rows = max(draw.num_rows, 17) if out == 1 else draw.num_rows
    small = draw.largest <= 1000
    # What a kernel is compiled for varies together: a GPU would spend its time on compiling otherwise.
    block_e, block_r, block_d, serial, gated, has_bias = draw.random.choice(VARIANTS)
    launch = LinearLaunch(
        block_e=block_e // 4 if small else block_e,
        block_r=min(block_r, 16) if small or draw.dtype == torch.float32 else block_r,
        block_d=32 if small or draw.dtype == torch.float32 else block_d,
        splits=draw.random.choice([1, 2, 3, 5]),
        serial=serial,
        stages=2 if gated or draw.dtype == torch.float32 else 3,
        **draw.launched_early(),
    )
    x, _ = draw.poisoned(rows, width)
    x[-1] = NAN
    kept = slice(0, rows - 1)
    weight: Tensor | Fp8Weight = draw.weight(2 * out if gated else out, width)
    bias = draw.tensor(weight.shape[0]) if has_bias else None
    if not small and draw.random.random() < 0.2:
        weight = quantise_fp8(weight)
    exact = dequantised(weight.values_ED, weight.scale_E) if isinstance(weight, Fp8Weight) else weight
    what = f"linear {rows=} {width=} {out=} {gated=} {launch} fp8={isinstance(weight, Fp8Weight)}"
    y, memory = draw.poisoned(rows, out)
    if gated:
        found = linear_swiglu(x, weight, bias_E=bias, launch=launch, out_RF=y)
        plain = linear_swiglu(x, exact.to(draw.dtype), bias_E=bias)
        true = linear_swiglu_reference(x.double(), exact, bias_E=bias)
        alone = linear_swiglu(x[:1], weight, bias_E=bias, launch=launch)
    else:
        plain = linear(x, exact.to(draw.dtype), bias_E=bias)
        true = linear_reference(x.double(), exact, bias_E=bias)
        found = linear(x, weight, bias_E=bias, launch=launch, out_RE=y)
        alone = linear(x[:1], weight, bias_E=bias, launch=launch)
    assert found.data_ptr() == y.data_ptr()
    assert memory[0].isnan().all() and memory[-1].isnan().all() and memory[:, out:].isnan().all(), what
    if rows > 1:
        assert_close(found[kept], plain[kept], true[kept], what)
        same = torch.equal(alone, found[:1])
        assert same or not runs_kernels(x), f"the number of rows changed a row: {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A SwiGLU with an adapter, its rows and the launch: one case."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    lora: GatedLora
    launch: LinearLaunch

    @staticmethod
    def drawn(draw: Draw, variant: int | None) -> Adapted:
        rows = draw.random.choice([1, 3, 7, 16, 17, 28, 32])
        width = draw.size(16, 96, 100, 520, 768, 800, 3000, 4096)
        # What a kernel is compiled for varies together: a GPU would spend its time on compiling otherwise.
        drawn = draw.random.choice(LORA_VARIANTS)
        block_e, block_d, size, rank, has_bias = drawn if variant is None else LORA_VARIANTS[variant]
        launch = LinearLaunch(
            block_e=block_e,
            block_r=16 if rows <= 16 else 32,
            block_d=32 if draw.largest <= 1000 or draw.dtype == torch.float32 else block_d,
            splits=draw.random.choice([1, 2, 4]),
            stages=2,
            **draw.launched_early(),
        )
        x, _ = draw.poisoned(rows, width)
        x[-1] = NAN
        is_mask = torch.rand(rows, generator=draw.generator) < draw.random.choice([0.0, 0.4, 1.0])
        b, sizes = draw.tensor(2 * size, rank), (size, size)
        lora = GatedLora(b_Er=b, gate=is_mask.to(draw.device), sizes=sizes, scaling=1.7)
        weight = draw.weight(2 * size + lora.num_ranks, width)
        bias = draw.tensor(len(weight)) if has_bias else None
        if bias is not None:
            bias[2 * size :] = 0
        return Adapted(x=x, weight=weight, bias=bias, lora=lora, launch=launch)

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the projection itself."""
        return sum(self.lora.sizes)

    def own(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the projection itself."""
        bias = None if self.bias is None else self.bias[: self.num_outputs]
        return self.weight[: self.num_outputs], bias

    def separate(self) -> tuple[Tensor, Tensor]:
        """The SwiGLU without the adapter, and with it added by a second kernel."""
        (weight, bias), lora = self.own(), self.lora
        plain = linear_swiglu(self.x, weight, bias_E=bias, launch=self.launch)
        y = linear(self.x, weight, bias_E=bias, launch=self.launch)
        h = linear(self.x, self.weight[self.num_outputs :], launch=self.launch)
        return plain, expand_swiglu(y, lora.gate, h, lora.b_Er, scaling=lora.scaling)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Results of torch in the dtype of `x` and in fp64."""
        (weight, bias), lora = self.own(), self.lora
        a = self.weight[self.num_outputs :].view(2, -1, self.x.shape[1])
        true = linear_reference(self.x.double(), weight, bias_E=bias)
        true = gated_lora_reference(
            true, self.x.double(), lora.gate, a, lora.b_Er, sizes=lora.sizes, scaling=lora.scaling
        )
        parts = zip(a, lora.b_Er.split(lora.sizes), strict=True)
        gain = lora.scaling * torch.cat(
            [library_linear(library_linear(self.x, one), b) for one, b in parts], dim=1
        )
        plain = library_linear(self.x, weight, bias_E=bias)
        gate, up = torch.where(lora.gate[:, None], plain + gain, plain).chunk(2, dim=1)
        return F.silu(gate) * up, swiglu_reference(true)


def check_linear_lora(draw: Draw, variant: int | None = None) -> None:
    case = Adapted.drawn(draw, variant)
    x, lora, launch, rows = case.x, case.lora, case.launch, len(case.x)
    rank, kept, out = lora.b_Er.shape[1], slice(0, rows - 1), lora.sizes[0]
    what = f"linear_lora {rows=} {x.shape[1]=} {rank=} {lora.sizes=} {launch}"
    y, memory = draw.poisoned(rows, out)
    floats, tiles = workspace_size(launch, rows, out, x.shape[1], gated=True, rank=rank)
    space = make_workspace(torch.device(draw.device), num_floats=floats, num_tiles=tiles)
    for _ in range(2):
        y.fill_(NAN)
        space.partials.fill_(NAN)
        if runs_kernels(x):
            linear_swiglu(
                x, case.weight, bias_E=case.bias, lora=lora, launch=launch, workspace=space, out_RF=y
            )
        else:
            y.copy_(Linears().swiglu(x, case.weight, bias_E=case.bias, lora=lora))
        assert not space.counters.any(), what
    assert y[-1].isnan().all(), what
    assert memory[0].isnan().all() and memory[-1].isnan().all() and memory[:, out:].isnan().all(), what
    plain, separate = case.separate()
    if runs_kernels(x):
        others = ~lora.gate[kept]
        assert torch.equal(bits(y[kept][others]), bits(plain[kept][others])), what
        # The interpreter's product is numpy's, whose order of sums follows the tile; fp32 on a GPU is fused.
        if draw.dtype.itemsize == 2 if x.is_cuda else launch.block_e == 64 and rank == 128:
            assert torch.equal(y[kept], separate[kept]), what
    if rows > 1:
        stock, true = case.expected()
        assert_close(y[kept], stock[kept], true[kept], what)


def bits(x: Tensor) -> Tensor:
    """Bits of each number as an integer, so that the two zeros differ."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


CHECKS: dict[str, Callable[[Draw], None]] = {
    "rms_norm": check_rms_norm,
    "swiglu": check_swiglu,
    "qkv_rope_cache": check_qkv_rope_cache,
    "gated_lora": check_gated_lora,
    "several_adapters": check_several_adapters,
    "linear": check_linear,
    "linear_lora": check_linear_lora,
}
