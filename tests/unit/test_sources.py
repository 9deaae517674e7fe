"""Text to samples: what is supervised, and that every bad line is named by file and number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from idlm.errors import UserError
from idlm.tasks import TASKS
from idlm.tasks.tokenizer import TaskEncoder, save_tokenizer
from idlm.tokens import encode_prompt, load_tokenizer
from idlm.train.config import DataConfig
from idlm.train.data.base import SOURCES, Encoder

MASK = 190


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return load_tokenizer(directory)


@pytest.fixture
def encoder(tokenizer) -> Encoder:
    return Encoder(tokenizer, mask_token_id=MASK, use_chat_template=True)


def jsonl(tmp_path: Path, *lines: object) -> DataConfig:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return DataConfig(source="jsonl", path=str(path))


def supervised_text(tokenizer, sample) -> str:
    return tokenizer.decode(sample.token_ids[sample.supervised])


def test_task_samples_supervise_the_response_and_its_eos(tokenizer, encoder: Encoder) -> None:
    source = SOURCES.get("task")(DataConfig(source="task", task="ledger", level="tiny", seed=5), encoder)
    assert source.num_samples is None
    for index in (0, 1, 17):
        sample = source.sample(index)
        task = TASKS.get("ledger")(level="tiny", seed=5).sample(index, "train")
        prompt_ids, response_ids = TaskEncoder(tokenizer.get_vocab()).encode_sample(task)
        assert sample.token_ids.tolist() == prompt_ids + response_ids
        assert sample.supervised.tolist() == [False] * len(prompt_ids) + [True] * len(response_ids)
        assert prompt_ids == encode_prompt(tokenizer, task.prompt), (
            "training and inference disagree on the prompt"
        )


def test_the_three_shapes_of_a_line(tmp_path: Path, tokenizer, encoder: Encoder) -> None:
    messages = [
        {"role": "user", "content": "Sam has 1 keys."},
        {"role": "assistant", "content": "Sam has 2."},
        {"role": "user", "content": "Sam has 3 keys."},
        {"role": "assistant", "content": "Sam has 4."},
    ]
    config = jsonl(
        tmp_path,
        {"prompt": "Sam has 1", "response": "1-1=0"},
        "",
        {"messages": messages},
        {"text": "Sam has 7."},
    )
    source = SOURCES.get("jsonl")(config, encoder)
    assert source.num_samples == 3
    assert supervised_text(tokenizer, source.sample(0)) == "1-1=0<eos>"
    assert supervised_text(tokenizer, source.sample(1)) == "Sam has 2.<eos>Sam has 4.<eos>"
    text = source.sample(2)
    assert supervised_text(tokenizer, text) == "Sam has 7.<eos>"
    assert text.token_ids[0] == tokenizer.bos_token_id
    assert source.sample(1).origin.endswith("data.jsonl:3)")


def test_without_a_template_prompt_and_response_are_joined_bare(tokenizer) -> None:
    encoder = Encoder(tokenizer, mask_token_id=MASK, use_chat_template=False)
    sample = encoder.pair("Sam has 1", "1-1=0", origin="here")
    assert np.array_equal(
        sample.token_ids[~sample.supervised], encode_prompt(tokenizer, "Sam has 1", template="none")
    )


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ('{"prompt": "a", ', "IDLM-0201", "data.jsonl:2"),
        ("[1, 2]", "IDLM-0202", "a JSON list"),
        ('{"question": "a", "answer": "b"}', "IDLM-0202", "answer"),
        ('{"prompt": "a", "response": 3}', "IDLM-0202", "strings"),
        ('{"messages": [{"role": "user"}]}', "IDLM-0202", "messages"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "IDLM-0204", "nothing to predict"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, encoder: Encoder, line: str, code: str, says: str) -> None:
    config = jsonl(tmp_path, {"text": "Sam has 1"}, line)
    with pytest.raises(UserError) as caught:
        SOURCES.get("jsonl")(config, encoder)
    assert caught.value.code == code
    assert says in str(caught.value)
    assert "data.jsonl:2" in str(caught.value)


def test_the_mask_token_is_refused_in_data(tokenizer) -> None:
    period = tokenizer.convert_tokens_to_ids(".")
    with pytest.raises(UserError, match=r"IDLM-0206.*line 4"):
        Encoder(tokenizer, mask_token_id=period, use_chat_template=True).text("Sam has 1.", origin="line 4")


def test_missing_and_empty_files_are_named(tmp_path: Path, encoder: Encoder) -> None:
    with pytest.raises(UserError, match=r"IDLM-0209.*absent\.jsonl"):
        SOURCES.get("jsonl")(DataConfig(path=str(tmp_path / "absent.jsonl")), encoder)
    with pytest.raises(UserError, match="IDLM-0208"):
        SOURCES.get("jsonl")(jsonl(tmp_path, ""), encoder)
