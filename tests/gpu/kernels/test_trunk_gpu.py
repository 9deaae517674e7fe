"""The trunk's kernels on a CUDA device: random shapes per op against float64 with NaN in the padding, a
row's bits at any number of rows, graph capture with programmatic launches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from idlm.kernels.gated_lora import GatedLora, expand_add, expand_swiglu
from idlm.kernels.linear import Linears, check_rows_agree, linear, linear_swiglu
from idlm.kernels.linear.groups import Groups
from idlm.kernels.linear.launch import LinearLaunch, adds_lora, few_rows_launch, fixed_launch, make_workspace
from idlm.kernels.qkv_rope_cache import make_rope, qkv_rope_cache
from idlm.kernels.rms_norm import add_rms_norm
from idlm.kernels.swiglu import swiglu
from tests.kernels.cases.plain_torch import rms_norm, rotate
from tests.kernels.cases.trunk import CHECKS, Draw

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES_PER_BATCH, BATCHES = 112, 2
ADAPTED = {
    "qkv": ((4096, 1024, 1024), 4096),
    "o": ((4096,), 4096),
    "gate_up": ((12288, 12288), 4096),
    "down": ((4096,), 12288),
}
"""Output widths of the parts and input width of the projections of Qwen3-8B."""
RANK = 128
OUT = {False: "out_RE", True: "out_RF"}


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, device="cuda")).to(dtype)


@pytest.mark.parametrize("op", CHECKS)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_shapes_are_as_exact_as_pytorch(op: str, batch: int) -> None:
    for seed in range(batch * SHAPES_PER_BATCH, (batch + 1) * SHAPES_PER_BATCH):
        CHECKS[op](Draw(seed, "cuda", DTYPES[seed % 3], largest=20_000))


@pytest.mark.parametrize("dtype", DTYPES)
def test_this_device_can_be_deterministic(dtype: torch.dtype) -> None:
    assert check_rows_agree(torch.device("cuda"), dtype)


@pytest.mark.parametrize(
    ("E", "D", "gated", "dtype"),
    [
        (6144, 4096, False, torch.bfloat16),
        (12288, 4096, True, torch.bfloat16),
        (4096, 12288, False, torch.float16),
        (896, 4864, True, torch.float16),
        (896, 4864, False, torch.bfloat16),
        (100, 96, True, torch.bfloat16),
        (33, 3000, False, torch.bfloat16),
        (33, 3000, True, torch.float16),
    ],
)
def test_fixed_launches_give_a_row_its_bits(E: int, D: int, gated: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    op = linear_swiglu if gated else linear
    weight = randn((2 if gated else 1) * E, D, dtype=dtype, scale=D**-0.5)
    x = randn(600, D, dtype=dtype)
    whole = op(x, weight, launch=fixed_launch(600, E, D, dtype, gated=gated))
    for num_rows in (1, 2, 7, 15, 16, 17, 32, 33, 64, 65, 112, 128, 129, 448):
        launch = fixed_launch(num_rows, E, D, dtype, gated=gated)
        for first in (0, 150):
            found = op(x[first : first + num_rows], weight, launch=launch)
            assert torch.equal(found, whole[first : first + num_rows]), f"{num_rows=} {first=}"


GROUPS = [(1, 256, 2), (1, 128, 3), (2, 128, 3), (4, 128, 2), (1, 64, 2), (4, 64, 2)]
GATED_GROUPS = [(1, 128, 2), (1, 64, 2), (2, 64, 2)]
"""Shares, rows of a tile and warpgroups."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
def test_warpgroups_give_the_bits_of_the_other_kernel(gated: bool, dtype: torch.dtype) -> None:
    """Odd numbers of rows and outputs, columns that end within a stage, biases, and NaN in rows beside."""
    torch.manual_seed(0)
    op, E, D = linear_swiglu if gated else linear, 712, 1352
    weight = randn((2 if gated else 1) * E, D, dtype=dtype, scale=D**-0.5)
    bias, memory = (
        randn(len(weight), dtype=dtype),
        torch.full((460, D + 8), torch.nan, device="cuda").to(dtype),
    )
    x = memory[5:455, :D]
    x.copy_(randn(450, D, dtype=dtype))
    x[-1] = torch.nan
    for splits, rows, num in GATED_GROUPS if gated else GROUPS:
        launch = LinearLaunch(splits=splits, block_d=64, stages=3)
        expected = op(x, weight, bias_E=bias, launch=launch)[:449]
        launch = replace(launch, pdl=True, groups=Groups(rows=rows, num=num))
        for num_rows in (1, 63, 129, 450):
            out = torch.full((num_rows + 2, E + 16), torch.nan, device="cuda", dtype=dtype)
            y = out[1:-1, :E]
            op(x[:num_rows], weight, bias_E=bias, launch=launch, **{OUT[gated]: y})
            assert torch.equal(y[:449], expected[:num_rows]), f"{splits=} {rows=} {num=} {num_rows=}"
            assert out[0].isnan().all() and out[-1].isnan().all() and out[:, E:].isnan().all()


def test_small_ops_give_the_trunks_bits() -> None:
    """bf16 equals the torch path of infer/models/dense.py but for rare last bits of a norm."""
    torch.manual_seed(0)
    x, residual, weight = randn(64, 4096), randn(64, 4096), randn(4096)
    total = x + residual
    normed, summed = add_rms_norm(x, residual, weight, eps=1e-6)
    assert torch.equal(summed, total)
    assert (normed != rms_norm(total, weight, 1e-6)).float().mean() < 1e-3
    gate_up = randn(64, 2 * 12288)
    gate, up = gate_up.chunk(2, dim=-1)
    assert (swiglu(gate_up) != F.silu(gate) * up).float().mean() < 1e-3
    qkv, norm = randn(64, 48, 128), randn(40, 128)
    inv_freq, positions = (
        1e6 ** -torch.linspace(0, 1, 64, device="cuda"),
        torch.arange(64, device="cuda") * 500,
    )
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    tables = [torch.cat(one, -1).bfloat16()[:, None] for one in ((cos, cos), (-sin, sin))]
    expected = rotate(rms_norm(qkv[:, :40], norm, 1e-6), *tables)[:, :32]
    caches = [torch.zeros(64, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.arange(64, device="cuda")
    found = qkv_rope_cache(
        qkv,
        *caches,
        rope=make_rope(positions, inv_freq, dtype=qkv.dtype),
        slot_mapping_R=slots,
        qk_norm_YH=norm,
    )
    assert (found != expected).float().mean() < 1e-3


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_rotated_row_has_the_same_bits_among_few_and_many(head_dim: int) -> None:
    torch.manual_seed(0)
    inv_freq = 1e6 ** -torch.linspace(0, 1, head_dim // 2, device="cuda")
    qkv, norm = randn(300, 48, head_dim), randn(40, head_dim)
    slots = torch.arange(300, device="cuda")

    def rotated(num_rows: int) -> list[torch.Tensor]:
        caches = [torch.zeros(300, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
        rope = make_rope(slots[:num_rows], inv_freq, dtype=qkv.dtype)
        q = qkv_rope_cache(
            qkv[:num_rows].clone(), *caches, rope=rope, slot_mapping_R=slots[:num_rows], qk_norm_YH=norm
        )
        return [one[:7] for one in (q, *caches)]

    whole = rotated(300)
    for num_rows in (7, 128, 129):
        assert all(map(torch.equal, rotated(num_rows), whole)), f"{num_rows=}"


def test_a_captured_chain_with_programmatic_launches_repeats_the_plain_one() -> None:
    """Norm, projection, rotation, addition, SwiGLU and adapter in one graph, replayed on changing input."""
    torch.manual_seed(0)
    rows, width, ffn = 7, 1024, 2048
    qkv_w, o_w, up_w, down_w = (
        randn(*shape, scale=0.03) for shape in ((2048, width), (width, 1024), (2 * ffn, width), (width, ffn))
    )
    norm, x = randn(width), randn(rows, width)
    is_mask = torch.tensor([False, True] * 3 + [False], device="cuda")
    lora = (randn(16, width, scale=0.03), randn(2048, 16))
    caches = [torch.zeros(rows, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    positions = torch.arange(rows, device="cuda")
    inv_freq = 1e4 ** -torch.linspace(0, 1, 64, device="cuda")
    space = make_workspace(torch.device("cuda"), num_floats=1 << 22, num_tiles=4096)

    def chain(pdl: bool) -> torch.Tensor:
        launch = LinearLaunch(splits=4, pdl=pdl, ahead=128 if pdl else 0)
        hidden, _ = add_rms_norm(x, None, norm, eps=1e-6, pdl=pdl)
        qkv = linear(hidden, qkv_w, launch=launch, workspace=space)
        low = linear(hidden, lora[0], launch=launch, workspace=space)
        expand_add(qkv, is_mask, low, lora[1], sizes=(2048,), scaling=2.0)
        q = qkv_rope_cache(
            qkv.view(rows, 16, 128),
            *caches,
            rope=make_rope(positions, inv_freq, dtype=qkv.dtype),
            slot_mapping_R=positions,
            pdl=pdl,
        )
        total = linear(q.reshape(rows, -1), o_w, launch=launch, workspace=space)
        hidden, total = add_rms_norm(total, x.clone(), norm, eps=1e-6, pdl=pdl)
        hidden = linear_swiglu(hidden, up_w, launch=launch, workspace=space)
        return total + linear(hidden, down_w, launch=launch, workspace=space)

    chain(True), chain(False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [chain(True) for _ in range(8)][-1]
    for seed in range(20):
        torch.manual_seed(seed)
        x.copy_(randn(rows, width))
        graph.replay()
        assert torch.equal(captured, chain(False)), seed
    assert not space.counters.any()


def adapted_weight(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A projection whose weight ends with the A of its parts, and the B."""
    sizes, width = ADAPTED[name]
    weight = randn(sum(sizes) + RANK * len(sizes), width, scale=width**-0.5)
    return weight, randn(sum(sizes), RANK, scale=RANK**-0.5)


def in_two_kernels(
    name: str, x: torch.Tensor, weight: torch.Tensor, b: torch.Tensor, is_mask: torch.Tensor
) -> torch.Tensor:
    """The projection, then a kernel that adds the adapter; with the splits of the fused kernel."""
    (sizes, width), gated = ADAPTED[name], name == "gate_up"
    num_outputs = sum(sizes)
    launch = few_rows_launch(len(x), sizes[0] if gated else num_outputs, width, x.dtype, gated=gated)
    if not gated:
        both = linear(x, weight, launch=launch)
        y, h = both[:, :num_outputs], both[:, num_outputs:]
        return expand_add(y, is_mask, h, b, sizes=sizes, scaling=1.7)
    assert launch is not None and adds_lora(launch, len(x), sizes[0], rank=RANK), "two kernels anyway"
    y, h = linear(x, weight[:num_outputs], launch=launch), linear(x, weight[num_outputs:], launch=launch)
    return expand_swiglu(y, is_mask, h, b, scaling=1.7)


def in_one_kernel(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    b: torch.Tensor,
    is_mask: torch.Tensor,
    linears: Linears,
) -> torch.Tensor:
    lora = GatedLora(b_Er=b, gate=is_mask, sizes=ADAPTED[name][0], scaling=1.7)
    return (linears.swiglu if name == "gate_up" else linears.linear)(x, weight, lora=lora)


def test_an_adapter_has_the_same_bits_in_the_product_and_after_it() -> None:
    torch.manual_seed(0)
    linears, (weight, b) = Linears(), adapted_weight("gate_up")
    for rows, share in itertools.product((1, 3, 7, 16, 17, 28, 32), (0.0, 0.5, 1.0)):
        x, is_mask = randn(rows, 4096), torch.rand(rows, device="cuda") < share
        found = in_one_kernel("gate_up", x, weight, b, is_mask, linears)
        assert torch.equal(found, in_two_kernels("gate_up", x, weight, b, is_mask)), f"{rows=} {share=}"


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize("rows", [7, 300])
def test_a_deterministic_row_has_the_same_bits_with_an_adapter_and_without(name: str, rows: int) -> None:
    """Rows that are not MASK, so that those of R-ISD equal the base model's bit for bit."""
    torch.manual_seed(0)
    linears, (weight, b) = Linears(deterministic=True), adapted_weight(name)
    x, is_mask = randn(rows, ADAPTED[name][1]), torch.rand(rows, device="cuda") < 0.5
    found = in_one_kernel(name, x, weight, b, is_mask, linears)
    own = weight[: sum(ADAPTED[name][0])]
    plain = linears.swiglu(x, own) if name == "gate_up" else linears.linear(x, own)
    assert torch.equal(found[~is_mask], plain[~is_mask])


@pytest.mark.parametrize("rows", [7, 28])
def test_a_captured_chain_of_adapted_projections_repeats_the_one_of_two_kernels_each(rows: int) -> None:
    """Two layers of Qwen3-8B without attention, replayed with changing rows and gates: the values that a tile
    waits for change each time, and its counters start as the last replay left them."""
    torch.manual_seed(0)
    linears = Linears()
    layers = [{name: adapted_weight(name) for name in ADAPTED} for _ in range(2)]
    norm, x = randn(4096), randn(rows, 4096)
    is_mask = torch.zeros(rows, dtype=torch.bool, device="cuda")

    def chain(is_fused: bool) -> torch.Tensor:
        def projected(layer: dict[str, tuple[torch.Tensor, ...]], name: str, x: torch.Tensor) -> torch.Tensor:
            weight, b = layer[name]
            if is_fused:
                return in_one_kernel(name, x, weight, b, is_mask, linears)
            return in_two_kernels(name, x, weight, b, is_mask)

        total, residual = x, None
        for layer in layers:
            hidden, residual = add_rms_norm(total.clone(), residual, norm, eps=1e-6)
            qkv = projected(layer, "qkv", hidden)
            total = projected(layer, "o", qkv[:, :4096] + qkv[:, 4096:].repeat(1, 2))
            hidden, residual = add_rms_norm(total, residual, norm, eps=1e-6)
            total = projected(layer, "down", projected(layer, "gate_up", hidden))
        return total + residual

    chain(True), chain(False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(True)
    for seed in range(15):
        torch.manual_seed(seed)
        x.copy_(randn(rows, 4096))
        is_mask.copy_(torch.rand(rows, device="cuda") < seed % 5 / 4)
        graph.replay()
        assert torch.equal(captured, chain(False)), seed


@pytest.mark.parametrize("block_r", [8, 16, 32, 64])
@pytest.mark.parametrize("block_e", [64, 128])
def test_every_launch_is_right(block_e: int, block_r: int) -> None:
    """On one odd shape: any two values of what a launch says, in as few launches as have them all."""
    torch.manual_seed(0)
    x, weight = randn(50, 1000), randn(300, 1000, scale=0.03)
    true = x.double() @ weight.double().T
    library = float((F.linear(x, weight).double() - true).norm())
    launches = [
        (64, 1, 4, 2, False),
        (64, 3, 8, 4, True),
        (128, 1, 8, 4, False),
        (128, 3, 4, 4, False),
        (128, 3, 8, 2, True),
        (128, 1, 4, 2, True),
    ]
    for block_d, splits, warps, stages, pdl in launches:
        launch = LinearLaunch(
            block_e=block_e,
            block_r=block_r,
            block_d=block_d,
            splits=splits,
            warps=warps,
            stages=stages,
            pdl=pdl,
        )
        error = float((linear(x, weight, launch=launch).double() - true).norm())
        assert error <= 1.1 * library, launch
