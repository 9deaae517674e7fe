"""Every mistake at `idlm-generate` by its code and the words that help, mostly before a model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from idlm.infer.cli.generate import generate
from idlm.infer.cli.output import exclusive_output
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import run_evaluation
from idlm.text import tokenizer as tokens
from tests.errors import refused
from tests.integration.inference.command_lines import BASE, MODEL, TINY, give_stdin, read_lines, write_lines

GOOD = {"prompt": "Lea has 9 shells."}
LONG = "x" * 300
"""Longer than a file system takes a name."""


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded before the mistake is found")

    monkeypatch.setattr(Engine, "from_pretrained", loads)


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("code", "line", "words"),
    [
        ("IDLM-0432", '{"prompt": "x"', ":4 is not valid JSON: Expecting ',' delimiter: column 15"),
        ("IDLM-0432", "[" * 100_000, "JSON"),
        ("IDLM-0432", '{"prompt": "x", "prompt": "y"}', "'prompt' is given twice"),
        ("IDLM-0432", '{"prompt": "x", "sampling": {"n": 1, "seed": 0, "n": 2}}', "'n' is given twice"),
        ("IDLM-0433", {"prompt": "x", "prompt_ids": [1]}, "exactly one"),
        ("IDLM-0434", {"prompt": "x", "samplng": {}}, "'sampling'"),
        ("IDLM-0435", {"prompt": "x", "sampling": {"temprature": 0}}, "'temperature'"),
        ("IDLM-0435", {"prompt": "x", "sampling": {"stop": "abc"}}, "list"),
        ("IDLM-0401", {"prompt": "x", "sampling": {"temperature": -1}}, "temperature=-1"),
        ("IDLM-0401", {"prompt": "x", "sampling": {"ignore_eos": "no"}}, "ignore_eos='no'"),
        ("IDLM-0436", {"prompt": "x", "id": 1.5}, "id is 1.5"),
        ("IDLM-0436", {"prompt": ""}, "empty"),
        ("IDLM-0436", '{"prompt": "\\ud800"}', "not valid text"),
        ("IDLM-0436", {"prompt_ids": "abc"}, "'abc'"),
        ("IDLM-0436", {"prompt_ids": [1, 2.5]}, "2.5"),
        ("IDLM-0436", {"messages": [{"role": "user", "content": None}]}, "None"),
        ("IDLM-0436", {"messages": [{"role": "user", "content": "x"}, "y"]}, "'y'"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_loaded(
    tmp_path: Path, code: str, line: Any, words: str
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [GOOD, "", GOOD, line])
    error = refused(code, generate, [*BASE, f"input={source}"])
    assert f"{source}:4" in error.message
    assert words in error.message


@pytest.mark.usefixtures("_no_model")
def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "x"}\n{"prompt": "\xff"}\n')
    error = refused("IDLM-0432", generate, [*BASE, f"input={source}"])
    assert f"{source}:2" in error.message


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("code", "arguments", "words"),
    [
        ("IDLM-0430", ["input=nowhere.jsonl"], "nowhere.jsonl"),
        ("IDLM-0442", ["-p", "x", f"output={LONG}"], LONG),
        ("IDLM-0437", ["-p"], "-p"),
        ("IDLM-0439", ["-p", "x", "input=README.md"], "both"),
        ("IDLM-0442", ["-p", "x", "output=/nowhere/out"], "/nowhere"),
        ("IDLM-0442", ["-p", "x", f"output={TINY}"], "folder"),
        ("IDLM-0442", ["-p", "x", "output=/dev/null", "overwrite=true"], "device"),
        ("IDLM-0436", ["-p", "x", "-p", "\udcff"], "prompt 2"),
        ("IDLM-0436", ["-p", ""], "empty"),
        ("IDLM-0101", ["-p", "x", "sampling.temprature=0"], "'sampling.temperature'"),
        ("IDLM-0101", ["-p", "x", "--verbose"], "--verbose"),
        ("IDLM-0101", ["-p", "x", str(TINY)], f"; write model={TINY}"),
        ("IDLM-0101", ["-p", "x", "chat_template=off"], "auto, none"),
    ],
)
def test_bad_arguments(code: str, arguments: list[str], words: str) -> None:
    error = refused(code, generate, [*BASE, *arguments])
    assert words in error.message


@pytest.mark.parametrize(("others", "name"), [(0, "prompt_logprobs"), (1, "logprobs")])
def test_a_line_whose_logprobs_would_not_be_printed_is_refused(
    name: str, others: int, tmp_path: Path
) -> None:
    lines = [{"prompt": "a"}] * others + [{"prompt": "b", "sampling": {name: 0}}]
    error = refused("IDLM-0489", generate, [*BASE, f"input={write_lines(tmp_path / 'in.jsonl', lines)}"])
    assert f":{others + 1}: sampling.{name}=0" in error.message


@pytest.mark.usefixtures("_no_model")
def test_no_model_is_a_mistake() -> None:
    refused("IDLM-0438", generate, ["-p", "x"])
    refused("IDLM-0438", generate, [])


@pytest.mark.parametrize("arguments", [[f"model={LONG}"], [f"model={TINY}", f"base={LONG}"]])
def test_a_model_of_a_name_too_long_is_refused(arguments: list[str], tmp_path: Path) -> None:
    refused("IDLM-06(00|11)", generate, [*arguments, "-p", "x", f"output={tmp_path / 'out'}"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_no_model")
def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text("old")
    refused("IDLM-0431", generate, [*BASE, "-p", "x", f"output={output}"])
    assert output.read_text() == "old"
    output.rename(tmp_path / "out.partial")
    error = refused("IDLM-0431", generate, [*BASE, "-p", "x", f"output={output}"])
    assert "interrupted" in error.message
    assert (tmp_path / "out.partial").read_text() == "old"


def test_overwrite_replaces(tmp_path: Path) -> None:
    for name in ("out", "out.partial"):
        (tmp_path / name).write_text("old")
    assert generate([*BASE, "-p", "Lea has 9 shells.", f"output={tmp_path / 'out'}", "overwrite=true"]) == 0
    assert len(read_lines(tmp_path / "out")) == 1
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.usefixtures("_no_model")
def test_an_output_that_another_run_has_is_refused_at_once(tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    with exclusive_output(output, overwrite=False):
        for command in (generate, run_evaluation):
            prompt = ["-p", "x"] if command == generate else []
            refused("IDLM-0462", command, [f"model={TINY}", *prompt, f"output={output}", "overwrite=true"])


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize("name", ["model", "base", "adapters.law", "input", "output"])
def test_a_path_that_is_empty_is_refused_as_empty(name: str) -> None:
    given = ["-p", "x", *([] if name == "model" else MODEL), f"{name}="]
    refused(f"IDLM-0464: {name}='' is empty\n", generate, given)
    if name != "input":
        refused("IDLM-0464", run_evaluation, [*([] if name == "model" else MODEL), f"{name}="])


@pytest.mark.parametrize("ids", [[2, 1], ["x", None, "02"]])
def test_ids_of_records_are_kept_as_given(tmp_path: Path, ids: list[Any]) -> None:
    lines = [GOOD if name is None else {**GOOD, "id": name} for name in ids]
    source = write_lines(tmp_path / "in.jsonl", lines)
    assert generate([*BASE, f"input={source}", f"output={tmp_path / 'out'}"]) == 0
    output = [record["request_id"] for record in read_lines(tmp_path / "out")]
    assert output == [str(number if name is None else name) for number, name in enumerate(ids, start=1)]


def test_without_a_tokenizer_the_way_is_named(tmp_path: Path) -> None:
    bare = shutil.copytree(TINY, tmp_path / "bare", ignore=shutil.ignore_patterns("token*", "manifest*"))
    error = refused("IDLM-0414", generate, [*BASE, f"model={bare}", "-p", "x"])
    assert "input=" in error.fix and '{"prompt_ids": [1, 2, 3]}' in error.fix


@pytest.mark.usefixtures("_no_model")
def test_input_is_never_its_own_output(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "x.jsonl", [GOOD])
    refused("IDLM-0439", generate, [*BASE, f"input={source}", f"output={source}", "overwrite=true"])


@pytest.mark.usefixtures("_no_model")
def test_empty_standard_input_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, "\n")
    error = refused("IDLM-0436: there is no prompt\n", generate, BASE)
    assert "-p TEXT or input=FILE" in error.fix


@pytest.mark.usefixtures("_no_model")
def test_a_terminal_without_a_prompt_is_told_about_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, "", is_terminal=True)
    refusal = refused("IDLM-0436", generate, BASE)
    assert "idlm-chat" in refusal.fix


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("IDLM-0412", {"prompt": "Lea has 9 shells. " * 60}),
        ("IDLM-0411", {"prompt_ids": [1, 192]}),
        ("IDLM-0412", {"prompt_ids": [1] * 160}),
        ("IDLM-0411", {"prompt": "x", "sampling": {"stop_token_ids": [999_999]}}),
        ("IDLM-0453", {"prompt": "x", "sampling": {"decoder_options": {"steps": 2}}}),
    ],
)
def test_a_line_the_engine_refuses_is_named_before_any_is_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, line: Any
) -> None:
    """What only the tokenizer or the model can tell."""
    monkeypatch.setattr(Engine, "step", lambda _: pytest.fail("a pass has run"))
    source = write_lines(tmp_path / "in.jsonl", [GOOD, GOOD, GOOD, line, GOOD])
    error = refused(code, generate, [*BASE, f"input={source}", f"output={tmp_path / 'out'}"])
    assert error.message.startswith(f"{source}:4: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize("shape", ["prompt", "messages"])
def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str
) -> None:
    """Encoding 104 MB would take minutes and 16.7 GB."""
    text = "a " * (160 * tokens.MAX_CHARS_PER_TOKEN)
    line = {shape: text if shape == "prompt" else [{"role": "user", "content": text}]}
    source = write_lines(tmp_path / "in.jsonl", [line])
    monkeypatch.setattr(tokens, "encode_text", lambda *_, **__: pytest.fail("it is encoded"))
    error = refused("IDLM-0412", generate, [*BASE, f"input={source}"])
    assert error.message.startswith(f"{source}:1: this model's maximum context length is 160 tokens")
    assert "characters, more than these can hold" in error.message
