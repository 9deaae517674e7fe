"""A run that is started while it runs, or again when it is finished."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from idlm.checkpoint import verify
from idlm.config.compose import compose
from idlm.train import cli, pipeline
from idlm.train.checkpoint.resume import exclusive_output
from idlm.train.config.schema import TrainConfig
from idlm.train.report import SampleReport
from tests.integration.training.test_train_tiny import arguments
from tests.tiny_training import write_tiny_base

CHANGES = {"train.stages": "[{stride: 2, steps: 2}]", "report.enabled": "true"}


def no_samples(directory: Path, num_samples: int) -> SampleReport:
    return SampleReport()


def refused(*args: object, **kwargs: object) -> SampleReport:
    raise AssertionError("nothing is loaded, published or sampled")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and the output_dir of a finished run of two steps."""
    base, output = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("finished") / "out"
    write_tiny_base(base)
    assert cli.main(arguments(base, output, **CHANGES), sampler=no_samples) == 0
    return base, output


def files_of(output: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_a_finished_run_is_reported_and_not_repeated(
    given: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, output = given
    before = files_of(output)
    monkeypatch.setattr(pipeline, "prepare", refused)
    assert cli.main(arguments(base, output, **CHANGES), sampler=refused) == 0
    shown = capsys.readouterr().out
    assert f"finished 2 steps, and its checkpoint in {output} is intact" in shown
    assert f"report: {output / 'report.md'}" in shown
    assert files_of(output) == before


def test_a_finished_run_of_several_processes_does_nothing_either(
    given: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 looks and tells the others; a single process looks before it imports the training."""
    base, output = given
    config = compose("train", TrainConfig, arguments(base, output, **CHANGES))
    monkeypatch.setattr(pipeline, "is_distributed", lambda: True)
    monkeypatch.setattr(pipeline, "prepare", refused)
    outcome = pipeline.run_training(config, console=Console(), sampler=refused)
    assert outcome.signal is None and outcome.report is None
    assert f"report: {output / 'report.md'}" in capsys.readouterr().out


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.sweep
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_finished_run_publishes_again_what_is_removed_or_damaged(
    damage: Callable[[Path], None], given: tuple[Path, Path], tmp_path: Path
) -> None:
    base, output = given[0], tmp_path / "out"
    shutil.copytree(given[1], output)
    weights = output / "model.safetensors"
    before, metrics = weights.read_bytes(), (output / "run" / "metrics.jsonl").read_text()
    damage(weights)
    assert cli.main(arguments(base, output, **CHANGES), sampler=no_samples) == 0
    verify(output)
    assert weights.read_bytes() == before
    assert (output / "run" / "metrics.jsonl").read_text() == metrics, "nothing is trained again"


def test_other_settings_or_a_new_run_are_no_finished_run(
    given: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, output = given
    monkeypatch.setattr(pipeline, "prepare", refused)
    assert cli.main(arguments(base, output, **CHANGES, **{"train.learning_rate": 0.1})) == 2
    assert "IDLM-0507" in capsys.readouterr().err
    for changes in ({"export.dtype": "bfloat16"}, {"report.num_samples": 3}):
        with pytest.raises(AssertionError, match="nothing is loaded"):
            cli.main(arguments(base, output, **CHANGES, **changes))


@pytest.mark.sweep
def test_a_second_run_in_one_output_dir_ends_at_once_and_a_dry_run_does_not(
    given: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, output = given
    before = files_of(output)
    with exclusive_output(str(output)):
        monkeypatch.setattr(pipeline, "prepare", refused)
        assert cli.main(arguments(base, output, **CHANGES, resume="never")) == 2
        assert "IDLM-0525" in capsys.readouterr().err
        assert cli.main(arguments(base, output, **CHANGES, dry_run="true")) == 0
    assert files_of(output) == before
