"""`eval.num_prompts`: the engine answers while a run trains, and `eval.stop_if` ends a run that degrades."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from idlm.config.compose import compose
from idlm.semantics import Semantics
from idlm.train import cli, sampler
from idlm.train.check import check_config
from idlm.train.config.schema import TrainConfig
from idlm.train.loop.progress import EVALUATION, read_metrics
from idlm.train.report import Measurement, Sampler, SampleReport
from tests.errors import refused
from tests.integration.training.test_train_tiny import arguments
from tests.tiny_training import write_tiny_base

STAGES = "[{stride: 2, steps: 2}, {stride: 3, steps: 3}]"
DECODED = {
    "train.stages": STAGES,
    "train.save_every": 1,
    "eval.every": 1,
    "eval.num_items": 1,
    "eval.num_prompts": 2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base"))


def evaluations(output: Path) -> list[dict]:
    return [record for record in read_metrics(output / "run" / "metrics.jsonl") if EVALUATION in record]


def falling(shares: Iterator[float], strides: list[int]) -> Sampler:
    """Exact match as given; notes the stride that the published weights are to be decoded at."""

    def sample(directory: Path, num_samples: int) -> SampleReport:
        assert num_samples == 2
        strides.append(Semantics.load(directory).stride)
        ar = Measurement(decoder="ar", exact_match=0.0, tokens_per_forward=1.0)
        return SampleReport(measurements=(Measurement(decoder="isd", exact_match=next(shares)), ar))

    return sample


@pytest.mark.sweep
def test_the_engine_answers_and_changes_no_weight(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "SAMPLE_TOKENS", 12)
    watched, plain = tmp_path / "watched", tmp_path / "plain"
    assert cli.main(arguments(base, watched, **DECODED | {"eval.every": 2})) == 0
    assert cli.main(arguments(base, plain, **{"train.stages": STAGES})) == 0
    found = evaluations(watched)
    assert [(record["step"], record["stride"]) for record in found] == [(2, 2), (4, 3), (5, 3)]
    for record in found:
        assert 0 <= record["isd_acceptance_rate"] <= 1
        assert 1 <= record["isd_tokens_per_forward"] <= record["stride"]
        assert record["isd_exact_match"] == record["ar_exact_match"] == 0
        assert "ar_acceptance_rate" not in record
    weights, expected = (load_file(path / "model.safetensors") for path in (watched, plain))
    assert all(torch.equal(value, weights[name]) for name, value in expected.items())
    assert not (watched / "run" / "decoded").exists()


@pytest.mark.sweep
def test_a_run_that_degrades_ends_and_can_go_on(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The best value counts, not the one before, and what an earlier stage reached does not."""
    strides: list[int] = []
    words = DECODED | {"eval.stop_if": "{exact_match: 0.1}"}
    sample = falling(iter((0.9, 0.85, 0.5, 0.35)), strides)
    assert cli.main(arguments(base, tmp_path / "out", **words), sampler=sample) == 2
    shown = capsys.readouterr().err
    assert "IDLM-0553" in shown and "step 4: isd_exact_match is 0.350 after 0.500" in shown
    assert strides == [2, 2, 3, 3]
    shares = [record["isd_exact_match"] for record in evaluations(tmp_path / "out")]
    assert shares == [0.9, 0.85, 0.5, 0.35]
    sample = falling(iter((0.45, 0.35)), strides)
    assert cli.main(arguments(base, tmp_path / "out", **words), sampler=sample) == 0
    assert "step 5: isd_exact_match is 0.350 after 0.500" in caplog.text
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("stop_if", "changes", "expected"),
    [
        ("{exact_math: 0.1}", {}, "'exact_math' is not one of exact_match, acceptance_rate"),
        ("{exact_match: 0}", {}, "exact_match=0.0 must be above 0"),
        ("{exact_match: 0.1}", {"data.source": "jsonl", "data.path": "a"}, "data.source=task alone"),
    ],
)
def test_a_condition_that_cannot_be_asked_is_refused(
    base: Path, tmp_path: Path, stop_if: str, changes: dict[str, str], expected: str
) -> None:
    words = arguments(base, tmp_path / "out", **DECODED | changes | {"eval.stop_if": stop_if})
    refused(expected, check_config, compose("train", TrainConfig, words))
