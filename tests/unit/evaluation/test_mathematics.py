"""Mathematical answers are equal to math-verify in all forms that models and data sets write."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from idlm.errors import UserError
from idlm.infer.evaluation.extraction import same_answer
from idlm.infer.evaluation.mathematics import equality

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
    (r"2\pi m", r"2\pi"),
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
    (r"[1,\sqrt[3]{8}]", "[1,2]"),
    (r"]-\infty,0]", r"(-\infty,0]"),
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
