"""Text of answers: the same streamed or whole, and ended by the checkpoint's stop ids."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from idlm.semantics import Semantics
from idlm.tasks.tokenizer import save_tokenizer
from tests.small_tokenizers import save_byte_fallback
from tests.toy import write_toy_checkpoint
from tests.unit.task_encoder import num_embedding_rows

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_length": 128}
NUM_FALLBACK_ROWS = 288
"""Some of these rows have no token."""


@pytest.fixture(scope="module")
def byte_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A random model, so that most of its bytes are not valid UTF-8."""
    directory = save_byte_fallback(tmp_path_factory.mktemp("bytes"))
    write_toy_checkpoint(directory, vocab_size=NUM_FALLBACK_ROWS, sharpness=0.5)
    Semantics(mask_token_id=NUM_FALLBACK_ROWS - 1, stride=3).save(directory)
    return Engine.from_pretrained(directory, **OPTIONS)


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("seed", range(6))
def test_an_answer_has_one_text(byte_engine: Engine, seed: int) -> None:
    """Streamed, whole, and searched for stop strings, although many bytes are not valid UTF-8."""
    params = SamplingParams(max_tokens=80, seed=seed)
    [whole] = byte_engine.generate(["the"], params)
    [searched] = byte_engine.generate(["the"], replace(params, stop=("never there",)))
    events = list(byte_engine.stream("the", params))
    assert whole.token_ids == searched.token_ids == tuple(t for event in events for t in event.token_ids)
    assert "\ufffd" in whole.text
    assert whole.text == searched.text == "".join(event.text for event in events)


@pytest.mark.parametrize("given", [5, [5, 7]])
def test_answers_end_where_transformers_and_the_tokenizer_end_them(tmp_path: Path, given: Any) -> None:
    """Without generation_config.json, transformers takes eos_token_id of config.json."""
    import transformers

    num_ids = save_tokenizer(tmp_path)
    write_toy_checkpoint(tmp_path, vocab_size=num_embedding_rows(num_ids))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": given}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
    engine = Engine.from_pretrained(tmp_path, **OPTIONS)
    assert theirs == given
    assert set(engine._parts.eos_ids) == {5, *([7] if given == [5, 7] else []), engine.tokenizer.eos_token_id}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert Engine.from_pretrained(tmp_path, **OPTIONS)._parts.eos_ids == (engine.tokenizer.eos_token_id, 9)
