"""Answers are found where the paper looks for them (H.4), and mathematical ones are compared."""

from __future__ import annotations

import pytest

from idlm.infer.evaluation.extraction import boxed, function_block, same_answer, strip_thinking


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


@pytest.mark.parametrize(
    ("given", "expected", "is_same"),
    [
        ("1,234", "1234", True),
        ("18.00", "18", True),
        (r"\$18", "18", True),
        (r"\dfrac{1}{2}", "0.5", True),
        (r"\frac12", r"\frac{1}{2}", True),
        (r"-\frac{3}{4}", "-0.75", True),
        (r"x = 5", "5", True),
        (r"90^\circ", "90", True),
        (r"50\%", "50", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        (r"5\text{ cm}", "5", True),
        ("(1,234)", "(1,23)", False),
        ("17", "18", False),
        ("", "18", False),
        (r"\frac{1}{0}", "0", False),
        ("9" * 5000, "8" * 5000, False),
        ("nan", "nan ", True),
    ],
)
def test_answers_are_equal_as_text_or_as_numbers(given: str, expected: str, is_same: bool) -> None:
    assert same_answer(given, expected) is is_same
