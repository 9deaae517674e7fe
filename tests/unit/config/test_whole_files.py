"""Files that are read whole: regular ones of a bounded size, and templates that lie in their folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from idlm.checkpoint import MAX_WHOLE_FILE, read_json, verify
from idlm.errors import UserError
from idlm.text.tokenizer import load_tokenizer
from idlm.train.model.stored import read_generation_config

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
    with pytest.raises(UserError) as refusal:
        READERS[name](path)
    reasons = ("it is not a regular file", "symbolic link", f"at most {MAX_WHOLE_FILE}")
    assert path.name in refusal.value.message and any(reason in refusal.value.message for reason in reasons)


def test_a_template_that_links_out_of_its_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a password")
    template = folder / "chat_template.jinja"
    template.rename(folder / "inside")
    template.symlink_to("inside")
    assert load_tokenizer(folder).chat_template
    template.unlink()
    template.symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="chat_template.jinja: it links to a file outside"):
        load_tokenizer(folder)


def test_a_template_in_a_cache_of_the_hub_is_read(folder: Path, tmp_path: Path) -> None:
    blobs, snapshots = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots"
    blobs.mkdir(parents=True)
    snapshots.mkdir()
    found = folder.rename(snapshots / "0123")
    (found / "chat_template.jinja").rename(blobs / "ab")
    (found / "chat_template.jinja").symlink_to("../../blobs/ab")
    assert load_tokenizer(found).chat_template
