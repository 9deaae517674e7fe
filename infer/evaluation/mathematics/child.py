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
SPACE_IN_NUMBER = re.compile(r"(?<=\d)(?:\\[,;:!> ]|~|\s)+(?=\d{3}(?!\d))")
NUMBER_AS_TEXT = re.compile(
    r"\\(?:text|textbf|mbox|mathrm)\s*\{\s*(-?\\?\$?\d[\d.,]*(?:\s+[A-Za-z. ]+)?)\s*\}"
)
PERCENT = re.compile(r"\s*(?:\\?%|percent|\\text\s*\{\s*(?:\\?%|percent)\s*\})$")
UNIT = re.compile(r"(?<=[\d}])\s+([A-Za-z]{3,}[A-Za-z ./]*|(?:km|m|cm|ft|mi)/[a-z]+)$")
SUBSCRIPT = re.compile(r"\d\s*_\s*\{?\s*(\w+)")
ROOT = re.compile(r"(\\sqrt\s*\[[^\]]*\])\s*(\w)")
SIGNS = str.maketrans({"€": "", "£": "", "¥": "", "°": "^\\circ"})


def expressions(answer: str) -> list[Any]:
    """Expressions that math-verify parses from an answer. Rewritten first: a text of words (no product of
    letters), the unit of a number, spaces that group digits, and a percent sign inside the formula."""
    text = re.sub(r"(?<!\\)\\ |(?<!\\)~", " ", answer.strip().removesuffix(".")).translate(SIGNS)
    text = ROOT.sub(r"\1{\2}", SPACE_IN_NUMBER.sub("", text)).replace(r"\varnothing", r"\emptyset")
    if number := NUMBER_AS_TEXT.fullmatch(text):
        text = number[1]
    if WORDS.fullmatch(text):
        text = rf"\text{{{text}}}"
    text, is_percent = PERCENT.subn("", text)
    text = UNIT.sub(r"\\text{ \1}", text)
    return list(parse(f"${text}$%" if is_percent else rf"\boxed{{{text}}}"))


def are_equal(given: str, expected: str) -> bool:
    """Whether math-verify calls them equal; numbers of different bases (`101_2`) are not."""
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
