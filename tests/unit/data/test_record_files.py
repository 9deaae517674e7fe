"""The same records in every file format: the same samples, and the same count of keys that nothing reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from idlm.text.tokenizer import load_tokenizer
from idlm.train.data.base import Encoder
from tests.small_tokenizers import save_byte_level
from tests.unit.data.cached import read, write_lines

TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>{{ tool | tojson }}<|im_end|>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    tokenizer = load_tokenizer(save_byte_level(tmp_path_factory.mktemp("tokenizer")))
    tokenizer.chat_template = TEMPLATE
    return Encoder(tokenizer, mask_token_id=None, use_chat_template=True)


def texts(source: Any, encoder: Encoder) -> list[str]:
    return [encoder.tokenizer.decode(source.sample(index).token_ids) for index in range(source.num_samples)]


def written(folder: Path, records: list[dict[str, Any]]) -> list[tuple[Path, str]]:
    """The records as JSON lines, Parquet, a saved dataset, and a folder that `datasets` converts."""
    for path in (folder / "a.jsonl", folder / "folder" / "train.jsonl"):
        write_lines(path, *records)
    parquet.write_table(pyarrow.Table.from_pylist(records), folder / "a.parquet")
    datasets.Dataset.from_list(records).save_to_disk(str(folder / "saved"))
    names = {"a.jsonl": "jsonl", "a.parquet": "parquet", "saved": "hf", "folder": "hf"}
    return [(folder / name, source) for name, source in names.items()]


def calling(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {
        key: {"type": "integer" if isinstance(value, int) else "string"} for key, value in arguments.items()
    }
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
            {"role": "assistant", "content": "b", "weight": 1},
        ],
        "tools": [{"type": "function", "function": function}],
    }


def test_structures_have_no_keys_of_other_records(tmp_path: Path, encoder: Encoder) -> None:
    records = [
        calling("weather", {"city": "Oslo", "days": [1, 2]}),
        calling("add", {"x": 1}),
        calling("now", {}),
    ]
    # A dataset has no structure without keys.
    records[2]["tools"] = []
    found = {
        path.name: texts(read(path, encoder, source=source), encoder)
        for path, source in written(tmp_path, records)
    }
    assert found["a.jsonl"][1].count('"x"') == 2 and "null" not in "".join(found["a.jsonl"])
    for name, given in found.items():
        assert given == found["a.jsonl"], name


def test_columns_that_are_not_loaded_are_counted(tmp_path: Path, encoder: Encoder) -> None:
    chat = [{"role": "user", "content": "a", "mood": "glad"}, {"role": "assistant", "content": "b"}]
    records = [{"messages": chat, "prompt": "a", "score": 1.5, "source": "x"} for _ in range(3)]
    for path, source in written(tmp_path, records):
        header = read(path, encoder, source=source).header
        assert header["shapes"] == {"messages": 3}
        assert header["ignored"] == dict.fromkeys(("prompt", "score", "source", "messages[].mood"), 3), path


def test_sequences_of_older_datasets_are_turns(tmp_path: Path, encoder: Encoder) -> None:
    turns = {"role": ["user", "assistant"], "content": ["a", "b"]}
    found = [
        texts(read(path, encoder, source=source), encoder)
        for path, source in written(tmp_path, [{"conversation": turns}])
    ]
    assert found == [["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"]] * 4
