"""What DeepSpeed is told, what is refused beforehand, and what is said when memory runs out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from idlm.config.compose import compose
from idlm.train.check import check_config
from idlm.train.config.schema import TrainConfig
from idlm.train.distributed.deepspeed import gathered, num_parameters, whole_weights, zero_stage
from idlm.train.distributed.deepspeed_settings import deepspeed_config, hold_gradients
from idlm.train.planning.estimate import explain_out_of_memory
from idlm.train.planning.memory import ModelShape, memory_plan
from idlm.train.planning.state import state_bytes, state_setup, state_terms
from tests.errors import refused


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
    error = refused("IDLM-0504", check_config, config_of(**changes))
    return error.message


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_compiled_and_nothing_is_float16(stage: int, dtype: str) -> None:
    config = config_of(**{"train.zero_stage": stage, "model.dtype": dtype, "train.max_grad_norm": 0.5})
    check_config(config)
    shown = deepspeed_config(config, "cuda")
    assert "optimizer" not in shown and "fp16" not in shown
    assert shown["zero_optimization"]["stage"] == stage == zero_stage(config.train)
    assert shown["bf16"]["enabled"] is (dtype == "bfloat16")
    if stage:
        assert shown["data_types"]["grad_accum_dtype"] == "fp32"
    # DeepSpeed refuses it with stage 3.
    assert shown.get("gradient_allreduce_op") == ("sum" if stage in (1, 2) else None)
    json.dumps(shown)


def test_an_own_file_fills_in_and_wins(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 3, "overlap_comm": False}, "steps_per_print": 5})
    )
    config = config_of(**{"train.deepspeed": path})
    check_config(config)
    shown = deepspeed_config(config, "cuda")
    assert shown["steps_per_print"] == 5 and shown["train_batch_size"] == "auto"
    assert "gradient_allreduce_op" not in shown
    assert zero_stage(config.train) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "an object is expected"),
        ('{"bf16": "auto"}', "an object is expected"),
        ('{"fp16": {"enabled": true}}', "fp16 is not supported"),
        ('{"bf16": {"enabled": true}}', "bf16.enabled=true contradicts train.bf16"),
        ('{"gradient_accumulation_steps": 7}', 'train.accumulation=1; write "auto"'),
        ('{"train_batch_size": 7}', "train_batch_size=7 contradicts train.batch_size x accumulation"),
        ('{"gradient_clipping": 0.3}', "gradient_clipping=0.3 contradicts train.max_grad_norm"),
        ('{"optimizer": {"params": {"lr": 0.5}}}', "optimizer.params.lr=0.5 contradicts train.learning_rate"),
        ('{"optimizer": {"type": "Lion"}}', "optimizer.type=Lion is not the AdamW"),
        ('{"scheduler": {"params": {"warmup_num_steps": 9}}}', "warmup_num_steps=9 would not be used"),
        ('{"zero_optimization": {"stage": "auto"}}', 'stage="auto" is not one of 0, 1, 2, 3'),
        ('{"tensor_parallel": {"autotp_size": 2}}', "'tensor_parallel' would replace"),
    ],
)
def test_a_file_that_contradicts_the_run_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(content)
    assert words in problems_of(**{"train.deepspeed": path})


COMMON = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": "auto", "hysteresis": 2},
    "bf16": {"enabled": "auto"},
}
TRAINERS = {
    "two stages": COMMON | {"zero_allow_untested_optimizer": True, "zero_optimization": {
        "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": "auto",
        "reduce_scatter": True, "reduce_bucket_size": "auto", "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": "auto",
    }},
    "weights on the host": COMMON | {"zero_optimization": {
        "stage": 3, "overlap_comm": False, "contiguous_gradients": "auto", "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": "auto",
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": "auto", "nvme_path": "auto"},
        "offload_param": {"device": "auto", "pin_memory": "auto"},
    }},
    "an optimizer and a schedule": COMMON | {
        "optimizer": {"type": "AdamW", "params": {
            "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto",
        }},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        }},
        "zero_optimization": {"stage": 1},
    },
    "float16 off": {
        "fp16": {"enabled": False}, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2},
    },
    "no precision": {"train_batch_size": "auto", "zero_optimization": {"stage": 0}},
}  # fmt: skip


def autos(values: dict[str, object]) -> set[str]:
    found = {name for name, value in values.items() if value == "auto"}
    return found.union(*(autos(value) for value in values.values() if isinstance(value, dict)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TRAINERS)
def test_a_file_of_another_trainer_means_our_settings(name: str, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(TRAINERS[name]))
    config = config_of(**{"train.deepspeed": path, "model.dtype": dtype})
    check_config(config)
    shown, given = deepspeed_config(config, "cuda"), TRAINERS[name]
    assert shown["bf16"] == {"enabled": dtype == "bfloat16"}
    assert not {"optimizer", "scheduler", "fp16"} & shown.keys()
    zero = given["zero_optimization"]
    assert zero_stage(config.train) == zero["stage"] == shown["zero_optimization"]["stage"]
    kept = {key: value for key, value in zero.items() if value != "auto" and not isinstance(value, dict)}
    assert shown["zero_optimization"].items() >= kept.items()
    # Only what transformers fills in may be left.
    by_width = {"stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"}
    sizes = {key for key, value in COMMON.items() if value == "auto" and key != "steps_per_print"}
    assert autos(shown) <= sizes | (by_width if zero["stage"] == 3 else set())
    if "offload_optimizer" in zero:
        assert shown["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
        assert shown["zero_optimization"]["offload_param"] == {"device": "none", "pin_memory": False}
        assert shown["zero_optimization"]["stage3_max_live_parameters"] == 10**9


def test_numbers_that_are_those_of_the_run_do_not_contradict(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    given = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    path.write_text(json.dumps(given | {"bf16": {"enabled": False}}))
    changes = {"train.deepspeed": path, "train.batch_size": 2, "dry_run": "true", "plan.num_gpus": 4}
    check_config(config_of(**changes, **{"train.accumulation": 3}))
    check_config(config_of(**changes, **{"train.global_batch": 24}))
    assert "train_batch_size=24" in problems_of(**changes)


def test_settings_that_do_not_fit_are_reported() -> None:
    assert "train.zero_stage=4" in problems_of(**{"train.zero_stage": 4})
    assert "needs train.zero_stage" in problems_of(**{"train.offload_optimizer": "true"})
    shown = problems_of(**{"train.zero_stage": 2, "train.deepspeed": "nowhere.json"})
    assert "exclude each other" in shown and "not a file" in shown
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


# Bytes of 1,000 trained weights on each of 4 ranks, worked out by hand from what DeepSpeed 0.19 allocates on
# the device (runtime/bf16_optimizer.py, zero/stage_1_and_2.py, zero/stage3.py): weights, sums of gradients,
# float32 masters, Adam's moments. Offloaded, only the sums of whole gradients (ZeRO-1) stay there.
STATES = [
    ("float32", None, False, 4000 + 4000 + 0 + 8000),
    ("bfloat16", 0, False, 2000 + 4000 + 4000 + 8000),
    ("bfloat16", 1, False, 2000 + 4000 + 1000 + 2000),
    ("bfloat16", 1, True, 2000 + 4000 + 0 + 0),
    ("bfloat16", 2, False, 2000 + 1000 + 1000 + 2000),
    ("bfloat16", 2, True, 2000 + 0 + 0 + 0),
    ("bfloat16", 3, False, 500 + 1000 + 1000 + 2000),
    ("bfloat16", 3, True, 500 + 0 + 0 + 0),
    ("float32", 0, False, 4000 + 4000 + 0 + 8000),
    ("float32", 2, False, 4000 + 1000 + 1000 + 2000),
]


@pytest.mark.parametrize(("dtype", "stage", "offloads", "expected"), STATES)
def test_training_state_has_one_formula_that_is_the_hand_worked_one(
    dtype: str, stage: int | None, offloads: bool, expected: int
) -> None:
    """The plan and the error message name the same bytes (ZeRO-2, offloaded)."""
    changes = {"model.dtype": dtype, "train.zero_stage": "null" if stage is None else stage}
    config = config_of(**changes, **{"train.offload_optimizer": "true"} if offloads else {})
    assert state_bytes(config, 1000, 0, world_size=4) == expected
    shape = ModelShape(
        width=1, ffn=1, queries=1, keys=1, layers=1, vocabulary=1, has_qk_norm=False,
        num_parameters=1000, layer_parameters=1,
    )  # fmt: skip
    names = {term.name: term.num_bytes for term in state_terms(state_setup(config, world_size=4), 1000, 0)}
    planned = memory_plan(shape, state_setup(config, world_size=4)).terms
    assert sum(term.num_bytes for term in planned if term.name in names) == expected


def test_an_adapter_keeps_its_base_frozen() -> None:
    changes = {"model.path": "x", "adapter.rank": 8, "model.dtype": "bfloat16"}
    config = config_of(**changes)
    assert state_bytes(config, 1000, 5000, world_size=1) == 1000 * (4 + 4 + 8) + 5000 * 2
    config = config_of(**changes, **{"train.zero_stage": 3})
    assert state_bytes(config, 1000, 5000, world_size=4) == (1000 * (2 + 4 + 4 + 8) + 5000 * 2) // 4


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_running_out_of_memory_names_settings_with_numbers(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idlm.train.planning.estimate._gpu_figures", lambda: "139.0 GiB allocated at most")
    config = config_of(**{"train.batch_size": 4, "train.zero_stage": 1, "model.dtype": "bfloat16"})
    caught = refused("IDLM-0517", explain_out_of_memory, error, config, nn.Linear(1000, 1000), world_size=8)
    for word in (
        "train.batch_size=2 train.accumulation=2",
        "model.gradient_checkpointing=true",
        "train.zero_stage=2",
        "train.zero_stage=3",
        "train.offload_optimizer=true",
    ):
        assert word in caught.fix
    explain_out_of_memory(RuntimeError("something else"), config, nn.Linear(1, 1), world_size=8)


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"stage": 2, "overlap_comm": True, "reduce_bucket_size": 7}, 7 * 10**8),
        ({"stage": 1, "overlap_comm": True, "reduce_bucket_size": "auto"}, 7 * 10**8),
        ({"stage": 2, "overlap_comm": True, "reduce_bucket_size": 9e8}, 9 * 10**8),
        ({"stage": 2, "overlap_comm": True}, 7 * 10**8),
        # Nothing is freed on another stream.
        ({"stage": 2, "overlap_comm": False, "reduce_bucket_size": 7}, 7),
        ({"stage": 3, "overlap_comm": True, "reduce_bucket_size": 7}, 7),
    ],
)
def test_buckets_hold_the_largest_gradient(given: dict[str, object], held: int) -> None:
    head, frozen = torch.empty(7 * 10**8, device="meta"), torch.empty(2 * 10**9, device="meta")
    settings = {"zero_optimization": dict(given)}
    hold_gradients(settings, [head.requires_grad_(), frozen])
    assert settings["zero_optimization"]["reduce_bucket_size"] == held
