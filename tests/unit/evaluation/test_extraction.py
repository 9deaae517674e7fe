"""Answers are found where the paper looks for them (H.4), and mathematical ones are compared."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from idlm.errors import UserError
from idlm.infer.evaluation.extraction import boxed, function_block, same_answer, strip_thinking
from idlm.infer.evaluation.mathematics import equality


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"<think>\boxed{1}</think> \boxed{ 2 }", "2"),
        (r"<think>\boxed{1}</think> 2", None),
        (r"<think> \boxed{1}", None),
        (r"\boxed{3} and \boxed{4", "3"),
        ("42", None),
    ],
)
def test_the_last_complete_box_after_the_thinking(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


@pytest.mark.sweep
def test_many_open_boxes_take_no_time() -> None:
    assert boxed(r"\boxed{" * 2000) is None


def test_the_last_code_block_with_a_function() -> None:
    first, last = "def f():\n    return 1\n", "def f():\n    return 2\n"
    text = f"```python\n{first}```\n```py\n{last}```\nUse it:\n```python\nf()\n```\n```\nout\n```"
    assert function_block(text) == last
    assert function_block(f"<think>```python\n{first}```</think> no") is None
    assert function_block(f"cut off ```python\n{last}") == last
    assert function_block("def f(): pass") is None


def test_thinking_that_never_ends_is_no_answer() -> None:
    assert strip_thinking("<think>a") == ""
    assert strip_thinking("a</think>b") == "b"
    assert strip_thinking("b") == "b"


EQUAL = [
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    (r"1,\!234", "1234"),
    (r"1\,234", "1234"),
    ("70 000 dollars", "70000"),
    ("18.00", "18"),
    ("18.", "18"),
    (r"\$18", "18"),
    ("€18", "18"),
    (r"\text{18 dollars}", "18"),
    ("72 clips", "72"),
    (r"\dfrac{1}{2}", "0.5"),
    (r"\frac12", r"\frac{1}{2}"),
    (r"-\frac{3}{4}", "-0.75"),
    ("x = 5", "5"),
    (r"90^\circ", "90"),
    ("45°", "45"),
    (r"50\%", "50"),
    ("0.5", r"50\%"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    (r"5\text{ cm}", "5"),
    (r"8\sqrt3 \text{ cm}^2", r"8\sqrt{3}"),
    ("Evelyn", r"\text{Evelyn}"),
    ("(C)", r"\text{(C)}"),
    (r"\text{East}", r"\mathrm{east}"),
    ("2516_8", "2516_{8}"),
    (r"11\sqrt2", r"11\sqrt{2}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("-2, 1", "1,-2"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("p - q", "p-q"),
    ("nan", "nan "),
]
OTHER = [
    ("(1,234)", "(1,23)"),
    ("17", "18"),
    ("", "18"),
    ("", r"\text{no}"),
    (r"\frac{1}{0}", "0"),
    ("9" * 5000, "8" * 5000),
    (r"\text{odd}", r"\text{even}"),
    (r"\mathrm{east}", r"\text{west}"),
    (r"\text{(A)}", r"\text{(C)}"),
    ("listen", "silent"),
    ("25168", "2516_8"),
    ("12", "1_2"),
    ("2516_7", "2516_8"),
    ("3 or 5", "5"),
    ("(1,2)", "(2,1)"),
    ("[1,2)", "(1,2)"),
    (r"\frac{1}{3}", "0.333"),
]


def test_answers_are_equal_to_math_verify() -> None:
    assert [pair for pair in EQUAL if not same_answer(*pair)] == []
    assert [pair for pair in OTHER if same_answer(*pair)] == []


def test_comparisons_of_threads_and_after_one_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(equality, "SECONDS", 0.0)
        assert not same_answer("9^{9^{9}}", "3.0")
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(same_answer, ["1", "2.0", r"\frac62", "4"], ["1.0", "3", "3", "x"]))
    assert answers == [True, False, True, False]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "given", ["9^{9^{9}}", "(10^{10^{8}})!", "(" * 5000 + "1" + ")" * 5000, "x" * 100000]
)
def test_what_cannot_be_computed_is_no_answer(given: str) -> None:
    assert not same_answer(given, "3.0")
    assert same_answer("3", "3.0")


def test_math_verify_that_is_missing_or_broken_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(equality, "CHILD", tmp_path / "child.py")
    (tmp_path / "child.py").write_text("import no_such_runtime\n")
    with pytest.raises(UserError, match="IDLM-0488: .*no_such_runtime"):
        equality.MathVerify().are_equal("1", "2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="IDLM-0488: .*not installed") as caught:
        equality.MathVerify().are_equal("1", "2")
    assert "math-verify" in caught.value.fix
