"""recipes/smollm2_data.py: which turns become prompts, and which answers are trained on."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from idlm.cli.command import USER_ERROR_STATUS
from idlm.conf.recipe.smollm2_data import HEADER, headers, kept, loops, prompts, turns, write
from idlm.infer.clients.loads import load_prompts
from tests.errors import refused


def record(
    number: int, text: str, *, reason: str = "stop", tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
) -> Any:
    return {"request_id": f"user{number}", "text": text, "token_ids": list(tokens), "finish_reason": reason}


def test_a_turn_that_ended_is_a_prompt_once_with_a_greedy_answer_and_seeds_of_others() -> None:
    written = [
        record(0, "Why is the sky blue?"),
        record(1, " Why is the sky blue?\n"),
        record(2, "Cut off, because", reason="length"),
        record(3, "Hi", tokens=(1, 2)),
        record(4, "\n"),
        record(5, "Name a nut."),
    ]
    rows = prompts(turns(written), [{"question": "What is 2 + 2?", "answer": "4"}], 1)
    assert sorted((row["id"], row["prompt"]) for row in rows) == [
        ("gsm8k0-0", "What is 2 + 2?"),
        ("gsm8k0-1", "What is 2 + 2?"),
        ("user0-0", "Why is the sky blue?"),
        ("user0-1", "Why is the sky blue?"),
        ("user5-0", "Name a nut."),
        ("user5-1", "Name a nut."),
    ]
    by_id = {row["id"]: row["sampling"] for row in rows}
    assert all(by_id[name] == {"temperature": 0} for name in by_id if name.endswith("-0"))
    seeds = [settings["seed"] for name, settings in by_id.items() if name.endswith("-1")]
    assert len(set(seeds)) == len(seeds) == 3 and all(0 <= seed < 2**63 for seed in seeds)
    assert rows == prompts(turns(written), [{"question": "What is 2 + 2?"}], 1)
    assert [row["sampling"]["seed"] for row in headers(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([], False),
        (list(range(100)), False),
        ([7] * 10, False),
        ([7] * 11, True),
        ([*range(20), *range(20), *range(20)], False),
        ([*range(20), 50, *range(20), 51, *range(20), 52, *range(20)], True),
    ],
)
def test_a_run_of_tokens_that_comes_a_fourth_time_is_a_loop(token_ids: list[int], expected: bool) -> None:
    assert loops(token_ids) is expected


def test_answers_without_a_loop_are_kept_also_those_that_a_limit_cut_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = [
        record(0, "a"),
        record(1, "b", reason="length"),
        record(2, "c", tokens=(7,) * 11),
        record(3, "d", reason="error"),
    ]
    assert [row["request_id"] for row in kept(answers)] == ["user0", "user1"]
    assert "12 tokens kept" in capsys.readouterr().err


def test_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write(["headers", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == [HEADER, HEADER]
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(record(0, "\u00e4")) + "\n", encoding="utf-8")
    assert write(["kept", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "\u00e4"
    assert write(["prompts", str(path)]) == USER_ERROR_STATUS
    refused("IDLM-0624", write, ["prompts", str(path), str(path), "sampled=two"])


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("\n{'a': 1}\n", ":2 .*column 2"),
        ("[1]", ":1 .*keys"),
        ('{"text": ""}', ":1 .*keys"),
        (None, "cannot open"),
    ],
)
def test_a_file_of_other_lines_is_refused(tmp_path: Path, content: str | None, found: str) -> None:
    path = tmp_path / "answers.jsonl"
    if content is not None:
        path.write_text(content)
    refused(f"IDLM-0625.*{found}", write, ["prompts", str(path), str(path)])


def test_the_bundled_turns_are_prompts_and_none_of_them_is_held_out(tmp_path: Path) -> None:
    with lzma.open("recipes/assets/smollm2_turns.jsonl.xz", "rt", encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    held_out = load_prompts("recipes/assets/smollm2_held.jsonl")
    assert len(found) == len({turn["text"] for turn in found} - set(held_out)) == 29_115
    rows = prompts(found[:10], [], 1)
    assert len({row["id"] for row in rows}) == 20 and len(held_out) == len(set(held_out)) == 256
