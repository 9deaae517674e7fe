"""Rows, slots and commits by kernels against the plain path, on a GPU: random passes, integers equal."""

from __future__ import annotations

import torch

from tests.kernels.cases.step_rows import Case, commit_many


def test_kernels_equal_plain_torch() -> None:
    for seed in range(150):
        expected, found = Case(seed, "cpu").run(), Case(seed, "cuda").run()
        for name, value in expected.items():
            assert torch.equal(found[name].cpu(), value), f"{seed=} {name}"


def test_a_commit_of_many_tokens() -> None:
    for found, expected in zip(commit_many("cuda"), commit_many("cpu"), strict=True):
        assert torch.equal(found.cpu(), expected)
