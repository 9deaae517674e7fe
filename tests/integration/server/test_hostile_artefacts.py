"""Checkpoints of unknown origin: each is refused by a UserError that names what is wrong; nothing in it runs.

The table is hostile.py. `-p no:cacheprovider --durations=20` shows which refusals take longest."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.server import templates
from idlm.infer.server.templates import TemplateProcess
from idlm.text.templates import render
from idlm.text.tokenizer import load_tokenizer
from tests.integration.server import hostile
from tests.integration.server.hostile import CANARY, TEMPLATES, Artefact, artefacts

TINY = Path(__file__).resolve().parents[3] / "recipes" / "assets" / "tiny_ar"
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "auto", "max_length": 32, "max_num_seqs": 2}
LONGEST_MESSAGE = 20_000
ACTS = (
    "socket.connect",
    "socket.bind",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
)
SEEN: list[str] | None = None
"""What was done while a checkpoint was loaded; None: it is not recorded."""


def _watch(event: str, given: tuple[Any, ...]) -> None:
    if SEEN is None:
        return
    writes = event == "open" and (given[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (
        event in ACTS
        or (writes and given[0] != os.devnull)
        or (event == "import" and CANARY in str(given[0]))
    ):
        SEEN.append(f"{event} {given}")


sys.addaudithook(_watch)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that loads, with the code that a bad one would like to run."""
    folder = tmp_path_factory.mktemp("good") / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("manifest.json"))
    for path in (f"{CANARY}.py", f"configuration_{CANARY}.py"):
        (folder / path).write_text("open('hostile_canary', 'w')\nclass Config: pass\n")
    return folder


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, nothing is written, connected, started or imported from the checkpoint."""
    global SEEN
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    acts: list[str] = []

    def look(is_on: bool) -> None:
        global SEEN
        SEEN = acts if is_on else None

    look(True)
    yield
    look(False)
    assert (
        acts == [] and list(Path().iterdir()) == [] and not [name for name in sys.modules if CANARY in name]
    )


def _copy(good: Path, target: Path, artefact: Artefact) -> Path:
    shutil.copytree(good, target, copy_function=os.link)
    artefact.plant(target)
    return target


def _named(artefact: Artefact) -> str:
    return artefact.name.replace("\0", "0")


def check(refusal: UserError, words: str) -> None:
    """The message has a code and a fix, names the field or file, and is not endless."""
    assert refusal.fix and re.search(words, refusal.message), refusal.message[:500]
    assert len(str(refusal)) < LONGEST_MESSAGE


def test_the_good_checkpoint_loads(good: Path) -> None:
    Engine.from_pretrained(good, "ar", **OPTIONS).close()
    assert len(artefacts()) + len(list(hostile.tokenizers())) + len(TEMPLATES) >= 150


@pytest.mark.parametrize("artefact", artefacts(), ids=_named)
def test_a_hostile_checkpoint_is_refused(
    good: Path, tmp_path: Path, artefact: Artefact, request: Any
) -> None:
    folder = _copy(good, tmp_path / "model", artefact)
    request.getfixturevalue("seen")
    with pytest.raises(UserError) as refusal:
        Engine.from_pretrained(folder, "ar", **OPTIONS)
    check(refusal.value, artefact.words)


@pytest.mark.parametrize("artefact", list(hostile.names_of_code()), ids=_named)
def test_no_module_of_a_checkpoint_is_imported(
    good: Path, tmp_path: Path, artefact: Artefact, request: Any
) -> None:
    folder = _copy(good, tmp_path / "model", artefact)
    request.getfixturevalue("seen")
    with contextlib.suppress(UserError):
        Engine.from_pretrained(folder, "ar", **OPTIONS).close()


@pytest.mark.parametrize("artefact", list(hostile.tokenizers()), ids=_named)
def test_a_hostile_tokenizer_is_refused(good: Path, tmp_path: Path, artefact: Artefact, request: Any) -> None:
    folder = _copy(good, tmp_path / "model", artefact)
    request.getfixturevalue("seen")
    with pytest.raises(UserError) as refusal:
        load_tokenizer(folder)
    check(refusal.value, artefact.words)


HASTY = "from idlm.infer.server import templates as t; t.RENDER_SECONDS = 0.3; t.main()"


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Any]:
    """A tokenizer whose templates render as those of the server do, with less time."""
    found = load_tokenizer(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "PROGRAM", ("-P", "-c", HASTY))
        process = TemplateProcess(found)
        found.apply_chat_template = process.apply
        yield found
        process.close()


@pytest.mark.sweep_but("class of a text", "globals of a function")
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    good = tokenizer.chat_template
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", TEMPLATES[name])
        with pytest.raises(UserError, match="IDLM-0217: the chat template refuses") as refusal:
            render(tokenizer, messages, open_turn=True)
        check(refusal.value, "template")
    assert tokenizer.chat_template == good
    assert "Hi" in render(tokenizer, messages, open_turn=True)
    assert not Path(CANARY).exists()
