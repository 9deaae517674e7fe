"""Every recipe composes, names no unknown key and passes the checks once its paths are given."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from idlm.config.compose import compose
from idlm.train.check import check_config
from idlm.train.config.schema import TrainConfig, make_curriculum, with_accumulation
from tests.errors import refused

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
SCALED = [name for name in RECIPES if not name.startswith("tiny")]
MADE_BASES = ["tiny_recall_block"]
"""Recipes whose base is what another recipe makes."""
PAPER_BATCH = 32
"""Packed rows per optimizer step: 1 x 4 x 8 (arXiv 2604.11035, appendix H.1)."""


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    shutil.copytree(ROOT / "recipes" / "assets" / "tiny_ar", tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    return [f"model.path={tmp_path / 'model'}", f"data.path={tmp_path / 'data.jsonl'}"]


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_complete(name: str, paths: list[str]) -> None:
    given = paths if name in SCALED else paths[:1] if name in MADE_BASES else []
    config = compose("train", TrainConfig, [f"recipe={name}", *given])
    check_config(config)
    assert config.output_dir.startswith("outputs/")


@pytest.mark.parametrize("name", ["tiny"])
def test_its_assets_are_found_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose("train", TrainConfig, [f"recipe={name}"])
    check_config(config)
    assert config.model.path == str(ROOT / "recipes" / "assets" / "tiny_ar")


@pytest.mark.parametrize("name", SCALED)
def test_without_paths_the_error_names_the_missing_options(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder, where no outputs of other recipes lie."""
    monkeypatch.chdir(tmp_path)
    error = refused("IDLM-0504", check_config, compose("train", TrainConfig, [f"recipe={name}"]))
    assert "model.path" in error.message
    assert "data.path" in error.message


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_8b_lora", "small", "llama3_8b"])
def test_its_global_batch_is_the_papers(name: str, world_size: int, paths: list[str]) -> None:
    given = compose("train", TrainConfig, [f"recipe={name}", *paths])
    config = with_accumulation(given, world_size=world_size)
    curriculum = make_curriculum(config, world_size=world_size, rows_per_epoch=3200)
    assert curriculum.global_batch == PAPER_BATCH
    assert curriculum.num_steps == 200
    assert [stage.num_steps for stage in curriculum.stages] == [100, 100]
    assert [stage.stride for stage in curriculum.stages] == [2, 3]


@pytest.mark.parametrize(("name", "stride", "weight"), [("n4", 4, None), ("n8", 8, None), ("block", 4, 0.0)])
def test_extensions_and_controls_train_what_they_say(
    name: str, stride: int, weight: float | None, paths: list[str]
) -> None:
    config = compose("train", TrainConfig, [f"recipe=qwen3_8b_{name}", *paths])
    curriculum = make_curriculum(with_accumulation(config, world_size=8), world_size=8, rows_per_epoch=3200)
    assert [(stage.stride, stage.clean_weight) for stage in curriculum.stages] == [(stride, weight)]
    assert curriculum.global_batch == PAPER_BATCH
    whole = compose("train", TrainConfig, ["recipe=qwen3_8b", *paths])
    assert config.data == whole.data and config.train.learning_rate == whole.train.learning_rate


def test_the_32b_is_merged_and_trains_its_clean_rows(paths: list[str]) -> None:
    config = compose("train", TrainConfig, ["recipe=qwen3_32b", *paths])
    assert config.adapter is not None and not config.is_gated and config.export.merge
    assert [stage.clean_weight for stage in config.train.stages] == [0.2]
