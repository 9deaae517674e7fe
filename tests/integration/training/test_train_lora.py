"""`idlm-train adapter.rank=...`: trains MASK rows alone, resumes bitwise, publishes an adapter that gives the
base's answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from idlm.checkpoint import verify
from idlm.contracts import SamplingParams
from idlm.infer.cli.generate import generate
from idlm.infer.engine import Engine
from idlm.lora import MASK_ROW, WEIGHTS_FILE, base_identity
from idlm.semantics import Semantics
from idlm.tasks.tokenizer import save_tokenizer
from idlm.train import cli
from idlm.train.model.load import random_model
from tests.errors import refused
from tests.integration.training.stopped_runs import assert_same_weights, train_with_a_stop
from tests.integration.training.test_train_tiny import arguments, metrics_of
from tests.tiny_training import tiny_config

STAGES = "[{stride: 2, steps: 2}, {stride: 3, steps: 3}]"
PROMPTS = ["Lea has 9 shells. Lea wins 3. How many shells does Lea have?", "Tom has 4 books."]
"""Texts of the task, for answers of a model that has learnt nothing."""


def write_base(directory: Path, family: str, *, spare_rows: bool) -> Path:
    directory.mkdir(parents=True)
    num_ids = save_tokenizer(directory)
    config = tiny_config(family) | {"vocab_size": 192 if spare_rows else num_ids}
    random_model(config, attention="idlm_sdpa", dtype=torch.float32, seed=0).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("home") / "base", "qwen3", spare_rows=True)


def lora_arguments(base: Path, output: Path, **changes: object) -> list[str]:
    adapter = {"adapter.rank": 4, "adapter.alpha": 8, "train.stages": STAGES, "train.save_every": 2}
    return arguments(base, output, **(adapter | changes))


@pytest.fixture(scope="module")
def finished(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run of five steps, with the command's own report."""
    output = tmp_path_factory.mktemp("finished") / "out"
    assert cli.main(lora_arguments(base, output, **{"report.enabled": "true", "report.num_samples": 2})) == 0
    return output


def test_the_result_is_an_adapter_of_the_base(finished: Path, base: Path) -> None:
    verify(finished)
    assert not (finished / "config.json").exists()
    assert not (finished / "model.safetensors").exists()
    semantics = Semantics.load(finished)
    assert semantics.gated
    assert semantics.stride == 3
    assert semantics.base_identity == base_identity(base)
    config = json.loads((finished / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    stored = load_file(finished / WEIGHTS_FILE)
    assert MASK_ROW not in stored
    assert len(stored) == 2 * 7 * 2
    assert all(value.any() for value in stored.values()), "nothing was trained"
    assert "Sample generations" in (finished / "report.md").read_text()
    losses = [record["mask_loss"] for record in metrics_of(finished)]
    assert losses[-1] < losses[0] and {record["clean_weight"] for record in metrics_of(finished)} == {0.0}
    start = load_file(finished / "run" / "checkpoint-4" / "model.safetensors")
    assert start and all("lora_" in name for name in start), "a checkpoint holds no frozen weight"


def answers(model: Path, decoder: str | None = None) -> list[tuple[Any, str]]:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    done = Engine.from_pretrained(model, decoder, device="cpu").generate(PROMPTS, greedy)
    return [(one.token_ids, one.text) for one in done]


def test_generation_is_the_bases(finished: Path, base: Path) -> None:
    assert answers(finished, "isd") == answers(finished, "ar") == answers(base, "ar")


def test_the_command_line_finds_a_base_that_has_moved(
    finished: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved, adapter = tmp_path / "moved", tmp_path / "adapter"
    shutil.copytree(base, moved)
    shutil.copytree(finished, adapter)
    (adapter / "manifest.json").unlink()
    config = json.loads((adapter / "adapter_config.json").read_text())
    gone = config | {"base_model_name_or_path": str(tmp_path / "gone")}
    (adapter / "adapter_config.json").write_text(json.dumps(gone))
    given = [f"model={adapter}", "-p", PROMPTS[0], "sampling.temperature=0", "sampling.max_tokens=8"]
    refused("IDLM-0611", generate, given)
    capsys.readouterr()
    assert generate([*given, f"base={moved}", "device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert generate([f"model={base}", *given[1:], "decoder=ar", "device=cpu"]) == 0
    assert capsys.readouterr().out == shown


def test_a_stopped_run_resumes_bitwise(finished: Path, base: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    train_with_a_stop(lora_arguments(base, output), after=2)
    assert metrics_of(output) == metrics_of(finished)
    assert_same_weights(finished / WEIGHTS_FILE, output / WEIGHTS_FILE)


@pytest.mark.sweep
def test_a_base_without_a_spare_row_keeps_its_size(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "llama", spare_rows=False)
    output = tmp_path / "out"
    assert cli.main(lora_arguments(base, output, **{"train.stages": "[{stride: 3, steps: 2}]"})) == 0
    num_rows = len(load_file(base / "model.safetensors")["model.embed_tokens.weight"])
    assert Semantics.load(output).mask_token_id == num_rows
    row_D = load_file(output / WEIGHTS_FILE)[MASK_ROW]
    assert not torch.equal(row_D, load_file(base / "model.safetensors")["model.embed_tokens.weight"].mean(0))
    assert answers(output) == answers(base, "ar")


@pytest.mark.sweep
def test_random_ids_in_place_of_masks_are_the_same_after_a_stop(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At stride 16, by overlap; the export decodes as its base, and names the range."""
    changes = {"train.draft_input": "uniform", "train.noise_range": "[1, 60]", "train.distill": "overlap"}
    changes["train.stages"] = "[{stride: 2, steps: 2}, {stride: 16, steps: 3}]"
    output, whole = tmp_path / "out", tmp_path / "whole"
    assert cli.main([*lora_arguments(base, whole, **changes), "dry_run=true"]) == 0
    assert "random ids in [1, 60) in place of a mask token" in capsys.readouterr().out
    train_with_a_stop(lora_arguments(base, output, **changes), after=3)
    assert cli.main(lora_arguments(base, whole, **changes)) == 0
    assert metrics_of(output) == metrics_of(whole)
    assert_same_weights(whole / WEIGHTS_FILE, output / WEIGHTS_FILE)
    semantics = Semantics.load(output)
    assert (semantics.noise_range, semantics.mask_token_id, semantics.stride) == ((1, 60), None, 16)
    assert "random ids in [1, 60)" in (output / "README.md").read_text()
    assert answers(output) == answers(base, "ar")
    assert (
        cli.main(lora_arguments(base, tmp_path / "far", **changes | {"train.noise_range": "[1, 900]"})) == 2
    )
    assert "train.noise_range=[1, 900]" in capsys.readouterr().err


@pytest.mark.sweep
def test_a_distilled_draft_with_a_random_phase_is_trained(base: Path, tmp_path: Path) -> None:
    changes = {"train.distill": "kl", "train.distill_share": 0.5, "train.phase": "random"}
    assert cli.main(lora_arguments(base, tmp_path / "out", **changes)) == 0
    acceptance = [record["acceptance"][0] for record in metrics_of(tmp_path / "out")]
    assert acceptance[-1] > acceptance[0]


@pytest.mark.sweep
@pytest.mark.parametrize("objective", ["idlm", "block"])
def test_an_adapter_without_a_gate_is_published_as_a_whole_checkpoint(
    base: Path, tmp_path: Path, objective: str
) -> None:
    output, merging = tmp_path / "out", {"adapter.gated": "false", "export.merge": "true"}
    changes = merging | {"objective": objective, "train.save_every": 3, "train.learning_rate": 0.01}
    train_with_a_stop(lora_arguments(base, output, **changes), after=3)
    whole = tmp_path / "whole"
    assert cli.main(lora_arguments(base, whole, **changes)) == 0
    assert metrics_of(output) == metrics_of(whole)
    assert_same_weights(whole / "model.safetensors", output / "model.safetensors")
    before, after = (load_file(path / "model.safetensors") for path in (base, output))
    assert before.keys() == after.keys()
    moved = {name.rpartition("_proj")[0] for name in before if not torch.equal(before[name], after[name])}
    assert len(moved) == 2 * 7
    semantics = Semantics.load(output)
    assert not semantics.gated and semantics.base_identity is None
    if objective == "idlm":
        assert [record["clean_weight"] for record in metrics_of(output)] == [pytest.approx(0.2)] * 5
    assert "adapter_config.json" not in {path.name for path in output.iterdir()}
    Engine.from_pretrained(output, device="cpu").generate(PROMPTS, SamplingParams(max_tokens=4))


def test_what_an_adapter_cannot_do_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "export.merge": "true",
        "adapter.rank": 0,
        "train.stages": "[{stride: 2, steps: 1, clean_weight: auto}, {stride: 3, steps: 1, clean_weight: 1}]",
    }
    assert cli.main(lora_arguments(base, tmp_path / "out", **changes)) == 2
    shown = capsys.readouterr().err
    for part in (
        "merging W + BA would change the clean rows",
        "adapter.rank=0",
        "stages[0].clean_weight='auto'",
        "stages[1].clean_weight=1",
    ):
        assert part in shown
    assert cli.main([*arguments(base, tmp_path / "out"), "export.merge=true"]) == 2
    assert "no adapter to merge" in capsys.readouterr().err
    assert cli.main(lora_arguments(base, tmp_path / "out", **{"adapter.gated": "false"})) == 2
    assert "set export.merge=true" in capsys.readouterr().err
    assert cli.main([*arguments(base, tmp_path / "out"), "train.distill=kl"]) == 2
    assert "needs objective=idlm and a gated adapter" in capsys.readouterr().err
    rowless = write_base(tmp_path / "rowless", "llama", spare_rows=False)
    changes = {"adapter.gated": "false", "export.merge": "true"}
    assert cli.main(lora_arguments(rowless, tmp_path / "out", **changes)) == 2
    assert "IDLM-0530" in capsys.readouterr().err
    assert cli.main(lora_arguments(base, tmp_path / "out", **{"adapter.targets": "[q_proj,wqkv]"})) == 2
    assert "no linear layer named wqkv" in capsys.readouterr().err
    assert not (tmp_path / "out" / "adapter_config.json").exists()
