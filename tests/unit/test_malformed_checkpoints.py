"""Checkpoint files whose values are of another type, or no numbers to compute with: refused by code and name,
never a traceback and never other arithmetic.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.semantics import FILE_NAME
from tests.toy import write_toy_checkpoint

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_length": 32, "max_num_seqs": 2}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_toy_checkpoint(tmp_path / "model")


def _refusal(directory: Path, decoder: str | None = None, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        Engine.from_pretrained(directory, decoder, **{**OPTIONS, **options})
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize("decoder", ["ar", "isd"])
def test_token_causal_decoding_needs_rows_that_predict_the_next_token(checkpoint: Path, decoder: str) -> None:
    meaning = {"causality": "causal", "logit_shift": False, "mask_token_id": 3, "stride": 2}
    (checkpoint / FILE_NAME).write_text(json.dumps(meaning))
    error = _refusal(checkpoint, decoder)
    assert error.code == "IDLM-0452"
    assert "logit_shift=False" in error.message


@pytest.mark.parametrize(
    ("meaning", "words"),
    [
        ({"logit_shift": "no"}, "logit_shift='no'"),
        ({"logit_shift": None}, "logit_shift=None"),
        ({"stride": "4"}, "stride='4'"),
        ({"stride": [4], "mask_token_id": "3"}, "mask_token_id='3'"),
    ],
)
def test_semantics_of_another_type_are_named(checkpoint: Path, meaning: dict[str, Any], words: str) -> None:
    (checkpoint / FILE_NAME).write_text(json.dumps(meaning))
    error = _refusal(checkpoint)
    assert error.code == "IDLM-0304"
    assert words in error.message
