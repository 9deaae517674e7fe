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
from typing import Any

from math_verify import parse, verify

MEMORY = 4 << 30
WORDS = re.compile(r"[A-Za-z]{4,}|[A-Za-z]{2,}(?:[ -][A-Za-z]{2,})+")
SPACE = re.compile(r"(?<!\\)(?:\\[,;:> ]|~)")
NUMBER_AS_TEXT = re.compile(
    r"\\(?:text|textbf|mbox|mathrm)\s*\{\s*(-?\\?\$?\d[\d.,]*(?:\s+[A-Za-z. ]+)?)\s*\}"
)
PERCENT = re.compile(r"\s*(?:\\?%|percent|\\text\s*\{\s*(?:\\?%|percent)\s*\})$")
# A sec at the end is a unit.
FUNCTION = r"(?:(?:arc)?(?:sin|cos|tan|cot|csc)h?|sec(?!$)|log|ln|exp|sqrt|pi)"
UNIT = re.compile(
    rf"(?<=[\d}}])(?:\s+(?!(?:{FUNCTION}|plus|minus|times|divided|over|mod)\b)"
    r"(?:[A-Za-z]{3,}[A-Za-z ./]*|(?:km|m|cm|ft|mi)/[a-z]+|(?:[cdkm]?m|ft|in|mi)\^\{?[23]\}?)"
    r"|\s*/\s*[A-Za-z]{3,})$"
)
UNIT_AS_TEXT = re.compile(r"(?<=[^\s{(\[,])\s*\\(?:text|mbox)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$")
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALE = re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*)?\b({'|'.join(SCALES)})\b[^\d{{}}]*\}}?$")
QUANTITIES = re.compile(r"\\(?:text|mbox)\s*\{(?!\s*,?\s*(?:and|or)\s*\})[^{}]*[A-Za-z][^{}]*\}\s*-?\d")
"""A text before a number, as in hours and minutes, which is no factor."""
AMOUNT = r"\\?\$?\d[\d.,/]*(?:\\?%)?"
RANGE = re.compile(
    rf"(?:[A-Za-z]\s*=\s*)?({AMOUNT})\s*(?:[‒–—]|\\text\s*\{{\s*[-–—]+\s*\}})\s*({AMOUNT})"
    r"(?:\s+[A-Za-z]{2}[A-Za-z ]*|\s*\\text\s*\{[^{}]*\})?"
)
STYLE = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
SUBSCRIPT = re.compile(r"\d\s*_\s*\{?\s*(\w+)")
DASHES = str.maketrans(dict.fromkeys("‐‑‒–—−－", "-"))
SIGNS = DASHES | str.maketrans(
    {**dict.fromkeys("€£¥₹¢", ""), **dict.fromkeys("°º", r"^\circ"), "·": r"\cdot ", "√": r"\sqrt ", "⁄": "/"}
    | {"∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap "}
)
REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
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
        (
            r"(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{(\d+)\}|(\d))",
            lambda number: _repeating(*number.groups("")),
        ),
        (rf"(?<![A-Za-z\\])({FUNCTION})(?![A-Za-z])", r"\\\1"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(\\sqrt\s*\[[^\]]*\])\s*(\w)", r"\1{\2}"),
        (r"\\sqrt\s+(\d{2,})", r"\\sqrt{\1}"),
        (r"(?<![\w\\{])(\d+\.?\d*)[eE]([+-]?\d+)(?![\w.])", r"\1\\times 10^{\2}"),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"\\varnothing", r"\\emptyset"),
    )
)


def expressions(answer: str) -> list[Any]:
    """Expressions that math-verify parses from an answer. Rewritten first: a text of words (no product of
    letters), ranges, units, powers of ten by name, the notation of numbers, signs of Unicode, and a percent
    sign inside the formula."""
    text = answer.strip("*` \n").rstrip(" .,;\\")
    if ends := RANGE.fullmatch(text):
        return ["–".join(end.strip("\\$%") for end in ends.groups())]
    text = text.translate(SIGNS)
    for pattern, new in REWRITES:
        text = pattern.sub(new, text)
    if number := NUMBER_AS_TEXT.fullmatch(text):
        text = number[1]
    if WORDS.fullmatch(text):
        text = rf"\text{{{text}}}"
    text, is_percent = PERCENT.subn("", text)
    scaled: list[Any] = []
    if scale := SCALE.search(text):
        scaled = expressions(rf"{text[: scale.start()]}\cdot 10^{{{SCALES[scale[1]]}}}")
    # math-verify would remove all from the first text to a unit at the end.
    text = UNIT_AS_TEXT.sub("", UNIT.sub("", text))
    if QUANTITIES.search(text):
        return [text]
    return scaled + parse(f"${text}$%" if is_percent else rf"\boxed{{{text}}}")


def _repeating(whole: str, begin: str, *period: str) -> str:
    """The fraction of a decimal number with digits that repeat."""
    digits = "".join(period)
    numerator = int(whole + begin + digits) - int("0" + whole + begin)
    return rf"\frac{{{numerator}}}{{{(10 ** len(digits) - 1) * 10 ** len(begin)}}}"


def words(answer: str) -> str:
    """An answer in small letters without commands of style, dollars, full stops, and spaces but those between
    digits."""
    plain = SPACE.sub(" ", STYLE.sub(r"\1", answer)).translate(DASHES).lower()
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)|\\?\$|\.(?!\s*\d)", "", plain)


def are_equal(given: str, expected: str) -> bool:
    """Whether they have the same words, or math-verify calls them equal; numbers of different bases (`101_2`)
    are not."""
    if words(given) == words(expected):
        return bool(words(given))
    bases = [SUBSCRIPT.findall(each) for each in (given, expected)]
    if all(bases) and bases[0] != bases[1]:
        return False
    return bool(verify(expressions(expected), expressions(given)))


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
