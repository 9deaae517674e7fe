"""Answers are found where the paper looks for them (H.4), and intervals cover the truth."""

from __future__ import annotations

import ast
import random
import runpy
from pathlib import Path

import pytest

from idlm.infer.evaluation.arms import paired_difference, share_interval
from idlm.infer.evaluation.extraction import boxed, function_block, strip_thinking


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"<think>\boxed{1}</think> \boxed{ 2 }", "2"),
        (r"<think>\boxed{1}</think> 2", None),
        (r"<think> \boxed{1}", None),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed {3}", "3"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),
        (r"\boxed{5}. It is in \boxed{}.", "5"),
        (r"\fbox{7}", "7"),
        (r"$\boxed 7$", "7"),
        (r"$\boxed{\boxed{-7}}$", "-7"),
        (r"$\boxed 3.5$. So $\boxed 1,250$.", "1,250"),
        (r"$\boxed -3/4$", "-3/4"),
        (r"\boxed{5}, in \boxed format.", "5"),
        (r"$x_1=\boxed{-1}$ or $x_2=\boxed{2}$", "-1, 2"),
        (r"\[\boxed{3}\quad\text{and}\quad\boxed{4}\]", "3, 4"),
        (r"\boxed{3}, no wait, \boxed{4}", "4"),
        (r"$\boxed{5}$, $\boxed{5}$", "5"),
        ("42", None),
    ],
)
def test_the_last_complete_box_after_the_thinking(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


@pytest.mark.sweep
def test_many_open_boxes_take_no_time() -> None:
    assert boxed(r"\boxed{" * 2000) is None
    assert boxed(r"\boxed{1}," * 2000) == "1"
    assert boxed(r"\boxed{1}" + " " * 50_000 + r"x\boxed{2}") == "2"


def test_the_last_code_block_with_a_function() -> None:
    first, last = "def f():\n    return 1\n", "def f():\n    return 2\n"
    text = f"```python\n{first}```\n```py\n{last}```\nUse it:\n```python\nf()\n```\n```\nout\n```"
    assert function_block(text) == last
    assert function_block(f"<think>```python\n{first}```</think> no") is None
    assert function_block(f"cut off ```python\n{last}") == last
    assert function_block("It is def f(): pass") is None


CODE = "def f(x):\n    return x\n"
LISTED = "".join(f"   {line}\n" for line in CODE.splitlines())
DOCSTRING = "def f(x):\n    '''Use:\n    ```{}\n    f(1)\n    ```\n    '''\n    return x\n"
ANSWERS = {
    "after a shell block": f"```bash\npip install x\n```\nThen:\n```python\n{CODE}```",
    "after a text block": f"Example:\n```text\nin\n```\n\n```python\n{CODE}```\n",
    "between JSON and output": f"```json\n{{}}\n```\nso\n```python\n{CODE}```\n```text\n1\n```\n",
    "after a transcript": f"```pycon\n>>> f(1)\n```\n```python\n{CODE}```",
    "after C++": f"```c++\nint f();\n```\n\n```python\n{CODE}```",
    "after an open block": f"```sh\nrun\n\n```python\n{CODE}```",
    "CRLF": f"```python\n{CODE}```".replace("\n", "\r\n"),
    "CR": f"```python\n{CODE}```".replace("\n", "\r"),
    "space before the language": f"``` python\n{CODE}```",
    "title": f"```python title=a.py\n{CODE}```",
    "braces": f"```{{.python .numberLines}}\n{CODE}```",
    "py3": f"```py3\n{CODE}```",
    "python3.11": f"```Python3.11\n{CODE}```",
    "no language": f"```\n{CODE}```",
    "tildes": f"~~~python\n{CODE}~~~",
    "four backticks": f"````python\n{CODE}````",
    "fences in a docstring": f"```python\n{DOCSTRING.format('')}```",
    "Python in a docstring": f"```python\n{DOCSTRING.format('python')}```\nDone.",
    "fences in a comment": f"```python\n# ```\n# f(1)\n# ```\n{CODE}```",
    "in a list": f"1. Do:\n   ```python\n{LISTED}   ```",
    "indented fences alone": f"1. Do:\n   ```python\n{CODE}   ```",
    "at a list's mark": f"- ```python\n{LISTED}  ```",
    "quoted": "> ```python\n" + "".join(f"> {line}\n" for line in CODE.splitlines()) + "> ```",
    "indented in its block": f"```python\n{LISTED}```",
    "fence after the code": f"```python\n{CODE[:-1]}```",
    "fence after a text": f"So: ```python\n{CODE}```",
    "text after the fence": f"```python\n{CODE}```That is it.\n```python\nf(1)\n```",
    "block after block": f"```python\nx = 1\n```python\n{CODE}```",
    "code that does not end": f"```python\n{CODE}",
    "code alone": f"<think>No.</think>\n\n{CODE}",
    "code after a text": f"from the list, I import it:\n\n{CODE}\nThat is it.",
    "the end of a fence alone": f"{CODE}```\nThat is it.\n```python\nprint(f(1))\n```",
    "a language alone": f"python\n{CODE}",
    "marks": f"[BEGIN]\n{CODE}[DONE]",
    "a transcript": "```pycon\n>>> def f(x):\n...     return x\n...\n>>> f(1)\n1\n```",
    "usage that is cut off": f"```python\n{CODE}\nprint(f(1), [f(",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_code_is_found_in_every_form_of_block(answer: str) -> None:
    [found] = [
        each for each in ast.parse(function_block(answer) or "").body if isinstance(each, ast.FunctionDef)
    ]
    assert (found.name, ast.unparse(found.body[-1])) == ("f", "return x")


def test_the_block_that_defines_the_wanted_function_comes_first() -> None:
    tests = f"```python\n{CODE}```\nTests:\n```python\ndef test_f():\n    assert f(1) == 1\n```"
    assert function_block(tests, ["f"]) == CODE
    assert function_block(tests, ["g"]) == function_block(tests) != CODE
    assert function_block("```py\nf = lambda x: x\n```", ["f"]) == "f = lambda x: x\n"
    assert function_block("```py\nf == 1\n```", ["f"]) is None


STUB = "import math\n\n\ndef f(x):\n    '''Doc.'''\n"
BODIES = {
    "as it is": "    x += 1\n    return x\n",
    "with more": "    return x + 1\n\n\ndef g():\n    pass\n\nprint(f(1))\n",
    "with a text": "    return x + 1\n\nIt adds one.\n",
    "without the first indentation": "x += 1\n    return x\n",
    "without indentation": "if x:\n    x += 1\nreturn x\n",
    "in a block": "```python\n    x += 1\n    return math.floor(x)\n```",
    "of a class": "```\nclass Solution:\n    def f(self, x):\n        return x + 1\n```",
    "whole": f"{STUB}    return x + 1\n",
}


@pytest.mark.parametrize("answer", BODIES.values(), ids=BODIES)
def test_the_body_of_a_function_and_a_method_are_code(tmp_path: Path, answer: str) -> None:
    (tmp_path / "code.py").write_text(function_block(answer, ["f"], stub=STUB) or "")
    assert runpy.run_path(str(tmp_path / "code.py"))["f"](1) == 2


def test_a_text_is_no_body() -> None:
    assert function_block("Sorry, I cannot.", ["f"], stub=STUB) is None
    assert function_block("", ["f"], stub=STUB) is None


HELPER = "def g(x):\n    return x + 1\n"
CALLER = "def f(x):\n    return g(x)\n"
PARTS = {
    "imports first": (
        ["import math\nfrom typing import List", "def f(x: List):\n    return math.ceil(x)"],
        1.5,
    ),
    "a star": (["from math import *", "def f(x):\n    return ceil(x)"], 1.5),
    "a star last": ([HELPER, "from math import *", CALLER], 1),
    "helper first": ([HELPER, CALLER], 1),
    "annotations": (["from __future__ import annotations", "def f(x: A) -> B:\n    return x + 1"], 1),
    "helper last": ([CALLER, HELPER], 1),
    "other versions": ([HELPER, "g = None", HELPER, CALLER], 1),
    "helpers of helpers": (["ONE = 1", "def h(x, y=ONE):\n    return x + y", "g = h", CALLER], 1),
    "a class": (["class A:\n    b = 2", "def f(x):\n    return A.b"], 1),
    "a decorator": (["from functools import cache", "@cache\ndef f(x):\n    return x + 1"], 1),
    "wrong tests last": (["def f(x):\n    return x + 1", "assert f(1) == 3\nx = f(1)"], 1),
    "a body in parts": (["def f(x):\n    y = 1", "    y += x\n    return y"], 1),
    "a loop in parts": (["def f(x):\n    for y in (x, x + 1):", "        z = y\n    return z"], 1),
    "a line quoted": (["def f(x):\n    x += 1\n    return x", "    x += 1", "return x"], 1),
    "the signature last": (["def f(x):\n    return x + 1", "def f(x: int) -> int: ..."], 1),
    "the stub last": (["def f(x):\n    return x + 1", f"{HELPER}def f(x):\n    import math\n    ..."], 1),
    "code that is cut": (["def g(x) return", HELPER, CALLER], 1),
    "indented after another": (["def g(x):\n    pass", "    def f(x):\n        return 2"], 1),
}


@pytest.mark.parametrize(("parts", "given"), PARTS.values(), ids=PARTS)
def test_what_defines_a_function_is_found_in_several_blocks(
    tmp_path: Path, parts: list[str], given: float
) -> None:
    code = function_block("Then\n".join(f"```python\n{part}\n```\n" for part in parts), ["f"])
    (tmp_path / "code.py").write_text(code or "")
    assert runpy.run_path(str(tmp_path / "code.py"))["f"](given) == 2


def test_all_wanted_names_are_found() -> None:
    parts = ["class A:\n    pass", "def f(x):\n    return x.b"]
    assert function_block("".join(f"```\n{part}\n```\n" for part in parts), ["A", "f"]) == "\n".join(
        [*parts, ""]
    )


@pytest.mark.sweep
def test_many_fences_take_no_time() -> None:
    for text in ("```\n", "```python\n", "```\nx = (\n", "`", "``` `"):
        assert function_block(text * 5000) is None


def test_thinking_that_never_ends_is_no_answer() -> None:
    assert strip_thinking("<think>a") == ""
    assert strip_thinking("a</think>b") == "b"
    assert strip_thinking("b") == "b"


def test_wilson_against_a_published_value() -> None:
    """Newcombe (1998), table I: 81 of 263 gives 0.2553 to 0.3662."""
    interval = share_interval([1.0] * 81 + [0.0] * 182)
    assert interval == pytest.approx((81 / 263, 0.2553, 0.3662), abs=5e-5)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_no_interval_has_width_zero(value: float) -> None:
    interval = share_interval([value] * 20)
    assert interval.high - interval.low > 0.1
    assert interval.low <= value <= interval.high
    paired = paired_difference([value] * 20, [value] * 20)
    assert paired.value == 0 and paired.low < -0.05 and paired.high > 0.05


def test_pairs_give_the_sign_and_the_right_coverage() -> None:
    """Pairs that agree in 80 % of the prompts; the true difference is 0.04."""
    rng, covered, rounds = random.Random(0), 0, 600
    for _ in range(rounds):
        pairs = rng.choices([(1, 1), (0, 0), (1, 0), (0, 1)], weights=[50, 30, 12, 8], k=150)
        found = paired_difference([float(a) for a, _ in pairs], [float(b) for _, b in pairs])
        covered += found.low <= 0.04 <= found.high
    assert 0.92 <= covered / rounds <= 0.985
    assert paired_difference([1, 1, 1], [0, 0, 1]).value == pytest.approx(2 / 3)


def test_shares_of_several_answers_count_by_prompt() -> None:
    assert share_interval([0.5, 1.0]).value == 0.75
    assert paired_difference([0.5, 1.0], [0.0, 1.0]).value == 0.25
