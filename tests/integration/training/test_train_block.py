"""`objective=block` by the command a user types: data path, packing, stages, resume, export, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from idlm.checkpoint import verify
from idlm.semantics import Semantics
from idlm.train import cli
from tests.integration.training.stopped_runs import assert_same_weights, train_with_a_stop

BASE = Path(__file__).parents[3] / "recipes/assets/tiny_ar"


def arguments(output: Path, **changes: object) -> list[str]:
    values = {
        "output_dir": output,
        "model.path": BASE,
        "train.stages": "[{stride: 2, steps: 1}, {stride: 4, steps: 3}]",
        "train.steps": "null",
        "train.batch_size": 1,
        "train.row_length": 610,
        "train.threads": 1,
        "train.log_every": 1,
        "train.save_every": 100,
        "eval.every": 3,
        "eval.num_items": 1,
        "report.enabled": "false",
    }
    return ["recipe=tiny_block", *(f"{key}={value}" for key, value in (values | changes).items())]


def losses_of(output: Path) -> list[tuple[int, float, list[float]]]:
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return [(one["step"], one["mask_loss"], one["acceptance"]) for one in map(json.loads, lines)]


def test_a_run_resumes_bitwise_and_exports_what_it_means(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert cli.main(arguments(whole)) == 0
    train_with_a_stop(arguments(stopped), after=2)
    assert losses_of(stopped) == losses_of(whole)
    assert [acceptance for _, _, acceptance in losses_of(whole)] == [[]] * len(losses_of(whole))
    assert_same_weights(whole / "model.safetensors", stopped / "model.safetensors")
    for directory, block_size in ((whole / "stages" / "1-stride-2", 2), (whole, 4)):
        verify(directory)
        semantics = Semantics.load(directory)
        assert (semantics.causality, semantics.logit_shift) == ("block", False)
        assert semantics.block_size == semantics.stride == block_size
        assert (semantics.mask_token_id, semantics.stop_token_ids) == (165, (2,))


@pytest.mark.sweep
def test_a_dry_run_marks_the_grid_and_the_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments(tmp_path / "out"), "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    assert "[[" in shown
    assert "<eos>]]" in shown
    assert "stride 4" in shown


def test_what_block_diffusion_has_not_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        "train.stages": "[{stride: 4, steps: 2, clean_weight: auto}]",
        "adapter": "{rank: 4}",
    }
    assert cli.main(arguments(tmp_path / "out", **wrong)) == 2
    shown = " ".join(capsys.readouterr().err.split())
    for expected in ("has no clean loss", "takes no gated adapter"):
        assert expected in shown
