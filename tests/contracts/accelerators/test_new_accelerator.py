"""An accelerator of one's own takes one file, and is right if its lists are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

import idlm.infer.accelerators as package
from idlm.errors import UserError
from idlm.infer.sparse.accelerator import ACCELERATORS
from tests.accelerator_reference import Rule, SlowLists
from tests.block_reference import Sampling
from tests.contracts.accelerators.cases import (
    PARAMS,
    PROMPTS,
    SETTINGS,
    engine_of,
    rules_of,
    write_toys,
)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_toys(tmp_path_factory)


TOY = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from idlm.infer.sparse.accelerator import ACCELERATORS, KVAccelerator, KVPass

@dataclass(frozen=True, slots=True, kw_only=True)
class SinkConfig:
    sink: int = 2
    window: int = 3

class SinkPass(KVPass):
    def select_kv(self, layer, q_RNH):
        starts_B1 = self.view.active.starts_B[:, None]
        slots_BS = torch.arange(int(starts_B1.max())).expand(len(starts_B1), -1)
        seen = (slots_BS < starts_B1) & ((slots_BS < 2) | (slots_BS >= starts_B1 - 3))
        return torch.where(seen, slots_BS, -1)[:, None].expand(-1, self.view.cache.keys.shape[2], -1)

@ACCELERATORS.register("sink")
class Sink(KVAccelerator):
    name: ClassVar[str] = "sink"
    Config: ClassVar[type] = SinkConfig
    def begin(self, view):
        return SinkPass(view, is_sparse_B=view.is_working_B)
"""


class SlowSink:
    def begin(self, block: int, step: int, num_steps: int) -> None:
        pass

    def lists(self, layer: int, q_WNH: Tensor, k_PKH: Tensor) -> list[list[int]]:
        num = len(k_PKH)
        return [[slot for slot in range(num) if slot < 2 or slot >= num - 3]] * k_PKH.shape[1]


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A new accelerator: one file in the package's folder, nothing else."""
    (tmp_path / "sink.py").write_text(TOY)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(ACCELERATORS, "_is_scanned", False)
    members = dict(ACCELERATORS._members)
    yield "sink"
    ACCELERATORS._members = members
    sys.modules.pop("idlm.infer.accelerators.sink")


@pytest.mark.sweep
def test_a_toy_takes_one_file(toys: dict[str, Path], sink: str) -> None:
    engine = engine_of(toys, accelerators=sink)
    found = engine.generate(PROMPTS, PARAMS)
    rule: Rule = SlowSink()
    slow = SlowLists(toys["block"], rules_of("block"), rule)
    for number, completion in enumerate(found):
        expected, _ = slow.answer(PROMPTS[number], Sampling(seed=number, **SETTINGS[number]))
        assert list(completion.token_ids) == expected
    assert found[0].exactness == "lossy"
    with pytest.raises(UserError, match="sink and mage are both of the kv side"):
        engine_of(toys, accelerators=("sink", "mage"))
    message = r"accelerators\.sink\.sinks is not one of its options; did you mean 'sink'"
    with pytest.raises(UserError, match=message):
        engine_of(toys, accelerators={"sink": {"sinks": 3}})
