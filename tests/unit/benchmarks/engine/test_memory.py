"""The memory benchmark without a GPU: its sizes, its search, its processes and its rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.engine import memory
from benchmarks.engine.canvas.executor import PRODUCT_ARMS, ExecutorArm
from benchmarks.engine.canvas.native import NativeModel, empty_model, masked_logits, random_canvas
from benchmarks.engine.canvas.sizes import length_floor
from benchmarks.engine.canvas.tasks import ARMS, Task, TaskFailedError, run_in_process
from benchmarks.models import family_of, model_spec
from benchmarks.results import read_rows
from idlm.infer.models.base import TensorNames
from idlm.infer.models.dense import weight_targets


def fake_answer(task: Task, *, timeout_s: float) -> dict[str, Any]:
    """What a GPU would answer; `compile` never does."""
    if task.arm == "compile":
        raise TaskFailedError("InductorError: no")
    milliseconds = {"native": 40.0, "masked": 30.0}.get(task.arm, 25.0)
    plan = {"planned_bytes": 101, "workspace_bytes": 100, "planned_live_bytes": 100}
    planned = plan if task.arm in PRODUCT_ARMS else {}
    memory_use = {"live_bytes": 100, "reserved_bytes": 130, "physical_bytes": 101, **planned}
    answers: dict[str, dict[str, Any]] = {
        "l_max": {"length": task.length + ALLOCATOR_GAIN * task.expandable, "reason": "out", "probes": []},
        "step": {"lengths": {str(length): {"ms": milliseconds} for length in task.lengths}},
        "rates": {"matmul": 7e14, "attention": dict.fromkeys(map(str, task.lengths), 6e14)},
        "timeline": {**memory_use, "points": [(0.0, 50.0), (1.0, 100.0)], "peak_over_average": 1.5},
    }
    return answers[task.kind]


ALLOCATOR_GAIN = 100


@pytest.fixture
def on_a_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "run_in_process", fake_answer)


CASES = {
    "l_max_tokens": "model cap_gib prompt_share arm allocator",
    "l_max_over": "model cap_gib arm",
    "step_ms": "model length prompt_share arm",
    "planned_over_live": "arm",
    "physical_over_planned": "arm",
    "peak_over_average": "arm",
    "reserved_over_live": "arm",
}
"""Metrics, and the keys of their cases."""


@pytest.mark.usefixtures("on_a_fake_gpu")
def test_every_part_leaves_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"results={tmp_path}", "device=cpu", f"figures={tmp_path}"]
    assert memory.measure(arguments) == 0
    rows = read_rows("memory", results=tmp_path)
    assert {row["metric"]: " ".join(row["case"]) for row in rows} == CASES
    assert {row["case"]["arm"] for row in rows if "arm" in row["case"]} == set(ARMS) - {"compile"}
    assert {row["command"] for row in rows} == {"python -m benchmarks.memory"}
    [ours] = [
        row
        for row in rows
        if row["metric"] == "l_max_tokens"
        and row["case"]["arm"] == "ours"
        and row["case"]["prompt_share"] == 0.5
    ]
    assert ours["floor"] == length_floor(model_spec("llada_8b"), "ours", 0.5, 24)
    assert ours["share_of_floor"] == pytest.approx(0.97, abs=0.02)
    over = {row["case"]["arm"]: row["value"] for row in rows if row["metric"] == "l_max_over"}
    assert over["native"] == pytest.approx(21, abs=1)
    step = next(row for row in rows if row["metric"] == "step_ms" and row["case"]["arm"] == "ours")
    assert step["ratio"] == pytest.approx(25 / 25)
    assert step["floor"] > 0
    printed = capsys.readouterr().out
    assert "l_max llada_8b compile share=0.5 cap=24: InductorError: no" in printed
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == [
        "memory_l_max_llada_8b_24gib.svg",
        "memory_timelines.svg",
    ]


def test_a_process_answers_or_says_why_not() -> None:
    small = {"model": "tiny_llada", "arm": "masked", "device": "cpu", "dtype": "float32"}
    answer = run_in_process(Task(kind="step", lengths=(32,), **small), timeout_s=120)
    assert answer["lengths"]["32"]["ms"] > 0
    with pytest.raises(TaskFailedError, match="status 3: the end"):
        program = ("-c", "import sys; print('the end', file=sys.stderr); sys.exit(3)")
        run_in_process(Task(kind="step", **small), timeout_s=60, program=program)
    with pytest.raises(TaskFailedError, match="no answer in 1 s"):
        run_in_process(Task(kind="step", **small), timeout_s=1, program=("-c", "import time; time.sleep(60)"))


CPU = torch.device("cpu")
TOLERANCE = 1e-4


def loaded_model(tensors: Mapping[str, Tensor], names: TensorNames) -> NativeModel:
    """A native LLaDA with the tensors of a checkpoint."""
    model = empty_model(model_spec("tiny_llada"), CPU, torch.float32)
    theirs = {"embed.weight": names.embed, "norm.weight": names.final_norm, "head.weight": names.head}
    parts = {"attention_norm.weight": names.attention_norm, "mlp_norm.weight": names.mlp_norm}
    kinds = {"attention.{}_proj": ("q", "k", "v", "o"), "mlp.{}_proj": ("gate", "up", "down")}
    for module, letters in kinds.items():
        for letter in letters:
            parts[f"{module.format(letter)}.weight"] = f"{getattr(names, letter)}.weight"
    for layer in range(2):
        theirs |= {f"layers.{layer}.{part}": name.format(layer) for part, name in parts.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[theirs[name]])
    return model


@pytest.mark.parametrize("arm", PRODUCT_ARMS)
def test_our_arms_propose_what_the_native_arms_do(arm: str) -> None:
    spec = model_spec("tiny_llada")
    ours = ExecutorArm(arm, "tiny_llada", num_layers=None, device=CPU, dtype=torch.float32)
    canvas = random_canvas(40, 0.5, vocab=spec.vocab_size, mask_id=127, device=CPU)
    trunk, names = ours._runner._trunk, family_of("tiny_llada").tensor_names
    tensors = {name: target.view for name, target in weight_targets(trunk, names).items()}
    native = loaded_model(tensors, names)
    logits_MV = masked_logits(native, canvas.ids_BL, canvas.index_M, is_shifted=False)
    # The product never predicts the mask.
    logits_MV[:, 127] = -torch.inf
    best_M2 = logits_MV.topk(2).values
    assert float((best_M2[:, 0] - best_M2[:, 1]).min()) > TOLERANCE
    confidence_M, expected_M = logits_MV.double().softmax(-1).max(-1)
    tokens_M, own_M = ours.propose(canvas)
    assert tokens_M.tolist() == expected_M.tolist()
    torch.testing.assert_close(own_M.double(), confidence_M, atol=TOLERANCE, rtol=0)
    points = ours.timeline(canvas)
    assert max(size for _, size in points) == ours.plan(canvas).live_bytes
    assert ours.planned(canvas)["planned_bytes"] > ours.plan(canvas).peak_bytes
    ours.shrink()
    assert ours._arena.num_bytes == 0
