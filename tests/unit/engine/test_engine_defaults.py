"""Settings that follow the device's memory, and what a checkpoint states of its acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from idlm.errors import UserError
from idlm.infer import build
from idlm.infer.settings import EngineSettings
from idlm.infer.state.kv_cache import TOKEN_BY_TOKEN, KVWritePolicy
from idlm.semantics import FILE_NAME, Semantics

GPU, CPU = torch.device("cuda"), torch.device("cpu")
BLOCKS = KVWritePolicy(kind="block", block_size=32)


@pytest.mark.parametrize(
    ("device", "gib", "policy", "expected"),
    [
        (GPU, 141, TOKEN_BY_TOKEN, (256, 8192)),
        (GPU, 80, TOKEN_BY_TOKEN, (256, 8192)),
        (GPU, 40, TOKEN_BY_TOKEN, (128, 4096)),
        (GPU, 16, TOKEN_BY_TOKEN, (64, 2048)),
        (GPU, 141, BLOCKS, (64, 1024)),
        (CPU, 512, TOKEN_BY_TOKEN, (64, 1024)),
    ],
)
def test_sequences_and_prompt_rows_follow_the_memory(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    gib: int,
    policy: KVWritePolicy,
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(build, "memory_bytes", lambda _: (gib << 30, gib << 30))
    found = build._with_loads(EngineSettings(warmup="auto"), device, policy)
    assert (found.max_sequences, found.row_budget) == expected
    cold = build._with_loads(EngineSettings(), device, policy)
    assert (cold.max_sequences, cold.row_budget) == build.OTHER_LOAD
    given = build._with_loads(EngineSettings(max_num_seqs=3, max_num_batched_tokens=5), device, policy)
    assert (given.max_sequences, given.row_budget) == (3, 5)


def test_acceptance_of_a_checkpoint_is_read_and_only_written_where_it_is_known(tmp_path: Path) -> None:
    Semantics(mask_token_id=7, stride=3).save(tmp_path)
    assert "acceptance" not in json.loads((tmp_path / FILE_NAME).read_text())
    known = Semantics(mask_token_id=7, stride=3, acceptance=(0.9, 0.8))
    known.save(tmp_path)
    assert Semantics.load(tmp_path) == known


@pytest.mark.parametrize("value", [0.9, [1.5], ["0.9"], {"0": 1}])
def test_other_values_of_acceptance_are_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps({"mask_token_id": 7, "stride": 3, "acceptance": value}))
    with pytest.raises(UserError, match="IDLM-0304"):
        Semantics.load(tmp_path)
