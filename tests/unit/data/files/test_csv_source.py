"""Tables of text: the same samples as those of JSON lines, and what is refused."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from idlm.files.records import source_of
from idlm.train.data.base import Encoder
from tests.errors import refused
from tests.unit.data.cached import contents, read, write_lines

MASK = 190
TURNS = [{"role": "user", "content": "Sam has 1."}, {"role": "assistant", "content": "Sam has 2."}]


@pytest.fixture
def encoder(tokenizer) -> Encoder:
    return Encoder(tokenizer, mask_token_id=MASK, use_chat_template=True)


def table(path: Path, records: list[dict[str, Any]], **settings: Any) -> Path:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, fieldnames=[*records[0]], **settings)
        writer.writeheader()
        writer.writerows(records)
    return path


PAIRS = [{"prompt": f'Sam has {n}, "Mia"\n has 2; 3\t4.', "response": str(n)} for n in (1, 22)]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("a.csv", {}),
        ("a.csv", {"delimiter": ";", "quoting": csv.QUOTE_ALL, "lineterminator": "\n"}),
        ("A.TSV", {"delimiter": "\t"}),
    ],
)
def test_a_table_has_the_samples_of_json_lines(
    tmp_path: Path, encoder: Encoder, name: str, settings: dict[str, Any]
) -> None:
    lines = contents(read(write_lines(tmp_path / "b.jsonl", *PAIRS), encoder))
    path = table(tmp_path / name, PAIRS, **settings)
    found = read(path, encoder)
    assert contents(found) == lines, "answers that are numbers are text"
    assert found.sample(1).origin.endswith(f"{name}:4)"), "the line in which the row begins"
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert contents(read(packed, encoder)) == lines


def test_a_name_in_quotes_does_not_choose_the_delimiter(tmp_path: Path, encoder: Encoder) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"number, first";prompt;response\n1;"Sam, Mia";2\n')
    records = write_lines(tmp_path / "b.jsonl", {"prompt": "Sam, Mia", "response": "2"})
    assert contents(read(path, encoder)) == contents(read(records, encoder))


def test_cells_hold_turns_weights_and_nulls(tmp_path: Path, encoder: Encoder) -> None:
    turns = [*TURNS, *TURNS]
    records: list[dict[str, Any]] = [
        {"": 0, "messages": json.dumps(turns), "weights": "[1, 0, 1, 0]", "system": "", "source": "x"},
        {"": 1, "messages": json.dumps(turns), "weights": "", "system": "Sam", "source": "y"},
    ]
    plain = [{"messages": turns, "weights": [1, 0, 1, 0]}, {"messages": turns, "system": "Sam"}]
    refused("assistant turns have the weight 0", read, table(tmp_path / "a.csv", records), encoder)
    records[0]["weights"], plain[0]["weights"] = "[1, 0, 1, 1]", [1, 0, 1, 1]
    found = read(table(tmp_path / "b.csv", records), encoder)
    assert contents(found) == contents(read(write_lines(tmp_path / "b.jsonl", *plain), encoder))
    assert found.header["ignored"] == {"source": 2}, "but not the index that pandas writes"


ANSWERS = (
    '[{"value": 3, "content": "x"}]',
    '[{"role": "admin", "content": "x"}]',
    '[{"role": "user", "name": "Mia"}]',
    "[{'from': 'Oslo', 'value': 1}]",
    '[{"role": ',
)


def test_json_that_forms_no_conversation_is_text(tmp_path: Path, encoder: Encoder) -> None:
    pairs = [{"prompt": "Sam has 1.", "response": answer} for answer in ANSWERS]
    lines = contents(read(write_lines(tmp_path / "b.jsonl", *pairs), encoder))
    assert contents(read(table(tmp_path / "a.csv", pairs), encoder)) == lines


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("prompt,response\na,b\na,b,c\n", "IDLM-0201", r"csv:3 has 3 cells, and the header has 2"),
        ('prompt,response\na,"b \\"c\\" d"\n', "IDLM-0201", r"csv:2 begins a row .* expected after"),
        ('prompt,response\na,b\na,"b\n', "IDLM-0201", "csv:3 begins a row .* unexpected end"),
        ("prompt,prompt,response\na,b,c\n", "IDLM-0201", "two columns 'prompt'"),
        ("prompt,response\na,\n", "IDLM-0202", r"csv:2: response=None"),
        ("prompt,response,label\na,b,False\n", "IDLM-0202", "label=False"),
        ("prompt,response,weight\na,b,0\n", "IDLM-0202", "weight=0 is a weight of the whole record"),
        (
            "prompt,chosen,rejected\na,\"[{'content': 'b', 'role': 'assistant'}]\",c\n",
            "IDLM-0202",
            "not JSON",
        ),
        ("a question,an answer\na,b\n", "IDLM-0202", "none of the known shapes"),
        ('prompt,response\n"a\n\n",b\n\na,b" c\n"a" b,c\n', "IDLM-0201", "csv:7 begins a row"),
        ('prompt,response\n"a\n",caf\xe9\n', "IDLM-0239", r"csv:3 \(byte 6 of the line\) is not UTF-8"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    tmp_path: Path, encoder: Encoder, text: str, code: str, message: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("latin-1"))
    refused(
        rf"(?s)\A{code}.*{message}", read, path, encoder, shape="preference" if "chosen" in text else "auto"
    )


@pytest.mark.parametrize(
    ("encoding", "message"), [("utf-16", "not UTF-8 but UTF-16"), ("cp1252", "it may be WINDOWS-1252")]
)
def test_the_encoding_of_a_spreadsheet_is_named(
    tmp_path: Path, encoder: Encoder, encoding: str, message: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("prompt;response\nÜbermäßig „schön“;für 5 €\n".encode(encoding))
    refused(f"(?s){message}.*iconv -f {message.split()[-1]}", read, path, encoder)


def test_a_table_next_to_records_is_about_them(tmp_path: Path, encoder: Encoder) -> None:
    table(tmp_path / "a.csv", PAIRS)
    assert source_of(str(tmp_path)) == "csv"
    write_lines(tmp_path / "a.jsonl", *PAIRS)
    found = read(tmp_path, encoder, cache_dir=str(tmp_path.parent / "cache"))
    assert (found.header["files"], found.header["left_out"]) == (
        [str(tmp_path / "a.jsonl")],
        [str(tmp_path / "a.csv")],
    )
