"""Ranks share the experts of a model: the greedy answers of one rank, and each reads only its own experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.infer.models import weights
from idlm.infer.models.base import Shards
from idlm.infer.models.moe import MoeLayer
from tests.contracts.engines import assert_idle, build_engine, clear_answers, greedy
from tests.numerics.test_family_parity import BLOCK, MASK, llada2, llada22, sdar_moe
from tests.ranks import group_engine, group_of_threads
from tests.toy import load_model

AS_ON_A_GPU = {"graphs": "on", "num_inflight_steps": 3}
WRITERS = {"sdar_moe": sdar_moe, "llada2": llada2, "llada22": llada22}


def _prompts() -> list[list[int]]:
    lengths = (2 * BLOCK + 1, BLOCK, BLOCK - 1, 1)
    return [[(7 * index + 5 * number) % MASK for index in range(n)] for number, n in enumerate(lengths)]


@pytest.mark.sweep_but("sdar_moe")
@pytest.mark.decides
@pytest.mark.parametrize("family", WRITERS)
def test_two_ranks_answer_as_one(family: str, tmp_path: Path) -> None:
    """A softmax router; and groups, a shared expert and a fused projection that is put in another order."""
    WRITERS[family](tmp_path)
    options: dict[str, Any] = {"strategy": "low_confidence_dynamic"}
    expected = clear_answers(build_engine(tmp_path, "block", **options), _prompts(), greedy(max_tokens=8))
    assert len({tuple(answer.token_ids) for answer in expected}) > 1
    with group_of_threads(2) as group:
        engine = group_engine(group, tmp_path, "block", **options, **AS_ON_A_GPU)
        found = engine.generate(_prompts(), greedy(max_tokens=8))
        assert_idle(engine)
        engine.close()
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]


@pytest.mark.parametrize("family", ["sdar_moe", "llada2"])
def test_a_rank_reads_its_own_experts_and_no_other(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[family](tmp_path)
    whole = load_model(tmp_path, device="cpu")
    layer = whole.trunk.layers[-1]
    assert isinstance(layer, MoeLayer)
    read: list[set[str]] = []
    copy = weights.copy

    def counting(targets: Any, files: Any) -> None:
        read.append({name for name in targets if ".experts." in name})
        copy(targets, files)

    monkeypatch.setattr(weights, "copy", counting)
    parts = []
    for rank in range(2):
        mine = load_model(tmp_path, device="cpu", shards=Shards(rank=rank, size=2)).trunk.layers[-1]
        assert isinstance(mine, MoeLayer)
        parts.append(mine.mlp)
        assert torch.equal(mine.mlp.router, layer.mlp.router)
    assert not read[0] & read[1] and len(read[0]) == len(read[1]) > 0
    for name in ("gate_up", "down"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(layer.mlp, name))


def test_padding_rows_reach_no_expert(tmp_path: Path) -> None:
    """They may hold anything, and change no bit of the others."""
    llada2(tmp_path)
    model = load_model(tmp_path, device="cpu")
    layer = model.trunk.layers[-1]
    assert isinstance(layer, MoeLayer)
    x_RD = torch.randn(5, model.spec.width, generator=torch.Generator().manual_seed(0))
    alone = layer.mlp(x_RD[:3], model.trunk.linears, torch.arange(3))
    x_RD[3], x_RD[4] = float("nan"), float("inf")
    found = layer.mlp(x_RD, model.trunk.linears, torch.tensor([0, 1, 2, -1, -1]))
    torch.testing.assert_close(found[:3], alone)
    assert not found[3:].any()
