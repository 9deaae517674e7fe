"""An export whose tokenizer stock transformers reads by other rules says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from idlm.semantics import Semantics
from idlm.text.tokenizer import load_tokenizer
from idlm.train.checkpoint.export import PROBES, export
from tests.small_tokenizers import save_byte_level
from tests.tiny_training import tiny_model


def exported(folder: Path, family: str, caplog: pytest.LogCaptureFixture) -> tuple[Any, str]:
    """The tokenizer that training uses for a generic class, and what its export logs."""
    source = folder / "base"
    source.mkdir()
    save_byte_level(source)
    (source / "config.json").write_text(json.dumps({"model_type": family}))
    tokenizer = load_tokenizer(source)
    logging.getLogger("idlm").propagate = True
    with caplog.at_level(logging.WARNING):
        export(tiny_model(family), tokenizer, Semantics(), folder / "out", dtype=None)
    return tokenizer, caplog.text


def test_an_export_of_qwen2_with_a_generic_tokenizer_warns_of_other_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, told = exported(tmp_path, "qwen2", caplog)
    stock = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert any(stock(text)["input_ids"] != tokenizer(text)["input_ids"] for text in PROBES)
    assert "other token ids than training used" in told and "PreTrainedTokenizerFast" in told


def test_an_export_that_stock_transformers_reads_alike_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, told = exported(tmp_path, "qwen3", caplog)
    stock = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert all(stock(text)["input_ids"] == tokenizer(text)["input_ids"] for text in PROBES)
    assert "token ids" not in told
