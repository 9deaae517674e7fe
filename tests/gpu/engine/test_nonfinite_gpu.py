"""Logits that are not finite, on a CUDA device with graphs: tests/contracts/test_nonfinite.py, unchanged."""

from __future__ import annotations

import pytest

from tests.contracts.test_nonfinite import (
    checkpoints,
    test_masks_that_overflow_are_reported_and_not_drawn_from,
    test_only_sequences_that_see_an_overflow_end_with_an_error,
)

__all__ = [
    "checkpoints",
    "test_masks_that_overflow_are_reported_and_not_drawn_from",
    "test_only_sequences_that_see_an_overflow_end_with_an_error",
]
pytestmark = pytest.mark.usefixtures("on_the_gpu")
