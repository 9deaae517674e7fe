"""Tasks whose problems come from a file: what is asked, what is right, and files that are none of theirs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.evaluation.benchmarks import code
from idlm.infer.evaluation.benchmarks.code import CodeTask
from idlm.infer.evaluation.evaluate import run_evaluation
from idlm.infer.evaluation.file_tasks import FILE_TASKS, FileTask
from idlm.infer.evaluation.sandbox import Program, ProgramOutcome, Sandbox
from tests.errors import refused
from tests.integration.inference.command_lines import MODEL, read_lines

GSM8K = {"question": "Two and two?", "answer": "2+2=4\n#### 1,004"}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from math import floor\n\ndef poly(x):\n    return x * x\n\n"
    "def near(x: float) -> int:\n    '''Doc.'''\n",
    "test": "def check(candidate):\n    assert candidate(1.5) == 1\n    assert poly(near(3.2)) == 9\n",
    "entry_point": "near",
    "canonical_solution": "    return floor(x)\n",
}
MBPP = {
    "task_id": 11,
    "prompt": "Add a set.",
    "code": "def sum(a):\n    return {*a, 1}",
    "test_imports": ["import math"],
    "test_list": ["assert sum([2]) == set((1, 2))", "assert math.isclose(max(sum([3])), 3)"],
}
SETTINGS = ["device=cpu", "sampling.max_tokens=4", "sampling.temperature=0", "baseline=null"]


def _file(tmp_path: Path, *records: Any) -> str:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def _task(tmp_path: Path, name: str, record: Any) -> FileTask:
    return FILE_TASKS.get(name).load(name, _file(tmp_path, record), allow_code=True)


def _answer(text: str) -> str:
    return f"<think>hm</think>Here:\n```python\n{text}\n```\n"


def test_gsm8k(tmp_path: Path) -> None:
    task = _task(tmp_path, "gsm8k", GSM8K)
    sample = task.sample(0, "test")
    assert sample.prompt.startswith("Two and two?\n") and "\\boxed{}" in sample.prompt
    assert sample.response == "1,004"
    assert task.grade(sample, "<think>\\boxed{3}</think>It is \\boxed{1004}.").correct
    wrong = task.grade(sample, "\\boxed{5}")
    assert not wrong.correct and not wrong.final_answer_correct and "'5'" in wrong.reason
    assert "no \\boxed{}" in task.grade(sample, "1004").reason


def test_math500(tmp_path: Path) -> None:
    task = _task(tmp_path, "math500", {"problem": "Half?", "answer": "\\frac{1}{2}", "level": 1})
    assert task.grade(task.sample(0, "test"), "\\boxed{0.5}").correct


def test_problems_with_the_same_question_have_their_own_answers(tmp_path: Path) -> None:
    records = [{"problem": "Pick one.", "answer": answer} for answer in ("1", "2")]
    task = FILE_TASKS.get("math500").load("math500", _file(tmp_path, *records), allow_code=True)
    for index, is_right in enumerate((True, False)):
        sample = task.sample(index, "test")
        assert task.grade(sample, "\\boxed{1}").correct == is_right


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that are run, in a sandbox where there is one; else none is."""
    programs = []
    run = Sandbox.run

    def counting(box: Sandbox, program: Program, **options: Any) -> ProgramOutcome:
        programs.append(program)
        return run(box, program, **{"seconds": 60.0, **options})

    monkeypatch.setattr(Sandbox, "run", counting)
    try:
        Sandbox()
    except UserError as error:
        pytest.skip(error.message)
    programs.clear()
    return programs


def test_humaneval(tmp_path: Path, ran: list[Program]) -> None:
    task = _task(tmp_path, "humaneval", HUMANEVAL)
    sample = task.sample(0, "test")
    assert task.grade(sample, _answer(sample.response)).correct
    assert task.grade(sample, _answer("def near(x):\n    return floor(x)")).correct
    future = "from __future__ import annotations\n\ndef near(x: Later) -> int:\n    return floor(x)"
    assert task.grade(sample, _answer(future)).correct
    assert "AssertionError" in task.grade(sample, _answer("def near(x):\n    return 7")).reason
    assert task.grade(sample, "def near(x): return floor(x)").correct
    assert "no Python code block" in task.grade(sample, "Round the number down.").reason
    assert len(ran) == 2 + 5
    packaged = {**HUMANEVAL, "test": f"import numpy_\n{HUMANEVAL['test']}"}
    refused("IDLM-0482: .*No module named 'numpy_'", _task, tmp_path, "humaneval", packaged)


def test_mbpp(tmp_path: Path, ran: list[Program]) -> None:
    task = _task(tmp_path, "mbpp", MBPP)
    sample = task.sample(0, "test")
    assert "assert sum([2])" in sample.prompt
    assert task.grade(sample, _answer(MBPP["code"])).correct
    forged = "set = max = lambda *_: 7\ndef sum(a):\n    return 7"
    assert not task.grade(sample, _answer(forged)).correct
    older = {**MBPP, "text": MBPP["prompt"], "test_setup_code": "import math"}
    older |= {"test_imports": None}
    del older["prompt"]
    other = _task(tmp_path, "mbpp", older)
    assert isinstance(task, CodeTask) and isinstance(other, CodeTask)
    assert task.program(task.records[0], "") == other.program(other.records[0], "")
    refused("holds no problem", _task, tmp_path, "mbpp", {**MBPP, "task_id": 7})


def test_the_set_up_of_mbpp_makes_objects_of_the_answer(tmp_path: Path, ran: list[Program]) -> None:
    code = "class Node:\n    def __init__(self, x): self.x = floor(x)\ndef value(node): return node.x"
    setup = {"test_imports": [], "test_setup_code": "from math import floor\nroot = Node(7.5)"}
    task = _task(tmp_path, "mbpp", {**MBPP, **setup, "code": code, "test_list": ["assert value(root) == 7"]})
    assert task.grade(task.sample(0, "test"), _answer(code)).correct


def test_code_runs_only_when_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "run", None)
    monkeypatch.setattr(Engine, "from_pretrained", None)
    with pytest.raises(UserError, match="IDLM-0483: .*programs that the model writes"):
        run_evaluation([*MODEL, "task=humaneval", f"data={_file(tmp_path, HUMANEVAL)}"])


def test_without_a_sandbox_no_code_task_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Sandbox:
        raise UserError("IDLM-0480", "no namespaces", fix="")

    monkeypatch.setattr(code, "Sandbox", refuse)
    monkeypatch.setattr(Engine, "from_pretrained", None)
    with pytest.raises(UserError, match="IDLM-0480"):
        run_evaluation([*MODEL, "task=mbpp", "allow_code=true", f"data={_file(tmp_path, MBPP)}"])


def test_a_packed_file_and_a_list_are_read_too(tmp_path: Path) -> None:
    packed, listed = tmp_path / "a.jsonl.gz", tmp_path / "b.json"
    packed.write_bytes(gzip.compress(json.dumps(GSM8K).encode()))
    listed.write_text(json.dumps([GSM8K, {**GSM8K, "question": "Other?"}]))
    assert len(FILE_TASKS.get("gsm8k").load("gsm8k", str(packed), allow_code=False).records) == 1
    assert len(FILE_TASKS.get("gsm8k").load("gsm8k", str(listed), allow_code=False).records) == 2


@pytest.mark.parametrize(
    ("code", "content", "words"),
    [
        ("IDLM-0482", '{"question": "a"}\n', ["problems.jsonl:1", "'answer'", "text", "['question']"]),
        ("IDLM-0482", '{"question": "a", "answer', [":1 is not JSON: Unterminated string", ": column 19"]),
        ("IDLM-0482", '[{"question": "a"},\n  3,\n  }]', [":3 is not JSON: Expecting value: column 3"]),
        ("IDLM-0482", '{"question": "a", "answer": "It is 4."}', ["problems.jsonl:1", "'answer'", "'####'"]),
        ("IDLM-0482", "", ["holds no problem of task=gsm8k"]),
        ("IDLM-0481", b"\xff\xfe\x00", ["damaged"]),
        ("IDLM-0481", None, ["is not a file"]),
    ],
)
def test_files_that_are_not_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, content: Any, words: list[str]
) -> None:
    monkeypatch.setattr(Engine, "from_pretrained", None)
    path = tmp_path / "problems.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    error = refused(code, run_evaluation, [*MODEL, "task=gsm8k", f"data={path}"])
    assert all(word in error.message for word in words), error.message
    assert "gsm8k" in error.fix or code == "IDLM-0482"


@pytest.mark.parametrize(
    ("code", "arguments", "words"),
    [
        ("IDLM-0485", ["task=gsm8k"], "reads a file of problems"),
        ("IDLM-0485", ["task=ledger", "data=FILE"], "makes its problems itself"),
        ("IDLM-0102", ["task=gsm8", "data=FILE"], "did you mean 'gsm8k'?"),
        ("IDLM-0443", ["task=gsm8k", "data=FILE", "num=2"], "num=2"),
        ("IDLM-0484", ["compare=[isd:acceptance]"], "isd:acceptance"),
        ("IDLM-0484", ["compare=[ar,ar]"], "given twice"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, arguments: list[str], words: str
) -> None:
    monkeypatch.setattr(Engine, "from_pretrained", None)
    given = [argument.replace("FILE", _file(tmp_path, GSM8K)) for argument in arguments]
    error = refused(code, run_evaluation, [*MODEL, *given])
    assert words in error.message


def test_decoders_side_by_side_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = _file(tmp_path, GSM8K, {**GSM8K, "question": "Three?"}), tmp_path / "out.jsonl"
    isd = ["decoder=isd", "decoder.stride=2", "mask_token_id=170", "compare=[isd:acceptance:published,isd]"]
    arguments = [*MODEL, *SETTINGS[:3], *isd, "task=gsm8k", f"data={data}", f"output={output}"]
    with pytest.warns(UserWarning, match="stride 2"):
        assert run_evaluation(arguments) == 0
    out = capsys.readouterr().out
    names = ["ar", "isd", "isd:acceptance:published", "compare=isd"]
    assert [line.split()[0] for line in out.splitlines()[1:5]] == names
    assert "isd - ar: +0.000 in exact match, 95% interval" in out and "2 prompts in pairs" in out
    assert "isd: 2 of 2 answers are cut off" in out
    records = read_lines(output)
    assert [record["decoder"] for record in records] == [name for name in names for _ in range(2)]
    assert {record["reference"] for record in records} == {"1,004"}
    assert [record["completion"]["exactness"] for record in records] == [
        *["exact"] * 4,
        *["lossy"] * 2,
        *["exact"] * 2,
    ]
