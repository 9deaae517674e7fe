"""`dry_run=true`: what it needs, what it lists, what it names."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

from idlm.train import cli
from tests.integration.training.test_train_tiny import arguments


def bare(base: Path, target: Path) -> Path:
    """What a user has before the weights are downloaded: config.json and the tokenizer."""
    target.mkdir()
    for path in base.iterdir():
        if "safetensors" not in path.name:
            shutil.copy(path, target)
    return target


def test_a_dry_run_needs_no_weights_but_misses_them(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "train.stages": "[{stride: 2, steps: 2}, {stride: 3, steps: 3}]",
        "plan.num_gpus": 4,
        "plan.gpu": "H200",
        "dry_run": "true",
    }
    given = arguments(bare(base, tmp_path / "bare"), tmp_path / "out", **changes)
    assert cli.main(given) == 2
    printed = capsys.readouterr()
    assert "has neither model.safetensors" in printed.err and "1 problem" in printed.err
    for part in ("first spare row", "[[|", "stride 3", "4 x H200", "GPUS=4", "one_node.sh"):
        assert part in printed.out
    lines = printed.out.splitlines()
    assert "dry_run=" not in lines[lines.index("# Launch") + 1]
    assert not (tmp_path / "out").exists()


@pytest.mark.sweep_but("cut")
@pytest.mark.parametrize("damage", ["cut", "other shape"])
def test_a_dry_run_looks_at_the_headers_of_weights(
    damage: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    if damage == "cut":
        content = (base / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(content[:-100])
    else:
        config = json.loads((broken / "config.json").read_text()) | {"intermediate_size": 64}
        (broken / "config.json").write_text(json.dumps(config))
    assert cli.main(arguments(broken, tmp_path / "out", dry_run="true")) == 2
    printed = capsys.readouterr().err
    assert ("header" if damage == "cut" else "6 of the wrong shape") in printed


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.stages", "[{stride: 0, fraction: 1.0}]"),
        ("train.steps", 0),
        ("plan.num_gpus", 0),
        ("plan.gpu", "H99"),
        ("train.deepspeed", "/nope.json"),
        ("data.path", "mine.jsonl"),
        ("data", "{source: jsonl, path: ''}"),
        ("data", "{source: hf}"),
        ("data", "{source: hf, sources: [{weight: 1}]}"),
    ],
)
def test_a_dry_run_lists_what_it_cannot_plan_with(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object
) -> None:
    changes = {"dry_run": "true", key: value}
    assert cli.main(arguments(base, tmp_path / "out", **changes)) == 2
    printed = capsys.readouterr()
    assert "IDLM-0550" in printed.err and key in printed.err and printed.err.count("\n  - ") == 1
    assert "Traceback" not in printed.err and "# Configuration" in printed.out and "# Launch" in printed.out


def test_a_disk_too_small_for_the_plan_is_refused_before_training(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from idlm.train.planning import state as estimate

    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    assert cli.main(arguments(base, tmp_path / "out")) == 2
    assert "IDLM-0520" in capsys.readouterr().err
    assert not (tmp_path / "out" / "run").exists()


def titles(output: str) -> list[str]:
    return [line.removeprefix("# ") for line in output.splitlines() if line.startswith("# ")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train.device": "cuda"}, "1 x H200, assumed"),
        ({"plan.gpu": "H100", "plan.num_gpus": 2}, "2 x H100"),
    ],
)
def test_a_dry_run_without_a_gpu_names_the_device_that_it_plans_for(
    changes: dict[str, object],
    expected: str,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    given = arguments(base, tmp_path / "out", **{"dry_run": "true", "train.device": "auto"} | changes)
    assert cli.main(given) == 0
    out = capsys.readouterr().out
    assert f"Plan for {expected}" in titles(out) and f"Time on {expected}" in titles(out)
    assert ("this machine has no GPU" in out) is (expected != "2 x H100")
    assert ("measured here, forward and backward" in out) is ("CPU" in expected)
    assert ("assumed: " in out) is ("CPU" not in expected)
    assert "plan.num_gpus=... plan for" in out


def test_a_dry_run_lists_all_problems_at_once(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from idlm.train.planning import state as estimate

    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    monkeypatch.setitem(vars(sys.modules["idlm.train.planning.dry_run"])["DEVICE_BYTES"], "H200", 1000)
    changes = {"dry_run": "true", "plan.gpu": "H200", "train.warmup": 2}
    assert cli.main(arguments(bare(base, tmp_path / "bare"), tmp_path / "out", **changes)) == 2
    printed = capsys.readouterr().err
    for part in (
        "4 problems",
        "train.warmup=2",
        "has neither model.safetensors",
        "lower train.save_total_limit",
        "a H200 has",
    ):
        assert part in printed
