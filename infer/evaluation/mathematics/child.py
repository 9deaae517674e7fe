"""The process that compares mathematical answers with math-verify, which `equality.py` starts and ends:
math-verify stops long computations of SymPy by a signal, which only a main thread gets, and a tower of powers
can take all time and memory. It imports nothing of ours. A line of JSON in, the answer given and the one
expected; a line out, whether they are equal."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.sets import FiniteSet
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import And, Ge, Gt, Le, Lt, Or

MEMORY = 4 << 30
SPACE = re.compile(r"(?<!\\)(?:\\[,;:> ]|~)")
PERCENT = re.compile(r"\s*(?:\\?%|percent|\\text\s*\{\s*(?:\\?%|percent)\s*\})$")
# A sec at the end is a unit.
FUNCTION = r"(?:(?:arc)?(?:sin|cos|tan|cot|csc)h?|sec(?!$)|log|ln|exp|sqrt|pi)"
ABBREVIATION = r"(?:[cdk]m|mm|k?mph|ft|mi|yd|in|[km]g|lbs?|oz|m[lL]|hrs?|ms)"
MEASURE = rf"(?:sq\.?\s+)?(?:m(?=[/^])|{ABBREVIATION})\.?(?:/[a-z]+)?(?:\^\{{?[23]\}}?)?"
UNIT = re.compile(
    rf"(?:(?<=[\d}}])|(?<=\\pi))(?:\s+(?!(?:{FUNCTION}|plus|minus|times|divided|over|mod)\b)"
    rf"(?:[A-Za-z]{{3,}}[A-Za-z ./]*|{MEASURE})"
    r"|\s*/\s*[A-Za-z]{3,}|(?:(?<=1)st|(?<=2)nd|(?<=3)rd|(?<=\d)th))$"
)
UNIT_OF_NUMBER = re.compile(rf"(?:(?<=[\d}}])|(?<=\\pi))\s*(?:{ABBREVIATION}|[mgsLh])\.?$")
"""What may be a variable too: a unit where the right answer has no letter."""
UNIT_AS_TEXT = re.compile(
    r"(?<=[^\s{(\[,])(?:\s*/?\\(?:text|textrm|mbox|mathrm(?!\s*\{[ei]\}))\s*\{[^{}]*\}(?:\^\{?-?\d\}?)?)+$"
)
# The units that math-verify removes are variables as well: c, d, s, t.
NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
)
RELATIONS = (Ge, Gt, Le, Lt)
EXTRACTION = (LatexExtractionConfig(normalization_config=NORMALIZATION), ExprExtractionConfig())
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALE = re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*)?\b({'|'.join(SCALES)})\b[^\d{{}}]*\}}?$")
QUANTITIES = re.compile(
    r"\\(?:text|mbox)\s*\{(?!\s*,?\s*(?:and|or)\s*\})[^{}]*[A-Za-z][^{}]*\}\s*-?\d|\d\s*['′\"]\s*\d"
)
"""A text or a sign before a number, as in hours and minutes, feet and inches, which is no factor."""
AMOUNT = r"\\?\$?\d[\d.,/]*(?:\\?%)?"
RANGE = re.compile(
    rf"(?:[A-Za-z]\s*=\s*)?([\[(]?)({AMOUNT})\s*(?:[‒–—]|\\text\s*\{{\s*[-–—]+\s*\}})\s*({AMOUNT})([\])]?)"
    r"(?:\s+[A-Za-z]{2}[A-Za-z ]*|\s*\\text\s*\{[^{}]*\})?"
)
STYLE = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
ANNOUNCED = re.compile(r"^\s*(?:the\s+)?(?:final\s+)?answer(?:\s+is|\s*:)\s*:?", re.IGNORECASE)
LETTER = r"\(?[A-Z]\)?"
CHOICE = re.compile(
    rf"(?:[Oo]ptions?|[Cc]hoices?)?\s*({LETTER}(?:(?:\s|,|and|or|&)+{LETTER})*)(?:(?:[.:]|(?<=\)))(.*))?",
    re.DOTALL,
)
"""The letters of choices, and what follows them."""
SUBSCRIPT = re.compile(r"\d\s*_\s*\{?\s*(\w+)")
DASHES = str.maketrans(dict.fromkeys("‐‑‒–—−－", "-"))
SIGNS = DASHES | str.maketrans(
    {**dict.fromkeys("€£¥₹¢", ""), **dict.fromkeys("°º", r"^\circ"), "·": r"\cdot ", "√": r"\sqrt ", "⁄": "/"}
    | {"∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "±": r"\pm "}
)
REWRITES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\\(?:mathrm|operatorname|text)\s*\{\s*(" + FUNCTION + r")\s*\}", r"\\\1 "),
    (rf"(?<![A-Za-z\\])({FUNCTION})(?=[tx-z](?![A-Za-z]))", r"\1 "),
    (r"\\[cdt]?frac(?:\s+|(?=\d))(\w)\s*(\w)", r"\\frac{\1}{\2}"),
    (r"\*\*", "^"),
    (r"^([^=<>]*\d)\s*=\s*([A-Za-z])$", r"\2=\1"),
    # math-verify takes i for the imaginary unit where it stands alone.
    (r"(?<=\d)i(?!\w)", " i"),
    (r"^\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid|[:|])(.*)\\\}$", r"\1"),
    (r"\^\s*\{?\s*\\text\s*\{\s*(st|nd|rd|th)\s*\}\s*\}?$", r"\1"),
    (r"\\langle", "("),
    (r"\\rangle", ")"),
    # Open ends, as in ]0,1[.
    (
        r"([\[\]])([^\[\]()]+,[^\[\]()]+)(?<!\\sqrt)([\[\]])",
        lambda ends: ends[1].replace("]", "(") + ends[2] + ends[3].replace("[", ")"),
    ),
    # Temperatures and angles.
    (r"\s*(?:\\degree|\^\s*\{?\\(?:circ|degree)\}?)\s*[CF]?$", r"^\\circ"),
    (r"[⁺⁻⁰¹²³⁴-⁹]+", lambda power: f"^{{{unicodedata.normalize('NFKC', power[0])}}}"),
    (
        r"[¼-¾⅐-⅞]",
        lambda sign: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign[0]).split("⁄")),
    ),
    (SPACE.pattern, " "),
    # Spaces that group digits.
    (r"(?<=\d)(?:\\!|\s)+(?=\d{3}(?!\d))", ""),
    # Mixed numbers.
    (r"(?<![\w.,/^])(\d+)\s+(\d+)/(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(?<!\d)(\d*\.\d*?)(\d)\2{2,}(?:…|\\[lc]?dots)", r"\1(\2)"),
    (
        r"(?<!\d)(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\))",
        lambda number: _repeating(*number.groups("")),
    ),
    (rf"(?<![A-Za-z\\])({FUNCTION})(?![A-Za-z])", r"\\\1"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(\\sqrt\s*\[[^\]]*\])\s*(\w)", r"\1{\2}"),
    (r"\\sqrt\s+(\d{2,})", r"\\sqrt{\1}"),
    (r"(?<![\w\\{])(\d+\.?\d*)[eE]([+-]?\d+)(?![\w.])", r"\1\\times 10^{\2}"),
    (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
    (r"\\varnothing", r"\\emptyset"),
    # A number as a text, and words without one.
    (r"\A\\(?:text|textbf|mbox|mathrm)\s*\{\s*(-?\\?\$?\d[\d.,]*(?:\s+[A-Za-z. ]+)?)\s*\}\Z", r"\1"),
    (r"\A((?i:no)|[A-Za-z]{4,}|[A-Za-z]{2,}(?:[ -][A-Za-z]{2,})+)\Z", r"\\text{\1}"),
)


def expressions(answer: str) -> list[Any]:
    """Expressions that math-verify parses from an answer. Rewritten first: a text of words (no product of
    letters), ranges, units, powers of ten by name, the notation of numbers, signs of Unicode, and a percent
    sign inside the formula."""
    text = answer.strip("*` \n").replace("...", "…").rstrip(" .,;\\")
    if amounts := RANGE.fullmatch(text):
        opened, *numbers, closed = amounts.groups()
        if opened != "[":
            return ["–".join(end.strip("\\$%") for end in numbers)]
        text = opened + ",".join(numbers) + closed
    text = text.translate(SIGNS)
    if r"\pm" in text:
        text = ", ".join(text.replace(r"\pm", sign).replace(r"\mp", other) for sign, other in ("+-", "-+"))
    for pattern, new in REWRITES:
        text = re.sub(pattern, new, text)
    text, is_percent = PERCENT.subn("", text)
    if scale := SCALE.search(text):
        amount = re.sub(r"\\?\$|\{?,\}?(?=\d{3})", "", text[: scale.start()])
        text = rf"{amount}\cdot 10^{{{SCALES[scale[1]]}}}"
    # math-verify would remove all from the first text to a unit at the end.
    text = UNIT_AS_TEXT.sub("", UNIT.sub("", text))
    if QUANTITIES.search(text):
        return [text]
    parsed = parse(f"${text}$%" if is_percent else rf"\boxed{{{text}}}", EXTRACTION)
    return [_joined(each, And if "and" in text else Or) for each in parsed]


def _joined(expression: Any, connective: Any) -> Any:
    """The set of numbers for inequalities that `and` or `or` connects, which math-verify takes for a list."""
    if isinstance(expression, FiniteSet) and all(isinstance(each, RELATIONS) for each in expression):
        with suppress(RuntimeError, TypeError, ValueError):
            return connective(*expression).as_set()
    return expression


def _repeating(whole: str, begin: str, *period: str) -> str:
    """The fraction of a decimal number with digits that repeat."""
    digits = "".join(period)
    numerator = int(whole + begin + digits) - int("0" + whole + begin)
    return rf"\frac{{{numerator}}}{{{(10 ** len(digits) - 1) * 10 ** len(begin)}}}"


def words(answer: str) -> str:
    """An answer in small letters without commands of style, dollars, full stops, and spaces but those between
    digits."""
    plain = SPACE.sub(" ", STYLE.sub(r"\1", answer)).translate(DASHES).lower()
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)|\\?\$|\.(?!\s*\d)", "", re.sub(r"\{(.)\}", r"\1", plain))


def are_equal(given: str, expected: str) -> bool:
    """Whether they have the same words, or math-verify calls them equal; numbers of different bases (`101_2`)
    are not."""
    if words(given) == words(expected):
        return bool(words(given))
    if _bases(given) != _bases(expected):
        return False
    if not re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", expected)):
        given = UNIT_OF_NUMBER.sub("", given)
    pair = [ANNOUNCED.sub("", each) for each in (given, expected)]
    choices = [CHOICE.fullmatch(STYLE.sub(r"\1", each).strip("*` \n$")) for each in pair]
    letters = [sorted(re.findall("[A-Z]", choice[1])) for choice in choices if choice]
    if len(letters) == 2:
        return letters[0] == letters[1]
    given, expected = ((choice and choice[2]) or each for choice, each in zip(choices, pair, strict=True))
    return bool(verify(expressions(expected), expressions(given), allow_set_relation_comp=True))


def _bases(answer: str) -> list[str]:
    """The bases of its numbers, those of ten left out."""
    return [base for base in SUBSCRIPT.findall(STYLE.sub(r"\1", answer)) if base != "10"]


def main() -> None:
    """Report that it is ready, then answer until standard input ends."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("ready", flush=True)
    # A pipe that is not read would fill.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for line in sys.stdin:
        print(json.dumps(are_equal(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
