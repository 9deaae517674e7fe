"""System prompts of `idlm-generate`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from idlm.infer.cli.generate import generate
from idlm.infer.engine import Engine
from idlm.text.tokenizer import encode_messages
from tests.errors import refused
from tests.integration.inference.command_lines import (
    BASE,
    PROMPTS,
    TINY,
    answer,
    read_lines,
    reference,
    write_lines,
)

SYSTEM = "Tom has 4 nuts."
FIRST = {"role": "system", "content": SYSTEM}


def _turn(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _answer(*messages: dict[str, str]) -> str:
    return answer(encode_messages(reference().tokenizer, messages)).text


def test_a_system_prompt_stands_before_lines_that_have_none(tmp_path: Path) -> None:
    own = {"role": "system", "content": "Ann has 2 nuts."}
    lines: list[Any] = [
        {"prompt": PROMPTS[0]},
        {"messages": [_turn(PROMPTS[1])]},
        {"messages": [own, _turn(PROMPTS[2])]},
    ]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert generate([*BASE, f"input={source}", f"output={output}", f"system={SYSTEM}"]) == 0
    sent = [[FIRST, _turn(PROMPTS[0])], [FIRST, _turn(PROMPTS[1])], [own, _turn(PROMPTS[2])]]
    records = read_lines(output)
    assert [record["prompt"] for record in records] == sent
    assert [record["text"] for record in records] == [_answer(*messages) for messages in sent]


def test_a_system_prompt_and_token_ids_are_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: pytest.fail("a model is loaded"))
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}, {"prompt_ids": [5, 6]}])
    error = refused("IDLM-0458", generate, [*BASE, f"input={source}", f"system={SYSTEM}"])
    assert error.message.startswith(f"{source}:2: ")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "a tokenizer without a chat template"),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            "leaves system prompts out",
        ),
    ],
)
def test_a_system_prompt_that_the_template_cannot_render_is_refused(
    tmp_path: Path, template: str | None, words: str
) -> None:
    ignored = shutil.ignore_patterns("chat_template.jinja", "manifest.json")
    copy = shutil.copytree(TINY, tmp_path / "copy", ignore=ignored)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (copy / "chat_template.jinja").write_text(template)
    error = refused("IDLM-0458", generate, [*BASE, f"model={copy}", "-p", "x", f"system={SYSTEM}"])
    assert words in error.message


def test_a_system_prompt_without_the_template_is_refused() -> None:
    error = refused("IDLM-0458", generate, [*BASE, "chat_template=none", "-p", "x", f"system={SYSTEM}"])
    assert "chat_template=none" in error.message
