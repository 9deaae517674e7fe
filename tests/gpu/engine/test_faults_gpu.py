"""The planted-fault suite on a CUDA device, with kernels, graphs and asynchronous steps.

python -m pytest tests/gpu/engine/test_faults_gpu.py -m gpu
"""

from __future__ import annotations

import pytest
import torch

from tests.law.conftest import law_toy
from tests.law.test_planted_faults import (
    foreseeing,
    test_the_engine_as_it_is_passes,
    test_the_fault_is_caught,
)

__all__ = ["foreseeing", "law_toy", "test_the_engine_as_it_is_passes", "test_the_fault_is_caught"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.usefixtures("on_the_gpu"),
]
