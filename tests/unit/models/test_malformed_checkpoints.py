"""Checkpoint files whose values are of another type, or no numbers to compute with: refused by code and name,
never a traceback and never other arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from idlm.infer.engine import Engine
from idlm.semantics import FILE_NAME
from tests.errors import refused
from tests.toy import write_toy_checkpoint

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_length": 32, "max_num_seqs": 2}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_toy_checkpoint(tmp_path / "model")


def _edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


@pytest.mark.parametrize("decoder", ["ar", "isd"])
def test_token_causal_decoding_needs_rows_that_predict_the_next_token(checkpoint: Path, decoder: str) -> None:
    meaning = {"causality": "causal", "logit_shift": False, "mask_token_id": 3, "stride": 2}
    (checkpoint / FILE_NAME).write_text(json.dumps(meaning))
    error = refused("IDLM-0452", Engine.from_pretrained, checkpoint, decoder, **OPTIONS)
    assert "logit_shift=False" in error.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": 5}, "layer_types=5"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}}, "rope_theta=nan"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}}, "rope_theta=1000"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e300}}, "not above 0"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": math.nan}}, "not above 0"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": math.inf}}, "factor"),
    ],
)
def test_configs_that_give_no_numbers_are_refused(
    checkpoint: Path, changes: dict[str, Any], words: str
) -> None:
    _edit(checkpoint / "config.json", **changes)
    error = refused("IDLM-0604", Engine.from_pretrained, checkpoint, **OPTIONS)
    assert words in error.message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_pages": 50_000_000}, "num_pages=50000000"),
        ({"num_pages": 10**11}, "num_pages=100000000000"),
        ({"max_num_seqs": 10**11}, "max_num_seqs=100000000000"),
        ({"max_length": None}, "max_length=1000000000000"),
    ],
)
def test_sizes_beyond_memory_are_refused_before_allocation(
    checkpoint: Path, options: dict[str, Any], words: str
) -> None:
    _edit(checkpoint / "config.json", max_position_embeddings=10**12)
    error = refused("IDLM-0405", Engine.from_pretrained, checkpoint, **{**OPTIONS, **options})
    assert words in error.message
