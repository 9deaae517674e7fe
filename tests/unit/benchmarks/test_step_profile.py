"""Milliseconds of a training step by part, from kernels whose times are known."""

from __future__ import annotations

import pytest

from benchmarks.step_profile import longest, ms_by_part, part_of


def test_parts_add_up_and_overlaps_count_once() -> None:
    spans = [
        ("nvjet_tst_128x256", 0.0, 4000.0),
        ("ncclDevKernel_AllReduce_Sum_bf16", 3000.0, 6000.0),
        ("query_gradient_kernel", 7000.0, 8000.0),
        ("triton_poi_fused_mul_silu_3", 8000.0, 8500.0),
    ]
    ms = ms_by_part(spans, 10.0)
    assert ms == {
        "products": pytest.approx(4.0),
        "collectives": pytest.approx(3.0),
        "attention": pytest.approx(1.0),
        "compiled element-wise": pytest.approx(0.5),
        "collectives alone": pytest.approx(2.0),
        "idle": pytest.approx(2.5),
        "step": 10.0,
    }


def test_gaps_are_named_by_the_kernels_around_them() -> None:
    spans = [
        ("a", 0.0, 5000.0),
        ("b", 1000.0, 2000.0),
        ("void c<int>", 6000.0, 7000.0),
        ("a", 7000.0, 7500.0),
    ]
    assert [line.split() for line in longest(spans)] == [
        ["kernel", "5.50", "ms", "2", "x", "a"],
        ["kernel", "1.00", "ms", "1", "x", "b"],
        ["kernel", "1.00", "ms", "1", "x", "c"],
        ["gap", "1.00", "ms", "1", "x", "a", "..", "c"],
    ]


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "products"),
        ("void cutlass::Kernel2<cutlass_80_wmma>", "products"),
        ("forward_kernel", "attention"),
        ("_rows_kernel", "loss"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdam>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel", "other"),
    ],
)
def test_a_kernel_belongs_to_one_part(kernel: str, part: str) -> None:
    assert part_of(kernel) == part
