"""A path means the same file in every option, and a run goes on where its files were moved as a whole."""

from __future__ import annotations

import json
import os
import pwd
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from idlm.config.compose import compose
from idlm.errors import UserError
from idlm.infer.cli.config import GenerateConfig
from idlm.publish import publish
from idlm.train.checkpoint.resume import choose_checkpoint, store_config
from idlm.train.checkpoint.same_run import SHAPE_FILE, RunShape
from idlm.train.config.schema import TrainConfig
from idlm.train.unused import value_of

SHAPE = RunShape(world_size=8, batch_size=1, accumulation=4, zero_stage=2)


def config_of(folder: Path, **changes: object) -> TrainConfig:
    values = {"output_dir": folder / "out", "objective": "ar", "train.steps": 9} | changes
    return compose("train", TrainConfig, [f"{key}={value}" for key, value in values.items()])


def save(folder: Path, step: int) -> None:
    with publish(folder / "out" / "run" / f"checkpoint-{step}") as staging:
        (staging / SHAPE_FILE).write_text(json.dumps(asdict(SHAPE)))


def test_a_run_that_was_moved_goes_on_with_the_same_content_alone(tmp_path: Path) -> None:
    def moved_to(folder: Path, **changes: object) -> TrainConfig:
        paths = {
            "model.path": folder / "base",
            "data.sources": f"[{{path: '{folder / 'a b.jsonl'}'}}, {{path: '{folder / 'more'}'}}]",
            "eval.path": folder / "held",
            "train.deepspeed": folder / "zero.json",
        }
        return config_of(folder, **paths | changes)

    old, new = tmp_path / "old", tmp_path / "new"
    for name in ("base/config.json", "base/model.safetensors", "a b.jsonl", "more/c.jsonl", "held/d.jsonl"):
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        (old / name).write_text(f"{name}\n")
    (old / "zero.json").write_text("{}")
    save(old, 4)
    store_config(moved_to(old))
    shutil.copytree(old, new)
    assert choose_checkpoint(moved_to(new), SHAPE) == new / "out" / "run" / "checkpoint-4"
    (new / "base" / "README.md").write_text("not read by training")
    assert choose_checkpoint(moved_to(new), SHAPE) is not None
    for name, key in (("base/model.safetensors", "model.path"), ("more/c.jsonl", "data.sources.1.path")):
        before = (new / name).read_text()
        (new / name).write_text(before.upper())
        with pytest.raises(UserError, match=f"IDLM-0507.*what {key} holds differs"):
            choose_checkpoint(moved_to(new), SHAPE)
        (new / name).write_text(before)
    with pytest.raises(UserError, match=r"IDLM-0507.*data\.sources"):
        choose_checkpoint(moved_to(new, **{"data.sources": f"[{{path: '{new / 'more'}'}}]"}), SHAPE)


def test_another_name_of_the_hub_is_other_data(tmp_path: Path) -> None:
    save(tmp_path, 4)
    named = {"data.source": "hf", "data.path": "org/data", "eval.path": "org/held", "eval.every": 3}
    store_config(config_of(tmp_path, **named))
    assert choose_checkpoint(config_of(tmp_path, **named), SHAPE) is not None
    for key in ("data.path", "eval.path"):
        with pytest.raises(UserError, match=rf"IDLM-0507.*{key.partition('.')[0]}"):
            choose_checkpoint(config_of(tmp_path, **named | {key: "org/other"}), SHAPE)


def test_a_home_is_the_same_folder_for_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = {"output_dir", "resume", "model.path", "model.tokenizer", "train.deepspeed"}
    keys |= {"data.path", "data.cache_dir", "eval.path"}
    config = compose("train", TrainConfig, [*(f"{key}=~/x y" for key in keys), "data.sources=[{path: ~/z}]"])
    assert {value_of(config, key) for key in keys} == {f"{tmp_path}/x y"}
    assert config.data.sources[0].path == f"{tmp_path}/z"
    answered = compose("generate", GenerateConfig, ["model=~/m", "input=~/i", "output=~/o", "base=~/b"])
    assert (answered.model, answered.input) == (f"{tmp_path}/m", f"{tmp_path}/i")
    assert (answered.output, answered.base) == (f"{tmp_path}/o", f"{tmp_path}/b")
    mine = pwd.getpwuid(os.getuid())
    config = compose("train", TrainConfig, [f"output_dir=~{mine.pw_name}/out", "data.path=a~/b"])
    assert (config.output_dir, config.data.path) == (f"{mine.pw_dir}/out", "a~/b")
    with pytest.raises(UserError, match=r"(?s)output_dir: ~unknown-user .*write \./~unknown-user/out"):
        compose("train", TrainConfig, ["output_dir=~unknown-user/out"])
    # A run of a version that left the home as it was written.
    save(tmp_path, 4)
    store_config(config_of(tmp_path, **{"data.path": "~/d.jsonl"}))
    stored = tmp_path / "out" / "run" / "config.yaml"
    stored.write_text(stored.read_text().replace(f"{tmp_path}/d.jsonl", "~/d.jsonl"))
    assert choose_checkpoint(config_of(tmp_path, **{"data.path": f"{tmp_path}/d.jsonl"}), SHAPE) is not None
