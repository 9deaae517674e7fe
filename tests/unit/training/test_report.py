"""The report of a finished run: without samples, without memory for the engine, and its plots."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from idlm.config.compose import compose
from idlm.train import report, sampler
from idlm.train.checkpoint.base_files import BaseFiles
from idlm.train.config.schema import ReportConfig, TrainConfig
from idlm.train.data.dataset import PackedDataset
from idlm.train.data.packing import FileRows
from idlm.train.loop.progress import Progress
from idlm.train.objectives.curriculum import Curriculum, Stage
from idlm.train.objectives.idlm import IntrospectiveConsistency
from idlm.train.prepare import prepare_data, prepare_tokenizer

LOSSES = [9.0, 5.0, 1.0, 0.2, 0.05, 0.04]


def records() -> list[dict[str, Any]]:
    """A run that logs every 10 steps and at the ends of its stages, 65 and 120."""
    steps = [10, 60, 65, 70, 120, 130]
    stages = [0, 0, 0, 1, 1, 2]
    return [
        {
            "step": step,
            "stage": stage,
            "mask_loss": loss,
            "acceptance": [0.5],
            "seconds": 1.0,
            "num_tokens": 3,
        }
        for step, stage, loss in zip(steps, stages, LOSSES, strict=True)
    ]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    drawn: dict[str, Figure] = {}
    save = Figure.savefig

    def savefig(figure: Figure, path: Path) -> None:
        drawn[path.name] = figure
        save(figure, path)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return drawn


def write(directory: Path, samples: report.SampleReport | None, metrics: list[dict[str, Any]]) -> str:
    return report.write_report(directory, metrics, {}, samples).read_text()


def test_plots_draw_the_ends_of_stages_and_losses_on_a_logarithmic_axis(
    tmp_path: Path, figures: dict[str, Figure]
) -> None:
    write(tmp_path, None, records())
    for figure in figures.values():
        dotted = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_linestyle() == ":"]
        assert dotted == [65, 120]
    write(tmp_path, None, records())
    scales = {name: figure.axes[0].get_yscale() for name, figure in figures.items()}
    assert scales == {"losses.svg": "log", "acceptance.svg": "linear", "tpf.svg": "linear"}
    write(tmp_path, None, [record | {"mask_loss": 0.0} for record in records()])
    assert figures["losses.svg"].axes[0].get_yscale() == "linear", "a logarithm of 0 shows nothing"


def test_the_report_is_also_one_page_with_its_plots_inside(tmp_path: Path) -> None:
    sample = report.SampleText(prompt="<script>alert(1)</script>", response="![x](report/losses.svg)")
    text = write(tmp_path, report.SampleReport(samples=(sample,)), records())
    page = (tmp_path / "report.html").read_text()
    assert page.count('src="data:image/svg+xml;base64,') == text.count("](report/") - 1 == 3
    assert "<script" not in page and "&lt;script&gt;" in page and "<table>" in page
    assert 'src="report' not in page and "http" not in page


@pytest.mark.parametrize("num_samples", [0, 3])
def test_a_report_of_no_samples_asks_for_none(
    num_samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(report, "data_report", lambda *_, **__: SimpleNamespace(lines=list))
    monkeypatch.setattr(report, "estimate_run", lambda *_, **__: None)
    stage = Stage(index=0, stride=2, num_steps=1, clean_weight=0.2)
    prepared: Any = SimpleNamespace(
        curriculum=Curriculum(stages=(stage,), global_batch=1), model=torch.nn.Linear(1, 1), adapter=None,
        draft_input="mask token id 3", tokenizer=None, dataset=None, base=BaseFiles(),
    )  # fmt: skip
    prepared.model.generation_config = SimpleNamespace(to_dict=dict)
    config = TrainConfig(output_dir=str(tmp_path), report=ReportConfig(num_samples=num_samples))

    def sampler(directory: Path, number: int) -> report.SampleReport:
        calls.append(number)
        return report.SampleReport(samples=(report.SampleText(prompt="a", response="b"),) * number)

    written = report.report_run(config, prepared, sampler, seconds=1.0)
    assert calls == [num_samples] * bool(num_samples)
    assert ("Sample generations" in written.read_text()) == bool(num_samples)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
    ],
    ids=["gpu", "host", "torch on the host"],
)
def test_out_of_memory_in_the_engine_of_the_report_fails_no_finished_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def generate(*_: Any) -> report.SampleReport:
        raise error

    monkeypatch.setattr(sampler, "_generate", generate)
    samples = sampler.engine_sampler(TrainConfig())(tmp_path, 8)
    assert "out of memory" in write(tmp_path, samples, [])
    assert "out of memory" in capsys.readouterr().err


def test_another_failure_of_the_engine_is_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def generate(*_: Any) -> report.SampleReport:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(sampler, "_generate", generate)
    with pytest.raises(RuntimeError, match="shapes differ"):
        sampler.engine_sampler(TrainConfig())(tmp_path, 8)


def test_requests_that_fail_before_their_first_pass_have_no_tokens_per_forward() -> None:
    failed = SimpleNamespace(tested_by_position=(), accepted_by_position=(), token_ids=[], num_forwards=0)
    assert sampler._measure("isd", [failed], [None]).tokens_per_forward is None


def test_a_balanced_clean_weight_that_is_out_of_hand_is_told_once_a_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress(tmp_path / "metrics.jsonl", console=Console(file=io.StringIO()))
    state: Any = SimpleNamespace(max_steps=9, global_step=0)
    for step, stage, weight in ((1, 0, 0.2), (2, 1, 99.0), (3, 1, 255.0), (4, 1, 300.0), (5, 2, 130.0)):
        record = {"step": step, "stage": stage, "stride": 4, "clean_weight": weight, "clean_loss": 0.01}
        progress._show(record | {"acceptance": [], "step_seconds": 1.0}, state)
    shown = [message for message in caplog.messages if "clean weight" in message]
    assert len(shown) == 2 and "is 255 at step 3" in shown[0] and "is 130 at step 5" in shown[1]
    assert "train.max_clean_weight=10" in shown[0]


def write_records(path: Path, num: int) -> Path:
    lines = [f'{{"prompt": "Sam has {n}.", "response": "{n}{n}"}}' for n in range(num)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("num", "overrides", "num_prompts", "origin"),
    [
        (40, (), 4, "held-out prompts"),
        (9, (), 1, "held-out prompts"),
        (7, (), 7, "prompts that were trained on"),
        (40, ("eval.holdout=0",), 8, "prompts that were trained on"),
        (40, ("eval.path=OTHER",), 3, "prompts of OTHER"),
        (None, (), 8, "held-out prompts"),
    ],
)
def test_the_report_says_which_prompts_it_measured_and_trains_none_that_it_holds_out(
    num: int | None, overrides: tuple[str, ...], num_prompts: int, origin: str, tmp_path: Path
) -> None:
    other = write_records(tmp_path / "other.jsonl", 3)
    given = ["recipe=tiny", f"output_dir={tmp_path / 'out'}", *overrides]
    if num is not None:
        given.append(f"data.path={write_records(tmp_path / 'data.jsonl', num)}")
    config = compose("train", TrainConfig, [one.replace("OTHER", str(other)) for one in given])
    tokenizer: Any = prepare_tokenizer(config)
    engine: Any = SimpleNamespace(tokenizer=tokenizer)
    prompts, _, shown = sampler._prompts(config, engine, 8)
    assert shown == origin.replace("OTHER", str(other))
    assert len(prompts) == num_prompts
    if num is not None and not overrides:
        objective = IntrospectiveConsistency(mask_token_id=170, mask_region="response")
        dataset = prepare_data(config, tokenizer, objective, 170, 1).dataset
        trained = {
            tuple(dataset.source.sample(one).token_ids[: len(prompts[0])]) for one in trained_by(dataset)
        }
        assert {tuple(prompt) for prompt in prompts}.isdisjoint(trained) is (origin == "held-out prompts")
        assert len(trained_by(dataset)) == num - len(prompts) * (num > 7), "all others train"
    measured = report.Measurement(decoder="isd", acceptance_rate=0.5)
    text = write(tmp_path, report.SampleReport(measurements=(measured,), origin=shown), [])
    assert f"## Measured on {shown}\n" in text


def trained_by(dataset: PackedDataset) -> set[int]:
    assert isinstance(dataset.rows, FileRows)
    return {index for item in range(len(dataset.rows)) for index in dataset.rows.members(item)}
