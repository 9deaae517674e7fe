"""Checks that test_split_attention.py runs with TRITON_INTERPRET=1, set before the kernels are imported.

Every result of the kernels in float32 against the definition in float64, with NaN in all padding; prints the
number of cases at the end."""

from __future__ import annotations

import dataclasses
import sys

import torch

from idlm.kernels.split_attention import launch
from tests.kernels.cases.split_attention import (
    Case,
    inputs_of_queries,
    kernel,
    random_case,
    ranges_of,
    reference,
    results,
    row_meta,
    row_meta_of_one,
    without_padding,
)
from tests.kernels.patched_triton import patch_once

SMALL = (
    {
        "FORWARD": {"rows": 32, "walk": 16},
        "BACKWARD": {"rows": 32, "walk": 16, "parts": 1},
        "QUERIES": {"rows": 32, "walk": 16},
    },
    {
        "FORWARD": {"rows": 128, "walk": 32},
        "BACKWARD": {"rows": 128, "walk": 64, "parts": 2},
        "QUERIES": {"rows": 128, "walk": 128},
    },
)
FULL_TILES = Case(
    lengths=(((0, 70),),),
    stride=3,
    padding=3,
    mask_region="all",
    num_heads=2,
    num_kv_heads=1,
    head_dim=24,
    seed=0,
)


def check(case: Case, *, queries_noisy: bool = False) -> None:
    """`queries_noisy`: clean rows are keys alone, as where a gated adapter trains."""
    meta, num_queries = row_meta(case), None
    if queries_noisy:
        meta, num_queries = row_meta_of_one(case)
    see = ranges_of(meta, num_queries=num_queries)
    tensors = inputs_of_queries(case, meta, num_queries, torch.float32)
    scale = 0.3
    ours = results(kernel(see, scale), tensors, torch.float32)
    exact = results(reference(see, scale), without_padding(tensors), torch.float64)
    is_padding = meta.doc_ids < 0
    for name, mine, true in zip(("output", "dq", "dk", "dv"), ours, exact, strict=True):
        true = true.clone()
        rows = true if name == "output" else true.transpose(1, 2)
        rows[is_padding[:, : rows.shape[1]]] = 0
        if queries_noisy and name in ("dk", "dv"):
            rows[:, num_queries:] = 0
        gap = float((mine.double() - true).abs().max())
        assert gap <= 2e-5, f"{name} {gap=} {queries_noisy=} {case}"


def main() -> int:
    patch_once()
    cases = [
        FULL_TILES if name == "full" else random_case(int(name), longest=14, head_dims=(16, 24))
        for name in sys.argv[1:]
    ]
    for number, case in enumerate(cases):
        for name, changes in SMALL[number % 2].items():
            setattr(launch, name, dataclasses.replace(getattr(launch, name), **changes))
        check(case)
        check(case, queries_noisy=True)
    print(len(cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
