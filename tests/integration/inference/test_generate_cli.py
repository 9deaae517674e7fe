"""`idlm-generate` on the bundled base: where prompts come from, what is written, what survives a stop."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import RECORD_KEYS
from idlm.infer.cli.generate import generate
from idlm.infer.cli.output import partial_path
from idlm.text.tokenizer import encode_messages
from tests.integration.inference.command_lines import (
    AR,
    BASE,
    GREEDY,
    ISD,
    MODEL,
    PROMPTS,
    SHORT,
    TINY,
    answer,
    give_stdin,
    interrupt_after,
    read_lines,
    reference,
    write_lines,
)


@pytest.mark.parametrize("form", [["-p", PROMPTS[0]], ["--prompt", PROMPTS[0]], [f"--prompt={PROMPTS[0]}"]])
def test_a_prompt_is_answered_on_standard_output(form: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert generate([*BASE, *form]) == 0
    assert capsys.readouterr().out == answer(PROMPTS[0]).text + "\n"


@pytest.mark.parametrize("decoder", [AR, ISD], ids=["ar", "isd"])
def test_several_prompts_and_both_decoders(decoder: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*MODEL, *decoder, *GREEDY, "stats=true", "-p", PROMPTS[0], "-p", PROMPTS[1]]
    if decoder == ISD:
        with pytest.warns(UserWarning, match="stride 4 is larger than the 1"):
            assert generate(arguments) == 0
    else:
        assert generate(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join(answer(prompt).text + "\n" for prompt in PROMPTS[:2])
    assert captured.err.startswith(f"[{decoder[0].partition('=')[2]}, exact] {2 * SHORT} tokens, ")
    assert ("acceptance" in captured.err) == (decoder == ISD)
    assert captured.err.endswith(" tokens/s, 2 of 2 cut off\n")


def test_standard_input_is_a_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_stdin(monkeypatch, PROMPTS[1] + "\n")
    assert generate(BASE) == 0
    assert capsys.readouterr().out == answer(PROMPTS[1]).text + "\n"


def test_an_answer_without_text_is_an_empty_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Not the ids of its stop token."""
    first = answer(PROMPTS[0]).token_ids[0]
    two = ["-p", PROMPTS[0], "-p", PROMPTS[0], f"sampling.stop_token_ids=[{first}]"]
    assert generate([*BASE, *two]) == 0
    assert capsys.readouterr().out == "\n\n"


def test_records_of_a_file_are_in_its_order_with_its_settings(tmp_path: Path) -> None:
    """More lines than the queue holds, lengths mixed so that they finish out of order."""
    ids = reference().tokenizer.encode(PROMPTS[2], add_special_tokens=False)
    turn = [{"role": "user", "content": PROMPTS[3]}]
    lines: list[Any] = [
        {"prompt": PROMPTS[0], "id": "first", "sampling": {"max_tokens": 20}},
        {"prompt_ids": ids, "id": 70},
        "",
        {"messages": turn, "sampling": {"max_tokens": 2}},
        *({"prompt": PROMPTS[i % 7], "sampling": {"max_tokens": 1 + i % 4}} for i in range(12)),
    ]
    output = tmp_path / "out.jsonl"
    source = write_lines(tmp_path / "in.jsonl", lines)
    assert generate([*BASE, f"input={source}", f"output={output}"]) == 0
    records = read_lines(output)
    sent = [line for line in lines if line]
    assert [r["request_id"] for r in records] == ["first", "70", "4", *(str(i) for i in range(5, 17))]
    assert [r["prompt"] for r in records] == [
        next(line[key] for key in ("prompt", "prompt_ids", "messages") if key in line) for line in sent
    ]
    assert [len(r["token_ids"]) for r in records] == [20, SHORT, 2, *(1 + i % 4 for i in range(12))]
    assert records[0]["token_ids"] == list(answer(PROMPTS[0], max_tokens=20).token_ids)
    assert records[1]["token_ids"] == list(answer(ids).token_ids)
    assert records[2]["token_ids"] == list(answer(PROMPTS[3], max_tokens=2).token_ids)
    assert not output.with_name("out.jsonl.partial").exists()


def test_fields_of_a_record(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert generate([*BASE, "-p", PROMPTS[0], f"output={output}", "sampling.logprobs=2", "sampling.n=2"]) == 0
    records = read_lines(output)
    assert [(r["request_id"], r["index"]) for r in records] == [("0", 0), ("0", 1)]
    done = answer(PROMPTS[0])
    for record in records:
        assert set(record) == {
            *("prompt", "request_id", "index", "text", "token_ids", "finish_reason", "num_prompt_tokens"),
            *("num_forwards", "accepted_by_position", "tested_by_position", "seed", "exactness", "logprobs"),
            "prompt_logprobs",
            *("num_cached_tokens", "tokens_per_forward", "acceptance_rate", "error"),
            *("decoder", "accelerators", "run_config"),
        }
        assert set(record) == set(RECORD_KEYS)
        assert (record["decoder"], record["accelerators"]) == ("ar", {})
        assert record["text"] == done.text
        assert record["token_ids"] == list(done.token_ids)
        assert record["finish_reason"] == "length"
        assert record["tokens_per_forward"] == 1.0
        assert record["acceptance_rate"] is None
        assert isinstance(record["seed"], int)
        for token_id, entry in zip(record["token_ids"], record["logprobs"], strict=True):
            assert entry["token_id"] == token_id
            assert len(entry["top"]) == 2
            assert max(entry["top"].values()) == entry["top"][str(token_id)] == entry["logprob"] <= 0


def test_carried_keys_and_dropped_turns_reach_the_records(tmp_path: Path) -> None:
    """From a packed file, and a run that is resumed with the same options."""
    user = {"role": "user", "content": PROMPTS[0]}
    lines = [
        {"messages": [user, {"role": "assistant", "content": "7"}], "gold": "7"},
        {"prompt": PROMPTS[1], "gold": None, "id": "b"},
    ]
    source, output = tmp_path / "in.jsonl.gz", tmp_path / "out"
    source.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    options = [*BASE, f"input={source}", f"output={output}", "drop_last_turn=true", "carry_keys=true"]
    assert generate(options) == 0
    first, second = read_lines(output)
    assert (first["prompt"], first["gold"], first["request_id"]) == ([user], "7", "1")
    assert first["text"] == answer(encode_messages(reference().tokenizer, [user])).text
    assert (second["prompt"], second["gold"], second["request_id"]) == (PROMPTS[1], None, "b")
    assert set(second) == {*RECORD_KEYS, "gold"}
    before = output.read_text()
    write_lines(partial_path(str(output)), [first])
    output.unlink()
    assert generate([*options, "resume=true"]) == 0
    assert [{**record, "seed": 0} for record in read_lines(output)] == [
        {**json.loads(line), "seed": 0} for line in before.splitlines()
    ]


def test_an_interrupted_run_keeps_what_is_finished_and_the_old_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line is still running when the others are finished."""
    lines = [{"prompt": PROMPTS[0], "sampling": {"max_tokens": 90}}, *({"prompt": p} for p in PROMPTS[1:5])]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    output.write_text("old\n")
    interrupt_after(monkeypatch, 3 * SHORT)
    with pytest.raises(KeyboardInterrupt):
        generate([*BASE, f"input={source}", f"output={output}", "overwrite=true"])
    assert output.read_text() == "old\n"
    partial = tmp_path / "out.jsonl.partial"
    records = read_lines(partial)
    assert [r["request_id"] for r in records] == ["2", "3", "4"]
    assert all(r["token_ids"] == list(answer(r["prompt"]).token_ids) for r in records)
    assert f"3 finished answers are in {partial}" in capsys.readouterr().err


def test_a_run_stopped_before_its_first_answer_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        generate([*BASE, "-p", PROMPTS[0], f"output={tmp_path / 'out'}"])
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_with_status_2_and_no_traceback() -> None:
    arguments = [
        sys.executable,
        "-m",
        "idlm.infer.cli.generate",
        f"model={TINY}",
        "-p",
        "x",
        "sampling.temprature=0",
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=TINY.parents[2], check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error IDLM-0101")
    assert "'sampling.temperature'" in done.stderr
    assert "Traceback" not in done.stderr


CTRL_C_WHILE_TORCH_LOADS = """
import sys
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
from idlm.infer.cli.generate import main
sys.argv = ["command", "model=nowhere", "-p", "x"]
sys.exit(main())
"""
SIGTERM = """
import os, signal, sys, time
from idlm.cli import command
def work(arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
sys.exit(command.run(work))
"""


@pytest.mark.parametrize(
    ("program", "ending"),
    [(CTRL_C_WHILE_TORCH_LOADS, (130, "interrupted\n")), (SIGTERM, (143, "terminated\n"))],
    ids=["ctrl-c", "sigterm"],
)
def test_signals_end_a_command_quietly(program: str, ending: tuple[int, str]) -> None:
    arguments = [sys.executable, "-c", program]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=TINY.parents[2], check=False)
    assert (done.returncode, done.stderr) == ending
