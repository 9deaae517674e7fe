"""The memory plan against what autograd keeps, and its laws; the plan of time and disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from idlm.config.compose import compose
from idlm.lora import AdapterSpec
from idlm.train.config.schema import TrainConfig
from idlm.train.data.dataset import collate
from idlm.train.data.layout import pack_rows
from idlm.train.model import attention as attention_file
from idlm.train.model.gated_lora import add_adapter
from idlm.train.objectives.base import Terms
from idlm.train.objectives.curriculum import Curriculum, Stage
from idlm.train.planning import state as estimate
from idlm.train.planning.estimate import Estimate, remedies, run_setup
from idlm.train.planning.flops import TokenCounts, span, work_of
from idlm.train.planning.memory import (
    DEVICE_BYTES,
    ModelShape,
    memory_plan,
    saved_per_mask_row,
    saved_per_row,
    shape_of,
)
from idlm.train.planning.state import GIB, DiskPlan, RunSetup, check_disk
from idlm.train.step import BodyAndHead
from tests.errors import refused
from tests.tiny_training import random_sample, stage_of, tiny_objective

ROWS, LAYERS, RANK = 64, 3, 8


@torch.library.custom_op("idlm_tests::stand_in", mutates_args=())
def stand_in(query_BNTH: torch.Tensor, key_BKTH: torch.Tensor, value_BKTH: torch.Tensor) -> torch.Tensor:
    """Opaque to the compiler, and keeps what an attention kernel keeps: queries, keys, values, its output."""
    return query_BNTH.transpose(1, 2).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("idlm_tests::stand_in_backward", mutates_args=())
def stand_in_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
) -> list[torch.Tensor]:
    return [torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)]


stand_in.register_fake(lambda query, key, value: query.new_empty(query.transpose(1, 2).shape))
stand_in_backward.register_fake(
    lambda grad, query, key, value, output: [torch.empty_like(one) for one in (query, key, value)]
)
stand_in.register_autograd(
    lambda ctx, grad: tuple(stand_in_backward(grad, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


def plan_stand_in(module, query, key, value, mask, **_):
    return stand_in(query, key, value), None


def decoder(family: str, dtype: torch.dtype, attention: str = "plan_stand_in"):
    AttentionInterface.register("plan_stand_in", plan_stand_in)
    config = AutoConfig.for_model(
        family, hidden_size=96, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, vocab_size=512, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()


@pytest.mark.parametrize(
    ("family", "is_counted"), [("gpt2", False), ("falcon", True), ("bloom", True), ("mamba", False)]
)
def test_an_architecture_of_other_names_has_no_estimate_instead_of_a_crash(
    family: str, is_counted: bool
) -> None:
    config = AutoConfig.for_model(
        family, hidden_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
    )
    config.intermediate_size = 256
    if family == "mamba":
        del config.num_attention_heads
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape_of(model) is None
    assert (work_of(model) is not None) == is_counted


def kept_bytes(model, *, autocast: bool = False) -> int:
    """Bytes of distinct storages that the decoder's forward pass saves, weights left out."""
    weights = {value.untyped_storage().data_ptr() for value in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage().data_ptr()
        if key not in weights:
            kept[key] = tensor
        return tensor

    ids = torch.randint(0, 512, (1, ROWS))
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        model.model(
            input_ids=ids, attention_mask=mask, position_ids=torch.arange(ROWS)[None], use_cache=False
        )
    # Under autocast narrow copies of the weights are kept, a term of its own in the plan.
    return sum(t.untyped_storage().nbytes() for t in kept.values() if ROWS in t.shape)


def planned_bytes(shape: ModelShape, run: RunSetup) -> int:
    per_row, _ = saved_per_row(shape, run)
    per_mask_row, _ = saved_per_mask_row(shape, run)
    stream = 4 if run.autocast else run.size
    last_norm = 0 if run.rank else stream
    return ROWS * (LAYERS * per_row + (4 + last_norm) * shape.width) + LAYERS * run.mask_rows * per_mask_row


def setup(**changes) -> RunSetup:
    return RunSetup(rows=ROWS, targets=ROWS, mask_rows=0, **changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_an_eager_layer_keeps_what_is_planned(family: str, dtype: torch.dtype) -> None:
    model = decoder(family, dtype)
    planned = planned_bytes(shape_of(model), setup(is_bf16=dtype == torch.bfloat16))
    assert kept_bytes(model) == pytest.approx(planned, rel=0.03)


def test_autocast_keeps_what_is_planned() -> None:
    model = decoder("qwen3", torch.float32)
    planned = planned_bytes(shape_of(model), setup(is_bf16=False, autocast=True))
    assert kept_bytes(model, autocast=True) == pytest.approx(planned, rel=0.03)


@pytest.mark.parametrize(
    ("attention", "is_checkpointed"), [("idlm_split", False), ("idlm_split", True), ("idlm_flex", False)]
)
def test_a_gated_adapter_keeps_what_is_planned(
    monkeypatch: pytest.MonkeyPatch, attention: str, is_checkpointed: bool
) -> None:
    """Noisy rows that run by themselves, and the keys and values of clean rows; all weights bfloat16."""
    monkeypatch.setattr(
        attention_file,
        "split_attention_ranges",
        lambda query, key, value, *_, **__: stand_in(query, key, value),
    )
    monkeypatch.setattr(
        attention_file,
        "_flex_kernel",
        lambda _: lambda query, key, value, **_: stand_in(query, key, value).transpose(1, 2),
    )
    attention_file.register_attention()
    model, batch = decoder("qwen3", torch.bfloat16, attention), gated_batch()
    shape, alive, kept = shape_of(model), [], {}
    add_adapter(model, AdapterSpec(rank=RANK, alpha=16.0))
    model.to(torch.bfloat16)
    weights = {value.untyped_storage().data_ptr() for value in model.parameters()}
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        return tensor

    def compute(head, hidden):
        return Terms(sums=hidden.new_zeros(1), loss=hidden.float().sum())

    runner = BodyAndHead(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        runner.terms(model, batch, attention, compute)
    for tensor in (*alive, *(one for layer in model.model.layers for one in layer.self_attn.clean_keys)):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    mask_rows, rows = len(batch["gate_index"]), len(batch["gate_index"]) + len(batch["clean_rows"])
    run = RunSetup(
        rows=rows, targets=mask_rows, mask_rows=mask_rows, rank=RANK, zero_stage=1,
        is_checkpointed=is_checkpointed, adapter_parameters=1, attention=attention,
    )  # fmt: skip
    name = "inputs of layers" if is_checkpointed else "layers"
    [planned] = [t.num_bytes for t in memory_plan(shape, run).terms if t.name.endswith(name)]
    last_norm = mask_rows * (4 + 2) * shape.width
    found = sum(size for location, size in kept.items() if location not in weights)
    assert found == pytest.approx(planned + last_norm, rel=0.04)


def gated_batch() -> dict[str, torch.Tensor]:
    """Two packed rows with other numbers of noisy than of clean rows."""
    items = []
    for b in range(2):
        rows = tiny_objective().rows(random_sample(b, prompt=20, response=90 + 30 * b), stage_of(3))
        items.append(pack_rows([rows], 270, pad_token_id=0) | {"item_id": b, "stage": 0})
    return collate(items)


@pytest.mark.sweep
def test_a_compiled_layer_keeps_what_is_planned() -> None:
    model = decoder("qwen3", torch.bfloat16)
    for layer in model.model.layers:
        layer.compile(dynamic=False, backend="aot_eager_decomp_partition")
    planned = planned_bytes(shape_of(model), setup(is_compiled=True))
    assert kept_bytes(model) == pytest.approx(planned, rel=0.04)


SHAPE = ModelShape(
    width=4096, ffn=12288, queries=4096, keys=1024, layers=36, vocabulary=151936, has_qk_norm=True,
    num_parameters=8_190_735_360, layer_parameters=192_946_432,
)  # fmt: skip
RUN = RunSetup(rows=8192, targets=8190, mask_rows=4095, world_size=8, zero_stage=2, is_compiled=True)


def peak(**changes) -> int:
    return memory_plan(SHAPE, replace(RUN, **changes)).peak_allocated


def test_qwen3_8b_on_eight_gpus_is_the_sum_of_its_terms() -> None:
    plan = memory_plan(SHAPE, RUN)
    states = sum(term.num_bytes for term in plan.terms[:4])
    assert states == pytest.approx(SHAPE.num_parameters * (2 + 16 / 8), rel=1e-6)
    assert sum(term.num_bytes for term in plan.terms) == plan.peak_allocated < plan.device_bytes
    assert all(term.formula for term in plan.terms)
    assert 36 * 8192 * 137_216 in [term.num_bytes for term in plan.terms]


def test_what_shards_more_or_keeps_less_needs_less() -> None:
    stages = [peak(zero_stage=stage) for stage in (0, 1, 2, 3)]
    assert stages == sorted(stages, reverse=True) and len(set(stages)) == 4
    assert peak(world_size=16) < peak(world_size=8) < peak(world_size=4)
    assert peak(is_checkpointed=True) < peak() < peak(is_compiled=False)
    some = [peak(is_checkpointed=True, recomputed_layers=layers) for layers in (36, 24, 12)]
    assert peak(is_checkpointed=True) == some[0] < some[1] < some[2] < peak()
    assert peak(offloads=True) < peak()
    assert peak(rank=128, adapter_parameters=350_000_000) < peak()
    assert peak(rows=4096) < peak() < peak(rows=16384)


def test_dense_masks_grow_with_the_square_of_a_row() -> None:
    one, two = (peak(attention="idlm_sdpa", rows=rows) - peak(rows=rows) for rows in (8192, 16384))
    assert one == 8192**2 * (1 + 2 * SHAPE.layers) and two == 4 * one
    assert peak(attention="idlm_sdpa", rows=16384, batch_size=2) - peak(rows=16384) == 2 * one


def test_disk_and_spans_of_time() -> None:
    disk = DiskPlan(
        checkpoint_bytes=100, num_checkpoints=3, export_bytes=10, num_exports=2, free_bytes=320, location="/x"
    )
    assert disk.needed_bytes == 320 and disk.problem is None
    assert "/x" in str(replace(disk, free_bytes=319).problem)
    assert [span(s) for s in (0.25, 33, 7200, 90000)] == ["0.25 s", "33 s", "2 h 0 min", "1 d 1 h"]


SHAPE_32B = ModelShape(
    width=5120, ffn=25600, queries=8192, keys=1024, layers=64, vocabulary=151936, has_qk_norm=True,
    num_parameters=32_762_123_264, layer_parameters=487_598_336,
)  # fmt: skip
ADAPTER_32B = 8_589_934_592


def estimate_32b(*overrides: str, adapter_parameters: int = ADAPTER_32B) -> tuple[TrainConfig, Estimate]:
    """The recipe of Qwen3-32B on 8 GPUs, with full rows of 4096 tokens and as many MASK rows."""
    config = compose("train", TrainConfig, ["recipe=qwen3_32b", *overrides])
    fed = TokenCounts(clean_rows=4096, noisy_rows=4096, clean_targets=4095, noisy_targets=4095)
    setup = run_setup(config, 8192, fed, num_adapted=adapter_parameters, world_size=8)
    planned = Estimate(
        shape=SHAPE_32B, setup=setup, memory=memory_plan(SHAPE_32B, setup), time=None, is_counted=True,
        row_length=8192, fed=fed,
    )  # fmt: skip
    return config, planned


def test_the_recipe_of_qwen3_32b_fits_a_node_of_eight_h100_by_its_own_plan() -> None:
    _, planned = estimate_32b()
    assert planned.memory.device_bytes < DEVICE_BYTES["H100"]
    _, kept = estimate_32b("model.gradient_checkpointing=false")
    assert kept.memory.device_bytes > DEVICE_BYTES["H200"], "what it said before"


def test_the_fix_of_a_memory_problem_names_what_lowers_the_largest_term() -> None:
    shown = remedies(*estimate_32b("model.gradient_checkpointing=false"))
    assert shown[0].startswith("model.gradient_checkpointing=true (then ") and shown[0].endswith(" GiB)")
    assert any(text.startswith("train.max_length=2048 ") for text in shown)
    assert not any("zero_stage" in text or "offload" in text or "GPUs" in text for text in shown), shown
    _, fitting = estimate_32b()
    assert f"(then {fitting.memory.device_bytes / GIB:.1f} GiB)" in shown[0], (
        "what is promised is what is planned"
    )


def test_a_run_checks_the_disk_that_its_plan_needs_and_counts_what_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose("train", TrainConfig, [f"output_dir={tmp_path / 'out'}", "train.save_every=4"])
    stage = Stage(index=0, stride=2, num_steps=10, clean_weight=0.2)
    curriculum = Curriculum(stages=(stage,), global_batch=1)
    # 100 float32 weights: three checkpoints of weights and two moments (one is being written), one export.
    model = torch.nn.Linear(10, 10, bias=False)
    needed = 100 * (3 * 12 + 4)
    free = SimpleNamespace(free=needed)
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: free)
    check_disk(config, model, curriculum)
    free.free -= 1
    refused("IDLM-0520", check_disk, config, model, curriculum)
    written = tmp_path / "out" / "run" / "checkpoint-4" / "weights"
    written.parent.mkdir(parents=True)
    written.write_bytes(b"x")
    check_disk(config, model, curriculum)
    short = Curriculum(stages=(replace(stage, num_steps=3),), global_batch=1)
    free.free = 100 * (12 + 4)
    check_disk(config, model, short)
