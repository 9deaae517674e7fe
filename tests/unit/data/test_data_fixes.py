"""Fixes of errors about records, templates and tokenizers are followed as they are written: data is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from idlm.errors import UserError
from idlm.text.tokenizer import load_tokenizer
from idlm.train.config.data import DataConfig
from idlm.train.data.base import SOURCES, make_encoder
from tests.small_tokenizers import CHATML, save_byte_level
from tests.unit.data.cached import config_of, write_lines

MASK = 340
GOOD = {"prompt": "a", "response": "b"}
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
Settings = dict[str, Any]


def answer(folder: Path, records: list[Any], settings: Settings) -> UserError | None:
    """Why training refuses these records; None where it reads them."""
    path = write_lines(folder / "data.jsonl", *records)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    config = config_of(path, workers=1, **settings)
    try:
        source = SOURCES.get(config.source)(config, make_encoder(config, tokenizer, MASK))
        for index in range(source.num_samples or 0):
            source.sample(index)
    except UserError as error:
        return error
    return None


def turns(*given: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(given), **more}


# name: (a record that is refused, words of the error and its fix, the record or the settings by the fix).
RECORDS: dict[str, tuple[Any, str, Any]] = {
    "not JSON": ('{"prompt": "a",', "is not valid JSON", GOOD),
    "an empty answer": ({"prompt": "", "response": ""}, "at least one token", GOOD),
    "no answer": (turns(USER), "nothing to predict", turns(USER, ANSWER)),
    "an image": (
        turns(USER | {"content": [{"type": "image", "image": "x"}]}, ANSWER), 'parts {"type": "text"',
        turns(USER | {"content": [{"type": "text", "text": "a"}]}, ANSWER),
    ),
    "no weight, skipped": (
        [turns(USER, ANSWER | {"weight": 0}), turns(USER, ANSWER)], "set data.on_bad_record=skip",
        {"data.on_bad_record": "skip"},
    ),
    "weights of turns that do not fit": (
        turns(USER, ANSWER, weights=[1, 1, 1]), "delete the key weights", turns(USER, ANSWER)
    ),
    "an unwanted answer": (
        [GOOD | {"label": False}, GOOD | {"label": True}], "set data.on_bad_record=skip",
        {"data.on_bad_record": "skip"},
    ),
    "another shape": ([GOOD, {"text": "b"}], "put each shape into a file of its own", [GOOD, GOOD]),
    "an open thought": (
        [GOOD, GOOD | {"response": "<think>b"}], "set data.on_bad_record=skip", {"data.on_bad_record": "skip"}
    ),
    "a thought in other tags": (
        {"prompt": "a", "response": "<thought>b</thought>"}, "set data.thinking=keep",
        {"data.thinking": "keep"},
    ),
    "an open thought, closed": (
        {"prompt": "a", "response": "<think>b"}, "close it", {"prompt": "a", "response": "<think>b</think>c"}
    ),
    "no record": ([], "give records of one of the shapes", [GOOD]),
}  # fmt: skip


@pytest.mark.sweep_but(5)
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_is_advised_is_read(name: str, tmp_path: Path) -> None:
    broken, words, fixed = RECORDS[name]
    broken = broken if isinstance(broken, list) else [broken]
    settings: Settings = {"thinking": "strip"} if "thought" in name else {}
    save_byte_level(tmp_path)
    refused = answer(tmp_path, broken, settings)
    assert refused is not None and words in f"{refused.message}\n{refused.fix}"
    if isinstance(fixed, dict) and all(key.startswith("data.") for key in fixed):
        settings |= {key.removeprefix("data."): value for key, value in fixed.items()}
        assert answer(tmp_path, broken, settings) is None
    else:
        assert answer(tmp_path, fixed if isinstance(fixed, list) else [fixed], settings) is None


def _tokenizer(**values: Any) -> Callable[[Path], None]:
    """Change tokenizer_config.json; a value that is None is taken out."""

    def apply(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        merged = json.loads(path.read_text()) | values
        path.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))

    return apply


NO_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user begins') }}{% endif %}" + CHATML
DATED = "{{ strftime_now(fmt) }}" + CHATML
SYSTEM = {"role": "system", "content": "Be brief."}

# name: (what is done to the tokenizer, the records, words, by the fix: tokenizer, records or settings).
TEMPLATES: dict[str, tuple[Callable[[Path], None], list[Any], str, Any]] = {
    "no template": (
        _tokenizer(chat_template=None), [turns(USER, ANSWER)], "add chat_template to tokenizer_config.json",
        _tokenizer(chat_template=CHATML),
    ),
    "no template, plain text": (
        _tokenizer(chat_template=None), [turns(USER, ANSWER)], "give plain text", [{"text": "a b"}]
    ),
    "templates of other names": (
        _tokenizer(chat_template=[{"name": "tool_use", "template": CHATML}]), [turns(USER, ANSWER)],
        "save the one to use as chat_template.jinja",
        lambda folder: (folder / "chat_template.jinja").write_text(CHATML),
    ),
    "a template without systems": (
        _tokenizer(chat_template=NO_SYSTEM), [turns(SYSTEM, USER, ANSWER)], "data.left_out=accept",
        {"left_out": "accept"},
    ),
    "a template that refuses": (
        _tokenizer(chat_template=STRICT), [turns(SYSTEM, USER, ANSWER)],
        "give messages with the roles and fields", [turns(USER, ANSWER)],
    ),
    "a computed date": (
        _tokenizer(chat_template=DATED), [turns(USER, ANSWER)], "strftime_now('%d %b %Y')",
        _tokenizer(chat_template=DATED.replace("fmt", "'%d %b %Y'")),
    ),
    "no end": (
        _tokenizer(eos_token=None), [GOOD], "set eos_token in the tokenizer's tokenizer_config.json",
        _tokenizer(eos_token="<|im_end|>"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_is_advised_renders(name: str, tmp_path: Path) -> None:
    breaks, records, words, fixed = TEMPLATES[name]
    breaks(save_byte_level(tmp_path))
    refused = answer(tmp_path, records, {})
    assert refused is not None and words in f"{refused.message}\n{refused.fix}"
    if callable(fixed):
        fixed(tmp_path)
    records = fixed if isinstance(fixed, list) else records
    assert answer(tmp_path, records, fixed if isinstance(fixed, dict) else {}) is None


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        (" ", b"", "name a file, a folder or a pattern in data.path"),
        ("none.jsonl", b"", "name a file, a folder or a pattern in data.path"),
        ("*.jsonl", b"", "name a file, a folder or a pattern in data.path"),
        ("cut.jsonl.gz", b"\x1f\x8b\x08\x00", "copy or download the file again"),
        ("utf16.jsonl", json.dumps(GOOD).encode("utf-16"), "UTF-8"),
    ],
)
def test_a_path_that_is_advised_is_read(path: str, content: bytes, words: str, tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    if content:
        (tmp_path / path).write_bytes(content)
    given = str(tmp_path / path) if path.strip() else path

    def read() -> UserError | None:
        tokenizer = load_tokenizer(tmp_path)
        config = DataConfig(path=given, cache_dir=str(tmp_path / "cache"), workers=1)
        try:
            SOURCES.get("jsonl")(config, make_encoder(config, tokenizer, MASK))
        except UserError as error:
            return error
        return None

    refused = read()
    assert refused is not None and words in f"{refused.message}\n{refused.fix}"
    whole = json.dumps(GOOD) + "\n"
    if path.endswith(".gz"):
        import gzip

        (tmp_path / path).write_bytes(gzip.compress(whole.encode()))
    else:
        given = str(tmp_path / "data.jsonl") if not content else given
        Path(given).write_text(whole)
    assert read() is None
