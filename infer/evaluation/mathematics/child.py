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
from typing import Any

from math_verify import parse, verify

MEMORY = 4 << 30
WORDS = re.compile(r"[A-Za-z]{4,}|[A-Za-z]{2,}(?:[ -][A-Za-z]{2,})+")
SPACE = re.compile(r"(?<!\\)(?:\\[,;:> ]|~)")
SPACE_IN_NUMBER = re.compile(r"(?<=\d)(?:\\!|\s)+(?=\d{3}(?!\d))")
MIXED_NUMBER = re.compile(r"(?<![\w.,/^])(\d+)\s+(\d+)/(\d+)(?![\d.])")
EXPONENT = re.compile(r"(?<![\w\\{])(\d+\.?\d*)[eE]([+-]?\d+)(?![\w.])")
NUMBER_AS_TEXT = re.compile(
    r"\\(?:text|textbf|mbox|mathrm)\s*\{\s*(-?\\?\$?\d[\d.,]*(?:\s+[A-Za-z. ]+)?)\s*\}"
)
PERCENT = re.compile(r"\s*(?:\\?%|percent|\\text\s*\{\s*(?:\\?%|percent)\s*\})$")
UNIT = re.compile(
    r"(?<=[\d}])(?:\s+(?!(?:(?:arc)?(?:sin|cos|tan|cot|csc)h?|log|exp|sqrt|plus|minus|times|divided|over|mod)\b)"
    r"(?:[A-Za-z]{3,}[A-Za-z ./]*|(?:km|m|cm|ft|mi)/[a-z]+|(?:[cdkm]?m|ft|in|mi)\^\{?[23]\}?)"
    r"|\s*/\s*[A-Za-z]{3,})$"
)
DEGREES = re.compile(r"\s*(?:°|\^\s*\{?\\circ\}?)\s*[CF]?$")
STYLE = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
SUBSCRIPT = re.compile(r"\d\s*_\s*\{?\s*(\w+)")
ROOT = re.compile(r"(\\sqrt\s*\[[^\]]*\])\s*(\w)")
SIGNS = str.maketrans(
    {**dict.fromkeys("€£¥₹", ""), "°": r"^\circ", "²": "^2", "³": "^3", "–": "-", "·": r"\cdot "}
    | {"∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "½": r"\frac12", "¼": r"\frac14", "¾": r"\frac34"}
)


def expressions(answer: str) -> list[Any]:
    """Expressions that math-verify parses from an answer. Rewritten first: a text of words (no product of
    letters), the unit of a number, spaces that group digits, numbers as 3e5 and 1 1/2, signs of Unicode, and
    a percent sign inside the formula."""
    text = DEGREES.sub(r"^\\circ", answer.strip("*` \n").rstrip(" .,;\\")).translate(SIGNS)
    text = MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", SPACE_IN_NUMBER.sub("", SPACE.sub(" ", text)))
    text = EXPONENT.sub(r"\1\\times 10^{\2}", ROOT.sub(r"\1{\2}", text)).replace(r"\varnothing", r"\emptyset")
    if number := NUMBER_AS_TEXT.fullmatch(text):
        text = number[1]
    if WORDS.fullmatch(text):
        text = rf"\text{{{text}}}"
    text, is_percent = PERCENT.subn("", text)
    text = UNIT.sub(lambda unit: rf"\text{{ {unit[0].strip()}}}", text)
    return list(parse(f"${text}$%" if is_percent else rf"\boxed{{{text}}}"))


def words(answer: str) -> str:
    """An answer in small letters without commands of style, dollars, full stops, and spaces but those between
    digits."""
    plain = SPACE.sub(" ", STYLE.sub(r"\1", answer)).lower()
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
