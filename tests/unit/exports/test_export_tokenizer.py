"""The tokenizer of an export: the base's own files, in words that transformers 4 and 5 both read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from idlm.checkpoint import read_json
from idlm.semantics import Semantics
from idlm.text.tokenizer import load_tokenizer
from idlm.train.checkpoint.base_files import (
    BaseFiles,
    model_config,
    read_tokenizer_files,
    tokenizer_config,
    write_tokenizer_files,
)
from idlm.train.checkpoint.export import PROBES, export
from tests.small_tokenizers import save_byte_level
from tests.tiny_training import tiny_model


def exported(folder: Path, family: str, caplog: pytest.LogCaptureFixture) -> tuple[Any, str]:
    """The tokenizer that training uses for a generic class, and what its export logs."""
    source = folder / "base"
    source.mkdir()
    save_byte_level(source)
    (source / "config.json").write_text(json.dumps({"model_type": family}))
    tokenizer, base = load_tokenizer(source), BaseFiles(tokenizer=read_tokenizer_files(source))
    with caplog.at_level(logging.WARNING):
        export(tiny_model(family), tokenizer, Semantics(), folder / "out", dtype=None, base=base)
    return tokenizer, caplog.text


def published(folder: Path, **changes: Any) -> tuple[dict[str, Any], Any]:
    """tokenizer_config.json of an export whose base has `changes` in it, and the base's tokenizer."""
    source, target = folder / "base", folder / "out"
    source.mkdir()
    target.mkdir()
    path = save_byte_level(source) / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    tokenizer = load_tokenizer(source)
    write_tokenizer_files(target, read_tokenizer_files(source), tokenizer)
    assert load_tokenizer(target).get_vocab() == tokenizer.get_vocab()
    return json.loads((target / "tokenizer_config.json").read_text()), tokenizer


def test_an_export_of_qwen2_with_a_generic_tokenizer_warns_of_other_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, shown = exported(tmp_path, "qwen2", caplog)
    stock = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert any(stock(text)["input_ids"] != tokenizer(text)["input_ids"] for text in PROBES)
    assert "other token ids than training used" in shown and "PreTrainedTokenizerFast" in shown


def test_an_export_that_stock_transformers_reads_alike_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, shown = exported(tmp_path, "qwen3", caplog)
    stock = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert all(stock(text)["input_ids"] == tokenizer(text)["input_ids"] for text in PROBES)
    assert "token ids" not in shown


def test_the_files_of_the_base_are_copied_byte_for_byte(tmp_path: Path) -> None:
    source, target = tmp_path / "base", tmp_path / "out"
    (source / "additional_chat_templates").mkdir(parents=True)
    target.mkdir()
    save_byte_level(source)
    # Of any origin: what else a base has, and a config as no program would write it.
    texts = {
        "chat_template.jinja": "{{ messages }}",
        "special_tokens_map.json": '{"eos_token": "<|im_end|>"}',
    }
    texts |= {"additional_chat_templates/rag.jinja": "{{ documents }}", "added_tokens.json": "{}"}
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["additional_special_tokens"] = ["<|im_start|>"]
    config["extra_special_tokens"] = {"image_token": "<|im_end|>"}
    texts["tokenizer_config.json"] = json.dumps(config, indent=7)
    for name, text in texts.items():
        (source / name).write_text(text)
    (source / "modeling.py").write_text("")
    files = read_tokenizer_files(source)
    write_tokenizer_files(target, files, load_tokenizer(source))
    written = {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*.j*")}
    assert written == files and files.keys() == {*texts, "tokenizer.json"}


def test_what_transformers_5_alone_reads_is_written_in_older_words(tmp_path: Path) -> None:
    config, _ = published(
        tmp_path,
        tokenizer_class="TokenizersBackend",
        backend="tokenizers",
        is_local=True,
        local_files_only=True,
        extra_special_tokens=["<|im_start|>"],
        model_specific_special_tokens={"image_token": "<|im_end|>"},
    )
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == ["<|im_start|>"]
    assert config["extra_special_tokens"] == {"image_token": "<|im_end|>"}
    assert not config.keys() & {"backend", "is_local", "local_files_only", "model_specific_special_tokens"}
    again = load_tokenizer(tmp_path / "out")
    assert again.image_token == "<|im_end|>"
    assert again.decode(again.convert_tokens_to_ids(["<|im_start|>"]), skip_special_tokens=True) == ""


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "Qwen2TokenizerFast"])
def test_no_file_of_remote_code_is_named(name: str, tmp_path: Path) -> None:
    code = {"AutoTokenizer": ["tokenization_my.MyTokenizer", None]}
    config, _ = published(tmp_path, tokenizer_class=name, auto_map=code)
    assert "auto_map" not in config and config["tokenizer_class"] == name


def test_a_saved_family_class_says_whether_texts_begin_with_bos(tmp_path: Path) -> None:
    """transformers 5 does not save it; Llama in transformers 4 begins texts with bos by default."""
    changes = {"tokenizer_class": "LlamaTokenizer", "backend": "tokenizers", "bos_token": "<|endoftext|>"}
    config, tokenizer = published(tmp_path, **changes)
    begins = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    assert (config["add_bos_token"], config["add_eos_token"]) == (begins, False)


@pytest.mark.parametrize("name", ["tiny_ar", "tiny_idlm"])
def test_the_bundled_checkpoints_are_in_words_of_all_versions(name: str) -> None:
    directory = Path(__file__).resolve().parents[3] / "recipes" / "assets" / name
    config, tokenizer = read_json(directory / "config.json"), load_tokenizer(directory)
    assert model_config(config, {}) == config and "rope_theta" in config
    stored = read_json(directory / "tokenizer_config.json")
    assert tokenizer_config(stored, tokenizer) == stored
