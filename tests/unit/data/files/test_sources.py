"""Records to samples: every shape of every file format, what is supervised, and that bad records are
named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from idlm.errors import UserError
from idlm.tasks import TASKS
from idlm.text.tokenizer import encode_messages, encode_prompt
from idlm.train.config.data import DataConfig
from idlm.train.data import sources
from idlm.train.data.base import SOURCES, Encoder
from tests.errors import refused
from tests.unit.data.cached import config_of, contents, read, write_lines
from tests.unit.task_encoder import TaskEncoder

MASK = 190
USER, ASSISTANT = "Sam has 1 keys.", "Sam has 2."
RECORDS: dict[str, dict[str, Any]] = {
    "messages": {
        "messages": [{"role": "user", "content": USER}, {"role": "assistant", "content": ASSISTANT}],
        "prompt": USER,
        "id": 7,
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": USER}, {"from": "gpt", "value": ASSISTANT}],
        "id": "x",
    },
    "pair": {"prompt": USER, "response": ASSISTANT},
    "completion": {"prompt": USER, "completion": ASSISTANT},
    "alpaca": {"instruction": USER, "input": "", "output": ASSISTANT},
}


@pytest.fixture
def encoder(tokenizer) -> Encoder:
    return Encoder(tokenizer, mask_token_id=MASK, use_chat_template=True)


def jsonl(folder: Path, *lines: object, **settings: Any) -> DataConfig:
    return config_of(write_lines(folder / "data.jsonl", *lines), **settings)


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


@pytest.mark.parametrize("shape", RECORDS)
def test_every_chat_shape_becomes_the_same_sample(
    tmp_path: Path, tokenizer, encoder: Encoder, shape: str
) -> None:
    source = read(jsonl(tmp_path, RECORDS[shape]), encoder)
    prompt_ids = encode_messages(tokenizer, [{"role": "user", "content": USER}])
    answer_ids = [*tokenizer.encode(ASSISTANT, add_special_tokens=False), tokenizer.eos_token_id]
    assert contents(source) == [
        (prompt_ids + answer_ids, [False] * len(prompt_ids) + [True] * len(answer_ids))
    ]
    assert source.header["shapes"] == {"pair" if shape == "completion" else shape: 1}


def test_texts_are_supervised_whole_and_alpaca_appends_the_input(
    tmp_path: Path, tokenizer, encoder: Encoder
) -> None:
    text = read(jsonl(tmp_path, {"text": "Sam has 7."}, "", {"text": "Sam has 8."}), encoder)
    assert [supervised_text(tokenizer, text.sample(i)) for i in (0, 1)] == [
        "Sam has 7.<eos>",
        "Sam has 8.<eos>",
    ]
    assert text.sample(0).token_ids[0] == tokenizer.bos_token_id
    assert text.sample(1).origin.endswith("data.jsonl:3)")
    config = jsonl(tmp_path, {"instruction": "Sam has 1", "input": "2 keys.", "output": "2"})
    (ids, _flags), *_ = contents(read(config, encoder))
    assert tokenizer.decode(ids) == "<bos>Sam has 1\n\n2 keys.\n\n2<eos>"


def test_each_file_of_the_folder_is_one_source() -> None:
    files = Path(sources.__file__).parent.glob("*.py")
    assert sorted(path.stem for path in files if path.stem != "__init__") == SOURCES.names()


def test_places_in_arrays_and_shards_are_named(tmp_path: Path, encoder: Encoder) -> None:
    good = {"prompt": "Sam has 1", "response": "2"}
    text = "[\n" + ",\n".join(json.dumps(good) for _ in range(3)) + ",\n\n" + '{"prompt": "Sam"}\n]'
    (tmp_path / "a.json").write_text(text)
    refused(r"a\.json:4 ", read, tmp_path / "a.json", encoder)
    (tmp_path / "a.json").write_text(text.replace('{"prompt": "Sam"}', '{"prompt": "a", "prompt": "b"}'))
    with pytest.raises(UserError, match=r"IDLM-0231.*a\.json.*'prompt' is given twice"):
        read(tmp_path / "a.json", encoder, on_bad_record="skip")
    (tmp_path / "a.json").write_text(text[:-1].replace('{"prompt": "Sam"}', '{"prompt": "Sa'))
    refused(r"IDLM-0231.*a\.json.*line 6", read, tmp_path / "a.json", encoder, on_bad_record="skip")


BAD_LINES = [
    ('{"prompt": "a", x', "IDLM-0201", "enclosed in double quotes: column 17"),
    ("[1, 2]", "IDLM-0202", "a JSON list"),
    ('{"prompt": "a", "response": "b", "response": "c"}', "IDLM-0201", "'response' is given twice"),
    ('{"title": "a", "body": "b"}', "IDLM-0230", "'pair'"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "IDLM-0230", '{"prompt": str'),
    ('{"prompt": "a", "response": 3}', "IDLM-0202", "response=3"),
    ('{"prompt": "a", "response": null}', "IDLM-0202", "response=None"),
    ('{"prompt": "a", "response": " \\n"}', "IDLM-0204", "an empty response"),
    ('{"prompt": "a", "response": "<bos>"}', "", ""),
    ('{"prompt": "a", "response": "b", "tools": [{}]}', "IDLM-0202", "tools"),
    ('{"prompt": "\\ud800", "response": "b"}', "IDLM-0202", "surrogate"),
]


@pytest.mark.parametrize(("line", "code", "message"), BAD_LINES)
def test_a_bad_line_is_named_or_skipped_and_counted(
    tmp_path: Path, encoder: Encoder, line: str, code: str, message: str
) -> None:
    good = {"prompt": "Sam has 1", "response": "2"}
    if code:
        error = refused(code, read, jsonl(tmp_path, good, line, good), encoder)
        assert message in str(error)
        assert "data.jsonl:2" in error.message
        source = read(jsonl(tmp_path, good, line, good, on_bad_record="skip"), encoder)
        assert source.num_samples == 2
        assert source.header["num_skipped"] == 1
        assert "data.jsonl:2" in source.header["skipped_examples"][0]
        assert source.sample(1).origin.endswith("data.jsonl:3)")
    else:
        assert read(jsonl(tmp_path, good, line), encoder).num_samples == 2


ANSWER = {"prompt": [2], "text": "a", "token_ids": [2], "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("record", "code", "message"),
    [
        ({"title": "a", "body": "b"}, "IDLM-0202", "nearest shape"),
        ({"messages": [{"role": "user", "content": "a"}]}, "IDLM-0204", "nothing to predict"),
        (ANSWER | {"prompt": [2**33, 2]}, "IDLM-0202", "prompt[0]=8589934592, which is not"),
        (ANSWER | {"token_ids": [2**31]}, "IDLM-0202", "token_ids that are not"),
        (ANSWER | {"token_ids": [9999]}, "IDLM-0227", "token id 9999"),
        ({"text": "  "}, "IDLM-0204", "an empty text"),
    ],
)
def test_unknown_and_malformed_shapes_name_the_nearest(
    tmp_path: Path, encoder: Encoder, record: dict[str, Any], code: str, message: str
) -> None:
    error = refused(code, read, jsonl(tmp_path, record), encoder)
    assert message in error.message
    assert "data.jsonl:1" in error.message


def test_a_given_shape_settles_what_fits_several(tmp_path: Path, tokenizer, encoder: Encoder) -> None:
    record = {"instruction": "Sam", "output": "has", "text": "Sam has 1."}
    source = read(jsonl(tmp_path, record, shape="text"), encoder)
    assert supervised_text(tokenizer, source.sample(0)) == "Sam has 1.<eos>"
    refused("is not of data.shape=pair", read, jsonl(tmp_path, record, shape="pair"), encoder)


def test_without_a_template_prompt_and_response_are_joined_bare(tokenizer) -> None:
    encoder = Encoder(tokenizer, mask_token_id=MASK, use_chat_template=False)
    sample = encoder.pair("Sam has 1", "1-1=0", origin="here")
    assert np.array_equal(
        sample.token_ids[~sample.supervised], encode_prompt(tokenizer, "Sam has 1", template="none")
    )
    spelt = encoder.pair("<bos>Sam has 1", "1-1=0", origin="here")
    assert np.array_equal(spelt.token_ids, sample.token_ids)
    with pytest.raises(UserError, match=r"IDLM-0228.*here begins with two bos"):
        encoder.pair("<bos><bos>Sam has 1", "1-1=0", origin="here")


def test_the_mask_token_is_refused_in_data_and_in_caches(tmp_path: Path, tokenizer, encoder: Encoder) -> None:
    period = tokenizer.convert_tokens_to_ids(".")
    strict = Encoder(tokenizer, mask_token_id=period, use_chat_template=True)
    refused(r"IDLM-0206.*line 4", strict.text, "Sam has 1.", origin="line 4")
    config = jsonl(tmp_path, *({"text": text} for text in ("Sam has 1", "Lea", "Sam has 2.", "Sam.")))
    read(config, encoder)
    refused(r"IDLM-0206.*data\.jsonl:3 contains", read, config, strict)


def test_missing_empty_and_damaged_files_are_named(tmp_path: Path, encoder: Encoder) -> None:
    refused(r"IDLM-0209.*absent\.jsonl", read, tmp_path / "absent.jsonl", encoder)
    refused(r"IDLM-0209.*no file matches", read, tmp_path / "*.jsonl", encoder)
    (tmp_path / "empty").mkdir()
    refused(r"IDLM-0209.*has no file that ends in", read, tmp_path / "empty", encoder)
    refused("IDLM-0208", read, jsonl(tmp_path, ""), encoder)
    whole = gzip.compress(b"\n".join(json.dumps({"text": f"Sam has {i}."}).encode() for i in range(500)))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    refused(r"IDLM-0231.*cut\.jsonl\.gz", read, cut, encoder, on_bad_record="skip")
    table = tmp_path / "bad.parquet"
    table.write_bytes(b"PAR1 but not really PAR1")
    refused(r"IDLM-0231.*bad\.parquet", read, table, encoder, source="parquet")


def test_what_may_not_be_read_is_named(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = jsonl(tmp_path, {"text": "Sam has 1."})
    names = {"open": "data.jsonl", "stat": "data.jsonl", "is_dir": "cache"}
    for method, name in names.items():
        original = getattr(Path, method)

        def refusing(
            path: Path, *args: Any, original: Any = original, name: str = name, **kwargs: Any
        ) -> Any:
            if name in path.parts:
                raise PermissionError(13, "Permission denied", str(path))
            return original(path, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(Path, method, refusing)
            refused(rf"IDLM-0237.*{name}.*Permission denied", read, config, encoder)


def test_a_name_that_is_not_utf8_is_shown_escaped(tmp_path: Path, encoder: Encoder) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.jsonl"))
    path.write_text('{"text": "Sam has 1."}')
    source = read(path, encoder)
    source.sample(0).origin.encode()
    assert r"a\xff.jsonl:1" in source.sample(0).origin


def test_an_array_counts_its_items_and_ends_the_file(tmp_path: Path, encoder: Encoder) -> None:
    path = tmp_path / "a.json"
    for text, message in (
        ('\n\n[\n{"text": "Sam"}, 3]', r"IDLM-0202.*a\.json:2"),
        ('[{"text": "Sam"}]\n[]', r"IDLM-0231.*Extra data"),
    ):
        path.write_text(text)
        refused(message, read, path, encoder)
    for number, name in enumerate(("a.json", "a.jsonl", "records")):
        path = tmp_path / name
        path.write_text(json.dumps([{"text": "Sam"}] * 2, indent=number))
        assert read(path, encoder).num_samples == 2
    lines = tmp_path / "lines.jsonl"
    lines.write_text('[{"text": "Sam"}]\n' * 2 + '{"text": "Sam"}\n')
    refused(r"IDLM-0202.*lines\.jsonl:1 has a JSON list", read, lines, encoder)
    assert read(config_of(lines, on_bad_record="skip"), encoder).num_samples == 1
