"""The answer in a response, as the paper extracts it (arXiv 2604.11035, appendix H.4), and equality of
mathematical answers.
"""

from __future__ import annotations

import re
from fractions import Fraction

BOXED = r"\boxed{"
_BLOCK = re.compile(r"```(?:python|python3|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_FUNCTION = re.compile(r"^\s*(?:async )?def \w+", re.MULTILINE)
_NOISE = re.compile(
    r"\\(?:left|right|displaystyle|!|,|;|:| )|\\(?:text|mathrm|textbf|mbox)\{[^{}]*\}"
    r"|\^\{?\\circ\}?|\\?[%$]|\s"
)
_UNBRACED = re.compile(r"\\frac(?:\{(\w+)\}|(\w))(?:\{(\w+)\}|(\w))")
_THOUSANDS = re.compile(r"(?<=\d),(?:\\!)?(?=\d{3}(?:\D|$))")
_RATIO = re.compile(r"([-+]?)\\frac\{([-+]?\d+)\}\{([-+]?\d+)\}")
MAX_DIGITS = 100
"""Of a number that is compared as a number."""


def strip_thinking(text: str) -> str:
    """Return what follows the thinking; nothing if it never ends."""
    _, closed, answer = text.rpartition("</think>")
    if closed:
        return answer
    return "" if "<think>" in text else text


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` after the thinking, braces balanced, or None."""
    text = strip_thinking(text)
    start = len(text)
    while (start := text.rfind(BOXED, 0, start)) >= 0:
        depth = 1
        for end in range(start + len(BOXED), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len(BOXED) : end].strip()
    return None


def function_block(text: str) -> str | None:
    """Return the last Python code block after the thinking that defines a function, or None."""
    blocks = [block for block in _BLOCK.findall(strip_thinking(text)) if _FUNCTION.search(block)]
    return blocks[-1] if blocks else None


def same_answer(given: str, expected: str) -> bool:
    """Whether two mathematical answers are equal: as text without layout, or as rational numbers.

    There is no computer algebra: an expression that is rearranged counts as another answer.
    """
    first, second = _plain(given), _plain(expected)
    if first == second:
        return True
    numbers = _number(first), _number(second)
    return None not in numbers and numbers[0] == numbers[1]


def _plain(answer: str) -> str:
    text = _THOUSANDS.sub("", answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    text = _NOISE.sub("", text).rstrip(".")
    text = _UNBRACED.sub(lambda m: rf"\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
    head, equals, tail = text.partition("=")
    return tail if equals and re.fullmatch(r"[a-zA-Z]", head) else text


def _number(text: str) -> Fraction | None:
    if len(text) > MAX_DIGITS:
        return None
    text = _RATIO.sub(r"\1\2/\3", text)
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
