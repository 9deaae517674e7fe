"""A checkpoint and data are enough: the source follows from the path, sizes from model, data and memory."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from idlm.config.compose import compose
from idlm.errors import UserError
from idlm.train.check import check_config
from idlm.train.checkpoint.resume import config_text
from idlm.train.config.schema import TrainConfig, with_values
from idlm.train.planning import sizes
from idlm.train.planning.sizes import with_sizes
from tests.errors import refused
from tests.released_configs import RELEASED
from tests.tiny_training import tiny_config

GIB = 2**30
FILES = {
    ("chats.jsonl",): "jsonl",
    ("chats.json.gz",): "jsonl",
    ("a.parquet",): "parquet",
    ("a.arrow",): "hf",
    ("sub/a.jsonl", "sub/b.jsonl.gz"): "jsonl",
    ("data/train-0.parquet", "README.md", "dataset_infos.json"): "parquet",
    ("train/data-0.arrow", "train/state.json", "dataset_dict.json"): "hf",
    ("data-0.arrow", "state.json", "dataset_info.json"): "hf",
}


def composed(*overrides: str) -> TrainConfig:
    return compose("train", TrainConfig, list(overrides))


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"prompt": "a", "response": "b"}\n')
    return folder


@pytest.mark.sweep_but(recipe="own")
@pytest.mark.parametrize(("names", "source"), FILES.items())
@pytest.mark.parametrize("recipe", ["tiny", "own"])
def test_a_given_path_is_read_by_what_it_holds(
    names: tuple[str, ...], source: str, recipe: str, tmp_path: Path
) -> None:
    write(tmp_path, *names)
    path = tmp_path if len(names) > 1 else tmp_path / names[0]
    config = composed(f"recipe={recipe}", f"data.path={path}")
    assert (config.data.source, config.data.path) == (source, str(path))
    assert composed(f"recipe={recipe}", f"data.sources=[{{path: {path}}}]").data.parts()[0].source == source


def test_a_pattern_is_read_by_the_files_that_it_matches(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", "b.parquet")
    assert composed(f"data.path={tmp_path}/*").data.source == "parquet"
    assert composed(f"data.path={tmp_path}/*.jsonl").data.source == "jsonl", (
        "what is not there is named later"
    )
    write(tmp_path, "c.jsonl")
    for path in (tmp_path, f"{tmp_path}/*"):
        refused(r"(?s)several kinds: jsonl, parquet", composed, f"data.path={path}")
    assert composed(f"data.path={tmp_path}", "data.source=parquet").data.source == "parquet"


def test_folders_that_publishing_would_take_away_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "base/config.json", "base/data/a.jsonl") / "base/data/a.jsonl"
    monkeypatch.chdir(path.parent)
    for output, problem in (
        (f"{tmp_path}/base", "is the base, which would be replaced"),
        (".", "holds the current folder"),
        ("..", "holds the current folder"),
    ):
        with pytest.raises(UserError, match=f"(?s)IDLM-0504.*{problem}"):
            check_config(composed(f"model.path={tmp_path}/base", f"data.path={path}", f"output_dir={output}"))
    with pytest.raises(UserError, match=r"data\.sources=\[\{path: A\}, \{path: B\}\]"):
        check_config(composed("data.path=[a.jsonl,b.jsonl]"))


def test_what_a_recipe_says_of_its_own_data_goes_with_it(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl") / "a.jsonl"
    generated = composed("recipe=tiny_block32")
    assert (generated.data.source, generated.data.level) == ("task", "p4")
    own = composed("recipe=tiny_block32", f"data.path={path}", "data.seed=5")
    assert (own.data.source, own.data.level, own.data.seed) == ("jsonl", "tiny", 5)
    check_config(own)
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults: [tiny, _self_]\ndata: {{path: {path}}}\n")
    check_config(config := composed(f"recipe={mine}"))
    assert config.data.source == "jsonl"
    for given in (["data.source=task", f"data.path={path}"], [f"data.path={path}", "data.source=task"]):
        with pytest.raises(UserError, match=r"(?s)IDLM-0504.*data\.path=.* has no effect: data\.source=task"):
            check_config(composed("recipe=tiny", *given))
    frozen = tmp_path / "frozen.yaml"
    frozen.write_text(config_text(config))
    assert composed(f"config={frozen}") == config
    other = write(tmp_path, "b.parquet") / "b.parquet"
    assert composed(f"config={frozen}", f"data.path={other}").data.source == "parquet"
    assert composed("recipe=tiny", "data.path=null").data.source == "task"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run with a base of 110 M parameters, whose weights are not read, and 4 MB of text."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    base = tmp_path / "base"
    base.mkdir()
    shape = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "max_position_embeddings": 2048,
    }
    (base / "config.json").write_text(json.dumps(tiny_config("llama") | shape))
    save_file({str(number): torch.zeros(1) for number in range(60)}, base / "model.safetensors")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 125_000)
    paths = [f"model.path={base}", f"data.path={tmp_path / 'data.jsonl'}", f"output_dir={tmp_path / 'out'}"]
    return ["recipe=own", *paths]


@pytest.mark.parametrize(
    ("memory", "is_adapted", "recomputes", "length"),
    [(24, False, False, 1024), (2.2, False, True, 1024), (1.8, True, False, 1024), (0.1, True, True, 256)],
)
def test_what_trains_follows_from_the_memory_of_the_machine(
    memory: float,
    is_adapted: bool,
    recomputes: bool,
    length: int,
    own: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "host_memory", lambda: (0, int(memory * GIB)))
    config = with_sizes(composed(*own))
    assert (config.adapter is not None) is is_adapted
    assert config.model.gradient_checkpointing is recomputes
    assert config.train.max_length == length
    assert (config.model.dtype, config.train.bf16, config.train.zero_stage) == ("float32", False, None)
    assert (config.train.batch_size, config.train.global_batch) == (1, 4)
    assert config.train.learning_rate == (2e-4 if is_adapted else 9e-5)
    check_config(config)
    assert with_sizes(config) == config


def test_a_gpu_gets_longer_rows_in_larger_batches(own: list[str]) -> None:
    loop = with_sizes(composed(*own, "plan.gpu=H100", "dry_run=true")).train
    assert (loop.max_length, loop.batch_size, loop.global_batch) == (2048, 8, 8)
    assert loop.bf16 and loop.zero_stage is None
    eight = with_sizes(composed(*own, "plan.gpu=H100", "plan.num_gpus=8", "dry_run=true"))
    assert (eight.train.batch_size, eight.train.global_batch, eight.train.zero_stage) == (1, 8, 1)
    assert eight.model.dtype == "bfloat16" and not eight.train.bf16


def test_a_section_that_gets_a_path_names_its_key() -> None:
    error = refused("IDLM-0101", composed, "recipe=own", "model=/m", "data=a.jsonl")
    for given in ("model.path=/m", "data.path=a.jsonl"):
        assert f"did you mean {given}?" in error.message


def test_values_that_are_given_stay_and_a_run_keeps_its_sizes(
    own: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["train.batch_size=2", "train.learning_rate=0.5", "adapter.rank=8"]
    config = with_sizes(composed(*own, *given))
    assert config.adapter is not None and config.adapter.rank == 8
    assert (config.train.batch_size, config.train.learning_rate, config.train.global_batch) == (2, 0.5, 4)
    started = with_sizes(composed(*own))
    (tmp_path / "out/run").mkdir(parents=True)
    (tmp_path / "out/run/config.yaml").write_text(config_text(started))
    monkeypatch.setattr(sizes, "host_memory", lambda: (0, GIB))
    assert with_sizes(composed(*own)) == started, "another machine changes nothing"
    assert with_sizes(composed(*own, "resume=never")).adapter is not None


def test_little_data_gets_small_steps_and_no_data_is_reported_as_such(
    own: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, sizes.__name__)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 30)
    assert with_sizes(composed(*own)).train.global_batch == 1
    (tmp_path / "base/config.json").unlink()
    (tmp_path / "data.jsonl").unlink()
    assert "sizes for this CPU" in caplog.text
    caplog.clear()
    refused(r"(?s)has 2 problems.*model\.path.*data\.path", check_config, with_sizes(composed(*own)))
    assert not caplog.text, "sizes that were chosen for no model are not told"
    with pytest.raises(UserError, match=r"(?s)has 1 problem:.*train\.batch_size=0 must be at least 1"):
        check_config(composed("recipe=tiny", "train.batch_size=0"))


@pytest.fixture
def qwen3_8b(tmp_path: Path) -> list[str]:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(RELEASED["Qwen3-8B"]))
    paths = [f"model.path={tmp_path / 'base'}", "data.path=none.jsonl", f"output_dir={tmp_path / 'out'}"]
    return ["recipe=qwen3_8b", *paths, "dry_run=true"]


@pytest.mark.parametrize(
    ("gpu", "gpus", "layers"),
    [("H100", 8, None), ("H100", 4, 16), ("H200", 4, None), ("H100", 2, None)],
)
def test_the_8b_recipe_recomputes_activations_of_as_few_layers_as_fits(
    gpu: str, gpus: int, layers: int | None, qwen3_8b: list[str]
) -> None:
    """On two H100s it does not fit either way, and is refused as it was given."""
    given = composed(*qwen3_8b, f"plan.gpu={gpu}", f"plan.num_gpus={gpus}")
    config = with_sizes(given)
    recomputes = {"model.gradient_checkpointing": layers is not None, "model.recomputed_layers": layers}
    changes = {"train.sizes": "given"} | recomputes
    assert config == with_values(given, changes)
    assert with_sizes(config) == config


def test_a_run_that_recomputes_goes_on_so_on_other_machines(qwen3_8b: list[str], tmp_path: Path) -> None:
    started = with_sizes(composed(*qwen3_8b, "plan.gpu=H100", "plan.num_gpus=4"))
    (tmp_path / "out/run").mkdir(parents=True)
    (tmp_path / "out/run/config.yaml").write_text(config_text(started))
    elsewhere = [*qwen3_8b, "plan.gpu=H200", "plan.num_gpus=8"]
    assert with_sizes(composed(*elsewhere)).model == started.model
    assert not with_sizes(composed(*elsewhere, "resume=never")).model.gradient_checkpointing
