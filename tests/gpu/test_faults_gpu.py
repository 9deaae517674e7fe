"""The planted-fault suite on a CUDA device: kernels, graphs and passes ahead, each fault caught all the same.

python -m pytest tests/gpu/test_faults_gpu.py -m gpu
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import law_harness
from benchmarks.law_harness import write_law_toy
from idlm.infer.decoders.rejection import STRATEGIES
from tests.contracts import engines
from tests.contracts.engines import write_converted_toy, write_foreseeing_toy
from tests.law.faults import FAULTS, Fault
from tests.law.test_planted_faults import CHECKS, _passes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
PLACE = {"device": "cuda", "graphs": "on", "attention": "triton"}


@pytest.fixture(scope="module")
def law_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_law_toy(tmp_path_factory.mktemp("law_toy"))


@pytest.fixture(scope="module")
def foreseeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("toys")
    write_converted_toy(home / "converted")
    return write_foreseeing_toy(home / "foreseeing")


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (law_harness, engines):
        monkeypatch.setattr(module, "PLACE", PLACE)
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("strategy", STRATEGIES.names())
@pytest.mark.parametrize("check", CHECKS)
def test_the_engine_as_it_is_passes(check: str, strategy: str, law_toy: Path, foreseeing: Path) -> None:
    assert _passes(check, strategy, law_toy, foreseeing)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_is_caught(
    fault: Fault, law_toy: Path, foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault.plant(monkeypatch)
    assert not _passes(fault.check, fault.strategy, law_toy, foreseeing)
