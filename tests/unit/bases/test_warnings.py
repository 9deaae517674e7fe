"""The dry run and the announcement of a run warn of positions and of held-out files that are trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from idlm.train.data.checks import run_warnings
from idlm.train.model.checks import num_positions
from tests.unit.bases.agreement import config_of, of_the_dry_run, of_the_run, small_config, write_base

LENGTHS = np.array([10, 40, 100, 300])
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 32),
        (YARN, 128),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 64),
        ({"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}, 256),
    ],
)
def test_scaled_rotations_give_positions(rope: dict[str, Any], expected: int) -> None:
    config = small_config("llama", max_position_embeddings=32, rope_parameters=rope)
    assert num_positions(config) == expected


def test_positions_have_other_names() -> None:
    assert num_positions(small_config("gpt2", max_position_embeddings=48)) == 48
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    assert (
        num_positions(small_config("llama", max_position_embeddings=131072, rope_parameters=llama3)) == 131072
    )
    assert num_positions(AutoConfig.for_model("bloom")) is None, "distances in place of positions"


@pytest.mark.parametrize(
    ("max_length", "overlong", "words"),
    [
        (32, "error", None),
        (256, "error", "3 of 4 samples are longer; set train.max_length=32 train.overlong=truncate"),
        (256, "truncate", "3 of 4 samples are longer; set train.max_length=32"),
        (256, "drop", "2 of 4 samples are longer"),
        (33, "drop", "no sample is longer now"),
    ],
)
def test_samples_beyond_the_positions_are_counted(
    max_length: int, overlong: str, words: str | None, tmp_path: Path
) -> None:
    changes = {"train.max_length": max_length, "train.overlong": overlong}
    config = config_of(tmp_path / "none", tmp_path / "out", **changes)
    found = run_warnings(config, small_config("qwen3", max_position_embeddings=32), LENGTHS)
    assert (words is None and found == []) or (len(found) == 1 and str(words) in found[0])
    assert all("32 positions" in line for line in found)


def test_learned_positions_end_before_the_run_does(tmp_path: Path) -> None:
    """Rotations go on beyond the positions of a model; a table of learned ones ends."""
    base = write_base(tmp_path / "base", "gpt2", max_position_embeddings=64)
    config = config_of(base, tmp_path / "out", **{"train.max_length": 65})
    run, (problems, _) = of_the_run(config), of_the_dry_run(config)
    assert run is not None and run.fix == "set train.max_length=64" and run.message in str(problems)
    config = config_of(base, tmp_path / "out", **{"train.max_length": 64})
    assert (of_the_run(config), of_the_dry_run(config)[0]) == (None, None)


@pytest.mark.parametrize(
    ("trained", "held_out", "shared"),
    [
        ("data", "data", 2),
        ("data/*.jsonl", "data/b.jsonl", 1),
        ("data/a.jsonl", "data", 1),
        ("data", "link.jsonl", 1),
        ("data/a.jsonl", "data/b.jsonl", 0),
        ("data", "other.jsonl", 0),
    ],
)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_held_out_files_that_are_trained_are_named(
    trained: str, held_out: str, shared: int, is_mixed: bool, tmp_path: Path
) -> None:
    line = json.dumps({"prompt": "a", "response": "b"}) + "\n"
    (tmp_path / "data").mkdir()
    for name in ("data/a.jsonl", "data/b.jsonl", "other.jsonl", "third.jsonl"):
        (tmp_path / name).write_text(line)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "data" / "a.jsonl")
    changes: dict[str, object] = {"eval.path": tmp_path / held_out, "eval.every": 1}
    changes["data.path"] = tmp_path / trained
    if is_mixed:
        changes["data.path"] = "null"
        paths = f"{{path: {tmp_path / 'third.jsonl'}}}, {{path: '{tmp_path / trained}'}}"
        changes["data.sources"] = f"[{paths}]"
    found = run_warnings(config_of(tmp_path, tmp_path / "out", **changes), small_config("qwen3"), LENGTHS)
    assert len(found) == bool(shared)
    assert all(f"holds {shared} of the files that are trained on" in text for text in found)


@pytest.mark.parametrize(
    ("names", "path", "named"),
    [
        (("data/train-0.jsonl", "data/test-0.jsonl"), "clone", "test-0"),
        (("train/a.jsonl", "Validation/b.jsonl"), "clone", "b.jsonl"),
        (("train.jsonl", "test.jsonl"), "clone/train.jsonl", None),
        (("test.jsonl",), "clone", None),
        (("latest.jsonl", "invalid.jsonl"), "clone", None),
    ],
)
def test_files_for_tests_in_a_folder_that_is_trained_on_are_named(
    names: tuple[str, ...], path: str, named: str | None, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        # As in a cache of a hub.
        (tmp_path / f"{len(name)}.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
        (tmp_path / "clone" / name).symlink_to(tmp_path / f"{len(name)}.jsonl")
    config = config_of(tmp_path, tmp_path / "out", **{"data.path": tmp_path / path})
    found = run_warnings(config, small_config("qwen3"), LENGTHS)
    assert len(found) == (named is not None)
    assert all(f"splits for tests ({tmp_path}" in text and str(named) in text for text in found)


@pytest.mark.sweep
def test_the_announcement_and_the_dry_run_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from idlm.train import cli

    base = write_base(tmp_path / "base", max_position_embeddings=16)
    config = config_of(base, tmp_path / "out")
    _, printed = of_the_dry_run(config)
    assert of_the_run(config) is None
    given = [f"model.path={base}", f"data.path={config.data.path}", f"output_dir={tmp_path / 'out'}"]
    given += ["train.device=cpu", "train.max_length=256", "report.enabled=false"]
    given += ["train.stages=[{stride: 2, steps: 1}]"]
    assert cli.main(given) == 0
    announced = capsys.readouterr().out
    for text in (printed, announced):
        assert "exceeds the 16 positions" in " ".join(text.split())
    shutil.rmtree(tmp_path / "out")
