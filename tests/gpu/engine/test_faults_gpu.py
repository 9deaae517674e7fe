"""The planted-fault suite on a CUDA device, with kernels, graphs and asynchronous steps."""

from __future__ import annotations

import pytest

from tests.law.conftest import law_toy
from tests.law.test_planted_faults import (
    foreseeing,
    test_the_engine_as_it_is_passes,
    test_the_fault_is_caught,
)

__all__ = ["foreseeing", "law_toy", "test_the_engine_as_it_is_passes", "test_the_fault_is_caught"]
pytestmark = pytest.mark.usefixtures("on_the_gpu")
