"""What DeepSpeed is told, what is refused beforehand, and what is said when memory runs out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from idlm.compose import compose
from idlm.errors import UserError
from idlm.train.config import TrainConfig
from idlm.train.config_check import check_config
from idlm.train.deepspeed import deepspeed_config, gathered, num_parameters, whole_weights, zero_stage
from idlm.train.memory import GIB, advice, explaining_memory, state_bytes


def config_of(**changes: object) -> TrainConfig:
    values = {
        "objective": "ar",
        "data.source": "task",
        "model.tokenizer": "task",
        "model.config.model_type": "qwen3",
        "train.steps": 2,
    } | changes
    return compose("train", TrainConfig, [f"{key}={value}" for key, value in values.items()])


def problems_of(**changes: object) -> str:
    with pytest.raises(UserError, match="IDLM-0504") as caught:
        check_config(config_of(**changes))
    return caught.value.message


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_compiled_and_nothing_is_float16(stage: int, dtype: str) -> None:
    config = config_of(**{"train.zero_stage": stage, "model.dtype": dtype, "train.max_grad_norm": 0.5})
    check_config(config)
    told = deepspeed_config(config, "cuda")
    assert told is not None and "optimizer" not in told and "fp16" not in told
    assert told["zero_optimization"]["stage"] == stage == zero_stage(config)
    assert told["bf16"]["enabled"] is (dtype == "bfloat16")
    if stage:
        assert told["data_types"]["grad_accum_dtype"] == "fp32"
    json.dumps(told)


def test_without_a_stage_there_is_no_deepspeed() -> None:
    assert deepspeed_config(config_of(), "cpu") is None
    assert zero_stage(config_of()) is None


def test_an_own_file_fills_in_and_wins(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 3, "overlap_comm": False}, "steps_per_print": 5})
    )
    config = config_of(**{"train.deepspeed": path})
    check_config(config)
    told = deepspeed_config(config, "cuda")
    assert told is not None and told["steps_per_print"] == 5 and told["train_batch_size"] == "auto"
    assert zero_stage(config) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "an object is expected"),
        ('{"fp16": {"enabled": true}}', "fp16 is not supported"),
        ('{"bf16": {"enabled": true}}', "contradicts train.bf16"),
        ('{"gradient_accumulation_steps": 7}', 'train.accumulation=1; write "auto"'),
        ('{"scheduler": {}}', "'scheduler' would replace"),
    ],
)
def test_a_file_that_contradicts_the_run_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(content)
    assert words in problems_of(**{"train.deepspeed": path})


def test_settings_that_do_not_fit_are_told() -> None:
    assert "train.zero_stage=4" in problems_of(**{"train.zero_stage": 4})
    assert "needs train.zero_stage" in problems_of(**{"train.offload_optimizer": "true"})
    told = problems_of(**{"train.zero_stage": 2, "train.deepspeed": "nowhere.json"})
    assert "exclude each other" in told and "not a file" in told
    assert "train.zero_stage=1" in problems_of(**{"model.dtype": "bfloat16"}), "lost updates are explained"


def test_whole_weights_keep_ties_and_copy_nothing_without_parts() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    weights = whole_weights(model)
    assert weights is not None and weights["0.weight"].data_ptr() == weights["1.weight"].data_ptr()
    assert weights["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert whole_weights(model, wanted=lambda name: name.startswith("1.")).keys() == {"1.weight"}
    assert num_parameters(model) == 12
    with gathered(model.parameters(), writes=True):
        pass


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 16.0),
        ({"train.zero_stage": 2, "model.dtype": "bfloat16"}, 2 + 16 / 8),
        ({"train.zero_stage": 3, "model.dtype": "bfloat16"}, 18 / 8),
        ({"train.zero_stage": 1, "model.dtype": "bfloat16"}, 6 + 12 / 8),
        ({"train.zero_stage": 2, "model.dtype": "bfloat16", "train.offload_optimizer": "true"}, 2 + 4 / 8),
    ],
)
def test_bytes_per_weight(changes: dict[str, Any], expected: float) -> None:
    assert state_bytes(config_of(**changes), 8 * GIB, 0, world_size=8) == expected * 8 * GIB


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_running_out_of_memory_names_settings_with_numbers(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idlm.train.memory._gpu_figures", lambda: "139.0 GiB allocated at most")
    config = config_of(**{"train.batch_size": 4, "train.zero_stage": 1, "model.dtype": "bfloat16"})
    with (
        pytest.raises(UserError, match="IDLM-0517") as caught,
        explaining_memory(config, nn.Linear(1000, 1000), world_size=8),
    ):
        raise error
    for word in (
        "train.batch_size=2 train.accumulation=2",
        "model.gradient_checkpointing=true",
        "train.zero_stage=2",
        "train.zero_stage=3",
        "train.offload_optimizer=true",
    ):
        assert word in caught.value.fix
    with (
        pytest.raises(RuntimeError, match="something else"),
        explaining_memory(config, nn.Linear(1, 1), world_size=8),
    ):
        raise RuntimeError("something else")


def test_the_last_resort_is_a_shorter_sample() -> None:
    config = config_of(**{"train.zero_stage": 3, "model.gradient_checkpointing": "true"})
    told = advice(config, num_trained=GIB, num_frozen=0, world_size=8)
    assert any("train.max_length=2048" in line for line in told)
    assert not any("batch_size" in line or "zero_stage" in line for line in told)
