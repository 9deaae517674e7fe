"""The command a user types, on a random tiny model: it trains, resumes bitwise, stops on a signal, exports
stock files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from idlm.checkpoint import FOR_PEOPLE, verify
from idlm.errors import UserError
from idlm.semantics import Semantics
from idlm.tasks.tokenizer import save_tokenizer
from idlm.train import cli
from idlm.train.check import PUBLISHED_FILES
from idlm.train.checkpoint.base_files import BaseFiles
from idlm.train.checkpoint.export import export
from idlm.train.model.load import random_model
from idlm.train.report import Measurement, SampleReport, SampleText
from idlm.train.step import BodyAndHead
from tests.integration.training.stopped_runs import assert_same_weights, ctrl_c_after, failing_after
from tests.tiny_training import tiny_config

STAGES = (
    "[{stride: 2, steps: 3, clean_weight: 0.2}, {stride: 3, steps: 2, clean_weight: 0.2}, "
    "{stride: 4, steps: 5, clean_weight: auto}]"
)


def arguments(base: Path, output: Path, **changes: object) -> list[str]:
    values = {
        "output_dir": output,
        "model.path": base,
        "data.source": "task",
        "train.stages": STAGES,
        "train.batch_size": 2,
        "train.max_length": 300,
        "train.row_length": 560,
        "train.learning_rate": 0.003,
        "train.device": "cpu",
        "train.threads": 1,
        "train.log_every": 1,
        "train.save_every": 4,
        "report.enabled": "false",
    }
    return [f"{key}={value}" for key, value in (values | changes).items()]


def metrics_of(output: Path) -> list[dict]:
    def is_timing(name: str) -> bool:
        return "second" in name or "flops" in name

    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not is_timing(k)} for line in lines]


@pytest.fixture(scope="module")
def finished(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run of ten steps, with a report."""
    output = tmp_path_factory.mktemp("finished") / "out"

    def sampler(directory: Path, num_samples: int) -> SampleReport:
        verify(directory)
        return SampleReport(
            samples=(SampleText(prompt="Sam has", response="```fence```", verdict="wrong"),),
            measurements=(Measurement(decoder="isd", acceptance_rate=0.5, tokens_per_forward=2.0),),
        )

    assert cli.main(arguments(base, output, **{"report.enabled": "true"}), sampler=sampler) == 0
    return output


def test_the_export_is_a_stock_checkpoint_with_semantics(finished: Path, base: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    verify(finished)
    published = json.loads((finished / "manifest.json").read_text())["files"]
    assert set(published) - set(FOR_PEOPLE) <= set(PUBLISHED_FILES), (
        "files of these names are refused before training"
    )
    model = AutoModelForCausalLM.from_pretrained(finished, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    config = json.loads((finished / "config.json").read_text())
    assert "idlm" not in json.dumps(config), "the configuration must not name what only idlm knows"
    assert config["use_cache"] is True
    stored = load_file(finished / "model.safetensors")
    loaded = model.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in stored.items())
    before = load_file(base / "model.safetensors")
    assert any(not torch.equal(value, before[name]) for name, value in stored.items()), "nothing was trained"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (finished / name).read_bytes() == (base / name).read_bytes()

    tokenizer = AutoTokenizer.from_pretrained(finished)
    semantics = Semantics.load(finished)
    assert semantics.stride == 4
    assert semantics.mask_token_id == len(tokenizer)
    assert semantics.stop_token_ids == (tokenizer.eos_token_id,)


def test_each_export_has_a_model_card_with_figures_of_the_run(finished: Path, base: Path) -> None:
    metrics = metrics_of(finished)
    for folder, num_steps, num_stages in ((finished / "stages" / "1-stride-2", 3, 1), (finished, 10, 3)):
        front, _, text = (folder / "README.md").read_text().removeprefix("---\n").partition("\n---\n")
        values = yaml.safe_load(front)
        assert values["base_model"] == base.resolve().name and values["library_name"] == "transformers"
        assert values["pipeline_tag"] == "text-generation" and "idlm" in values["tags"]
        assert "license" not in values, "the base names none"
        done = metrics[:num_steps]
        assert done[-1]["step"] == num_steps and f"| steps | {num_steps} of 10 |" in text
        assert f"| tokens trained | {sum(record['num_tokens'] for record in done):,}," in text
        ends = {record["stage"]: record for record in done}
        rows = [line for line in text.splitlines() if "| training text |" in line]
        assert len(rows) == len(ends) == num_stages
        for row, end in zip(rows, ends.values(), strict=True):
            assert all(f"| {value:.3f} |" in row for value in end["acceptance"])
        assert "| source | `task`, generated: ledger |" in text and "AutoModelForCausalLM" in text


def test_the_report_shows_plots_samples_and_measurements(finished: Path) -> None:
    text = (finished / "report.md").read_text()
    for name in ("losses.svg", "acceptance.svg", "tpf.svg"):
        assert f"report/{name}" in text
        assert (finished / "report" / name).stat().st_size > 1000
    assert "50.0 %" in text
    assert "````text\n```fence```\n````" in text


def test_metrics_follow_the_curriculum(finished: Path) -> None:
    records = metrics_of(finished)
    assert [record["step"] for record in records] == list(range(1, 11))
    assert [record["stride"] for record in records] == [2, 2, 2, 3, 3, 4, 4, 4, 4, 4]
    assert [len(record["acceptance"]) for record in records] == [1, 1, 1, 2, 2, 3, 3, 3, 3, 3]
    assert records[0]["clean_weight"] == pytest.approx(0.2)
    for record in records[5:]:
        assert record["clean_weight"] == pytest.approx(record["mask_loss"] / record["clean_loss"], rel=1e-5)


def test_a_stopped_run_resumes_bitwise(
    finished: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    with ctrl_c_after(5):
        assert cli.main(arguments(base, output)) == 130
    assert not (output / "config.json").exists(), "an unfinished run must not look like a checkpoint"
    verify(output / "run" / "checkpoint-6")
    shown = capsys.readouterr().out
    assert "step 6" in shown
    assert shown.rstrip().endswith("resume=auto")
    assert cli.main([*arguments(base, output), "resume=auto"]) == 0
    assert metrics_of(output) == metrics_of(finished)
    assert_same_weights(finished / "model.safetensors", output / "model.safetensors")
    kept = sorted(path.name for path in (output / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-10", "checkpoint-8"], "save_total_limit keeps two"


@pytest.mark.sweep
def test_a_line_of_metrics_is_of_one_stage_and_begins_anew_after_a_stop_within_it(
    finished: Path, base: Path, tmp_path: Path
) -> None:
    whole, stopped, settings = tmp_path / "whole", tmp_path / "stopped", {"train.log_every": 3}
    assert cli.main(arguments(base, whole, **settings)) == 0
    lines = metrics_of(whole)
    assert [(line["step"], line["first_item"] // 2) for line in lines] == [
        *((1, 0), (3, 1), (5, 3), (6, 5), (9, 6), (10, 9))
    ]
    for line in lines:
        steps = metrics_of(finished)[line["first_item"] // 2 : line["step"]]
        assert {step["stride"] for step in steps} == {line["stride"]}
        assert line["num_tokens"] == sum(step["num_tokens"] for step in steps)
        losses = [step["mask_loss"] for step in steps]
        assert min(losses) <= line["mask_loss"] <= max(losses)
    with failing_after(9), pytest.raises(RuntimeError, match="power cut"):
        cli.main(arguments(base, stopped, **settings))
    assert cli.main([*arguments(base, stopped, **settings), "resume=auto"]) == 0
    again = metrics_of(stopped)
    assert again[:4] == lines[:4] and again[5:] == lines[5:]
    assert (again[4]["step"], again[4]["first_item"] // 2) == (9, 8)


def test_a_bad_loss_stops_before_the_optimizer_and_keeps_the_checkpoint(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, seen = BodyAndHead.terms, {}

    def poisoned(self, model, batch, *further):
        terms = plain(self, model, batch, *further)
        if batch["item_ids"].tolist() in ([10], [11]) and terms.loss is not None:
            seen["weights"] = {name: value.detach().clone() for name, value in model.named_parameters()}
            seen["model"] = model
            if batch["item_ids"].tolist() == [11]:
                return replace(terms, loss=terms.loss * float("nan"))
        return terms

    monkeypatch.setattr(BodyAndHead, "terms", poisoned)
    halves = {"train.batch_size": 1, "train.accumulation": 2}
    assert cli.main(arguments(base, tmp_path / "out", **halves)) == 2
    shown = capsys.readouterr().err
    assert "IDLM-0503" in shown
    assert "[11]" in shown, "the data item of step 6 that went bad"
    for name, value in seen["model"].named_parameters():
        assert torch.equal(value, seen["weights"][name]), "the optimizer was not reached"
    verify(tmp_path / "out" / "run" / "checkpoint-4")
    dump = json.loads((tmp_path / "out" / "run" / "bad-loss-step-6-rank-0.json").read_text())
    assert [part["item_ids"] for part in dump["micro_batches"]] == [[10], [11]]
    assert dump["micro_batches"][1]["loss"] == "nan"


def test_a_full_disk_leaves_the_old_checkpoint(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (finished / "manifest.json").read_bytes()
    model = random_model(tiny_config("llama"), attention="idlm_sdpa", dtype=torch.float32, seed=1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(UserError, match="IDLM-0301"):
        export(model, None, Semantics(mask_token_id=5, stride=2), finished, dtype=None, base=BaseFiles())
    assert (finished / "manifest.json").read_bytes() == before
    verify(finished)


def test_another_configuration_may_not_continue_a_run(
    finished: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(base, finished, **{"train.learning_rate": 0.001})) == 2
    shown = capsys.readouterr().err
    assert "IDLM-0507" in shown
    assert "learning_rate: 0.003 -> 0.001" in shown
    elsewhere = finished.parent / "checkpoint-3"
    elsewhere.mkdir()
    assert cli.main(arguments(base, finished, resume=elsewhere)) == 2
    assert "IDLM-0506" in capsys.readouterr().err


def test_all_mistakes_are_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"train.batch_size": 0, "data.source": "tsk", "train.stages": "[{stride: 1, steps: 2}]"}
    assert cli.main(arguments(tmp_path / "nowhere", tmp_path / "out", **changes)) == 2
    shown = capsys.readouterr().err
    for part in ("nowhere", "train.batch_size=0", "data.source='tsk'", "stages[0].stride=1"):
        assert part in shown
    assert not (tmp_path / "out").exists()


def test_a_base_without_a_spare_row_grows_one_and_keeps_its_dtype(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    num_ids = save_tokenizer(base)
    config = tiny_config("llama") | {"vocab_size": num_ids}
    random_model(config, attention="idlm_sdpa", dtype=torch.bfloat16, seed=0).save_pretrained(base)
    stages = "[{stride: 2, steps: 1, clean_weight: 0.2}]"
    assert cli.main(arguments(base, tmp_path / "out", **{"train.stages": stages})) == 0
    rows = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert Semantics.load(tmp_path / "out").mask_token_id == num_ids
    assert len(rows) == 64 * (num_ids // 64 + 1)
    assert rows.dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_new_ar_model_trains_by_the_same_code(tmp_path: Path) -> None:
    output = tmp_path / "out"
    fields = {
        k: v for k, v in tiny_config("qwen3").items() if not k.endswith("_token_id") and k != "vocab_size"
    }
    changes = {
        "objective": "ar",
        "model.path": "null",
        "model.tokenizer": "task",
        "train.stages": "[]",
        "train.steps": 3,
        **{f"model.config.{key}": value for key, value in fields.items()},
    }
    assert cli.main(arguments(Path("unused"), output, **changes)) == 0
    assert not (output / "idlm_config.json").exists(), "a plain AR checkpoint is stock"
    assert json.loads((output / "config.json").read_text())["vocab_size"] % 64 == 0
    assert all("clean_loss" in record and "mask_loss" not in record for record in metrics_of(output))
