"""Files of prompts: what a line may be."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import GenerateConfig, check_paths
from idlm.infer.cli.prompts import check_prompts, read_prompts
from tests.errors import refused


def _written(path: Path, ids: list[Any]) -> str:
    lines = [{"prompt": "x"} if name is None else {"prompt": "x", "id": name} for name in ids]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    "ids",
    [[None, "02"], [None, None, "٢"], [None, "1" * 5_000], [None, "-1"], [None, 3]],
)
def test_ids_that_differ_from_the_numbers_of_lines_without_one(tmp_path: Path, ids: list[Any]) -> None:
    check_prompts(read_prompts(_written(tmp_path / "in", ids), SamplingParams()))


@pytest.mark.parametrize(("ids", "location"), [([2, None], 2), ([None, "1"], 2), (["a", None, None, 3], 4)])
def test_ids_that_are_the_number_of_a_line_without_one(tmp_path: Path, ids: list[Any], location: int) -> None:
    source = _written(tmp_path / "in", ids)
    refused(f"IDLM-0465: {source}:{location}: ", check_prompts, read_prompts(source, SamplingParams()))


def _read(path: Path, *lines: Any, **options: bool) -> list[Any]:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    check_prompts(read_prompts(str(path), SamplingParams(), **options))
    return list(read_prompts(str(path), SamplingParams(), **options))


USER, ANSWER = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize("ids", [["a", "b", "a"], [7, 8, 7], ["7", 8, 7], [3, 8, None]])
def test_two_lines_of_one_id_are_refused_and_both_named(tmp_path: Path, ids: list[Any]) -> None:
    source = _written(tmp_path / "in", ids)
    with pytest.raises(UserError, match=f"IDLM-0465: {source}:3: id '[a37]' is also the id of {source}:1"):
        check_prompts(read_prompts(source, SamplingParams()))


def test_messages_that_are_answered_already_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in"
    error = refused("IDLM-0436", _read, path, {"messages": [USER]}, {"messages": [USER, ANSWER]})
    assert "drop_last_turn=true" in error.fix
    assert error.message.startswith(f"{path}:2: messages end in an assistant turn")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([USER, ANSWER], [USER]),
        ([USER, ANSWER, ANSWER], [USER]),
        ([USER, ANSWER, USER, ANSWER], [USER, ANSWER, USER]),
        ([USER, ANSWER, USER], [USER, ANSWER, USER]),
        ([USER, CALL], [USER]),
    ],
)
def test_the_last_turn_is_dropped_on_request(tmp_path: Path, given: Any, kept: Any) -> None:
    [line] = _read(tmp_path / "in", {"messages": given}, drop_last_turn=True)
    assert line.prompt == kept


@pytest.mark.parametrize(
    ("turn", "problem", "fix"),
    [
        (CALL, "a turn with tool_calls, which is not read here", "send the conversation to idlm-serve"),
        (CALL | {"content": "x"}, "a turn with tool_calls", "leave tool_calls out"),
        ({"role": "usr", "content": "x"}, "a turn of the role 'usr'; did you mean 'user'?", "'assistant'"),
        ({"role": "human", "content": "x"}, "a turn of the role 'human'", "'user'"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
            "'type': 'image_url'",
            "both texts, or parts of type text",
        ),
    ],
)
def test_turns_that_a_template_would_leave_out_are_refused(
    tmp_path: Path, turn: Any, problem: str, fix: str
) -> None:
    error = refused("IDLM-0436", _read, tmp_path / "in", {"messages": [USER, turn, USER]})
    assert problem in error.message and fix in error.fix, error
    assert _read(tmp_path / "in", {"messages": [USER, ANSWER | {"tool_calls": []}, USER]})


def test_a_content_may_be_in_parts_of_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    [line] = _read(tmp_path / "in", {"messages": [USER | {"content": parts}]})
    assert line.prompt == [{"role": "user", "content": "xy"}]


def test_nulls_of_tables_are_absent(tmp_path: Path) -> None:
    row = {"id": None, "messages": None, "prompt": "x", "sampling": {"seed": 3, "top_k": None}, "level": None}
    [line] = _read(tmp_path / "in", row, carry_keys=True)
    assert (line.request_id, line.prompt, line.params) == ("1", "x", SamplingParams(seed=3))
    assert line.carried == {"level": None}
    refused("IDLM-0433.*\n.*jq", _read, tmp_path / "in", [row])


def test_unknown_keys_are_refused_or_carried(tmp_path: Path) -> None:
    record = {"prompt": "x", "id": 4, "answer": [1, None], "level": "easy"}
    refused("IDLM-0434.*'answer'.*\n.*carry_keys=true", _read, tmp_path / "in", record)
    [line] = _read(tmp_path / "in", record, carry_keys=True)
    assert line.carried == {"answer": [1, None], "level": "easy"} and line.request_id == "4"


@pytest.mark.parametrize("key", ["text", "decoder"])
def test_a_key_of_the_records_own_is_not_carried(tmp_path: Path, key: str) -> None:
    record = {"prompt_ids": [1], key: "x"}
    refused(f"IDLM-0434.*{key!r}", _read, tmp_path / "in", record, carry_keys=True)


def test_gz_is_read_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    plain = tmp_path / "in.jsonl"
    expected = _read(plain, *({"prompt": f"{number}"} for number in range(500)))
    path = tmp_path / "in.jsonl.gz"
    packed = gzip.compress(plain.read_bytes())
    path.write_bytes(packed)
    found = list(read_prompts(str(path), SamplingParams()))
    assert [dataclasses.replace(line, location="") for line in found] == [
        dataclasses.replace(line, location="") for line in expected
    ]
    assert found[4].location == f"{path}:5"
    for damaged in (packed[:-9], b"no gzip", packed[:40] + b"\0" * 40 + packed[80:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"IDLM-0430: input=.*in\.jsonl\.gz' is incomplete or damaged"):
            check_prompts(read_prompts(str(path), SamplingParams()))


@pytest.mark.parametrize("option", ["drop_last_turn", "carry_keys"])
def test_options_without_a_file_are_refused(option: str) -> None:
    refused(f"IDLM-0439: {option}=true", check_paths, GenerateConfig(model="m", output="y", **{option: True}))
    check_paths(GenerateConfig(model="m", input="x", output="y", **{option: True}))
