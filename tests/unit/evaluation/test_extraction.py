"""Answers are found where the paper looks for them (H.4), mathematical ones are compared, and intervals cover
the truth."""

from __future__ import annotations

import ast
import importlib.util
import random
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from idlm.errors import UserError
from idlm.infer.evaluation.arms import paired_difference, share_interval
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
        (r"\boxed {3}", "3"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),
        (r"\boxed{5}. It is in \boxed{}.", "5"),
        (r"\fbox{7}", "7"),
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
    assert function_block("def f(): pass") is None


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


EQUAL = [
    ("3e5", "300000"),
    ("-1.5E-3", "-0.0015"),
    ("1 1/2", "1.5"),
    ("1½ hours", "1.5"),
    ("**18**", "18"),
    ("18;", "18"),
    (r"18\ ", "18"),
    (r"18\,m/s", "18"),
    ("18 cm^2", "18"),
    ("18 m²", "18"),
    ("18 °C", "18"),
    (r"\$18/hour", "18"),
    ("(-∞,-1)∪(1,∞)", r"(-\infty, -1) \cup (1, \infty)"),
    ("June 20", r"\text{June 20}"),
    (r"3:30\text{ PM}", "3:30 p.m."),
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
    ("60 km/h", "60"),
    (r"1\,234~\text{km}", "1234"),
    (r"60\;\text{miles per hour}", "60"),
    (r"7\quad\text{days}", "7"),
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
    (r"\sqrt[3]8", r"2"),
    (r"\varnothing", r"\emptyset"),
    ("(x+1)^2", "x^2+2x+1"),
    ("-2, 1", "1,-2"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("p - q", "p-q"),
    ("nan", "nan "),
    ("\u22122", "-2"),
    ("\u20112", "-2"),
    ("5\u22123", "2"),
    ("x^2\u20134", "x^2-4"),
    ("5 \u2013 3i", "5-3i"),
    ("3\u20135", "3-5"),
    (r"3\text{--}5\text{ hours}", "3 \u2013 5"),
    ("$10\u2013$20", "10\u201320"),
    ("2.5 million", "2500000"),
    ("$1,200 thousand", "1200000"),
    ("[3\u20135]", "[3, 5]"),
    (r"\mathrm{sin}(x)", r"\sin x"),
    ("cosx", r"\cos x"),
    ("3 in.", "3"),
    ("3 mL", "3"),
    ("9.8 m/s^2", "9.8"),
    ("5m", "5"),
    ("5", r"5 \mathrm{~cm}"),
    (r"3.0\times10^8\,\mathrm{m}\,\mathrm{s}^{-1}", r"3\times10^8"),
    (r"6\pi cm^2", r"6\pi"),
    ("100 sq. ft.", "100"),
    (r"12^{\text{th}}", "12"),
    (r"\frac{1\pm\sqrt5}{2}", r"\frac{1+\sqrt{5}}{2}, \frac{1-\sqrt{5}}{2}"),
    (r"\textbf{(B)}\ 12", "B"),
    (r"\textbf{(B)}\ 12", "12"),
    ("B)", r"\text{(B)}"),
    ("Option B", "(B)"),
    ("The answer is B.", "B"),
    ("C and A", "A, C"),
    ("x > 3", r"(3, \infty)"),
    (r"1 \le x \le 2", "[1,2]"),
    (r"x\le-5 \text{ or } x\ge5", r"(-\infty,-5]\cup[5,\infty)"),
    (r"\{x \mid x > 3\}", "x > 3"),
    ("]0,1[", "(0,1)"),
    (r"\langle 1,2\rangle", "(1,2)"),
    ("0.333...", r"\frac13"),
    ("0.(3)", r"\frac13"),
    (r"0.\dot{3}", r"\frac13"),
    (r"\frac ab", "a/b"),
    ("x**2", "x^2"),
    (r"2\sqrt{3}i", r"2i\sqrt3"),
    ("5 = x", "5"),
    (r"x \equiv 3 \pmod 5", r"x\equiv3\pmod{5}"),
    ("5_{10}", "5"),
    ("10⁻³", "0.001"),
    ("2⅔", r"\frac{8}{3}"),
    ("3√12", r"6\sqrt{3}"),
    ("√(x+1)", r"\sqrt{x+1}"),
    ("2 sqrt3", r"2\sqrt{3}"),
    ("5 pi cm", r"5\pi"),
    ("5 sec", "5"),
    ("5 m/sec", "5"),
    ("sec x", r"\sec x"),
    ("25¢", "25"),
    (r"30\degree", "30"),
    (r"0.1\overline{6}", r"\frac{1}{6}"),
    (r"-2.\bar 9", "-3"),
    ("1.2 x 10^5", "120000"),
    (r"1 \text{ or } 2 \text{ cm}", "1,2"),
    (r"2\text{ hours }15\text{ min}", r"2 \text{ hours } 15 \text{ min}"),
]
OTHER = [
    ("1 1/2", "11/2"),
    ("3e5", "3e"),
    ("1. 5", "15"),
    ("2 sin x", "2 cos x"),
    ("3 times x", "3"),
    ("June 2", r"\text{June 20}"),
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
    ("3\u20135", "-2"),
    ("3 \u2013 5", "-2"),
    ("3\u20135 hours", "35"),
    ("-2", "3\u20135"),
    ("$10\u2013$20", "10"),
    (r"0.\overline{3}", "0.3"),
    ("2 million", "3"),
    ("2 million", "2"),
    ("$1,200 thousand", "1200"),
    ("[3\u20135]", "-2"),
    ("52", "52_8"),
    ("52_8", "52"),
    ("2t", "2"),
    ("2", "2m"),
    ("2c", "2d"),
    ("2ab", "2"),
    ("a + c", "a + d"),
    (r"2\mathrm{i}", "2"),
    ("no", "on"),
    ("5'6\"", "56"),
    ("(A) or (B)", "A"),
    ("(B) 12", "(C)"),
    ("x > 3", r"[3, \infty)"),
    (r"x>1 \text{ and } x<2", r"(-\infty,\infty)"),
    (r"x\le-5 \text{ or } x\ge5", "[-5,5]"),
    (r"\pm 3", "3"),
    (r"2 \text{ hours } 15 \text{ min}", "2"),
    (r"3 \text{ cm} \times 5 \text{ cm}", "3"),
    (r"3 \text{ remainder } 2", r"2 \text{ remainder } 3"),
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
def test_what_cannot_be_computed_is_no_answer(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(equality, "SECONDS", 1.0)
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
    assert "[math]" in caught.value.fix


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
