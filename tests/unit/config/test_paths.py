"""A path means the same file in every option, and a run goes on where its files were moved as a whole. Files
that are read whole are regular ones of a bounded size."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from idlm.checkpoint import MAX_WHOLE_FILE, read_json, verify
from idlm.config.compose import compose
from idlm.errors import UserError
from idlm.infer.cli.config import GenerateConfig
from idlm.text.tokenizer import load_tokenizer
from idlm.train.checkpoint.resume import choose_checkpoint, store_config
from idlm.train.config.schema import TrainConfig
from idlm.train.model.stored import read_generation_config
from idlm.train.unused import value_of
from tests.errors import refused
from tests.unit.training.test_resume import SHAPE, config_of, save


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
        refused(f"IDLM-0507.*what {key} holds differs", choose_checkpoint, moved_to(new), SHAPE)
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
    answered = compose(
        "generate", GenerateConfig, ["model=~/m", "input=~/i", "output=~/o", "base=~/b", "adapters.law=~/l"]
    )
    assert answered.adapters == {"law": f"{tmp_path}/l"}
    assert (answered.model, answered.input) == (f"{tmp_path}/m", f"{tmp_path}/i")
    assert (answered.output, answered.base) == (f"{tmp_path}/o", f"{tmp_path}/b")
    mine = pwd.getpwuid(os.getuid())
    config = compose("train", TrainConfig, [f"output_dir=~{mine.pw_name}/out", "data.path=a~/b"])
    assert (config.output_dir, config.data.path) == (f"{mine.pw_dir}/out", "a~/b")
    with pytest.raises(UserError, match=r"adapters: got '/l' \(text\), .*; write adapters.NAME=/l"):
        compose("generate", GenerateConfig, ["adapters=/l"])
    with pytest.raises(UserError, match=r"(?s)output_dir: ~unknown-user .*write \./~unknown-user/out"):
        compose("train", TrainConfig, ["output_dir=~unknown-user/out"])


TINY = Path(__file__).resolve().parents[3] / "recipes" / "assets" / "tiny_ar"


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_WHOLE_FILE + 1)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda path: read_json(path),
    "manifest.json": lambda path: verify(path.parent),
    "generation_config.json": lambda path: read_generation_config(path.parent),
    "tokenizer.json": lambda path: load_tokenizer(path.parent),
    "chat_template.jinja": lambda path: load_tokenizer(path.parent),
    "additional_chat_templates/a.jinja": lambda path: load_tokenizer(path.parents[1]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("model.safetensors"))


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("plant", [os.mkfifo, device, large])
def test_what_is_no_regular_file_or_too_large_is_not_read(
    folder: Path, name: str, plant: Callable[[Path], None]
) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    plant(path)
    error = refused(path.name, READERS[name], path)
    reasons = ("it is not a regular file", "symbolic link", f"at most {MAX_WHOLE_FILE}")
    assert any(reason in error.message for reason in reasons)


def test_a_template_that_links_out_of_its_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a password")
    template = folder / "chat_template.jinja"
    template.rename(folder / "inside")
    template.symlink_to("inside")
    assert load_tokenizer(folder).chat_template
    template.unlink()
    template.symlink_to(tmp_path / "secret")
    refused("chat_template.jinja: it links to a file outside", load_tokenizer, folder)


def test_a_template_in_a_cache_of_the_hub_is_read(folder: Path, tmp_path: Path) -> None:
    blobs, snapshots = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots"
    blobs.mkdir(parents=True)
    snapshots.mkdir()
    found = folder.rename(snapshots / "0123")
    (found / "chat_template.jinja").rename(blobs / "ab")
    (found / "chat_template.jinja").symlink_to("../../blobs/ab")
    assert load_tokenizer(found).chat_template
