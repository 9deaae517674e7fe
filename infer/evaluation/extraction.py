"""The answer in a response, as the paper extracts it (arXiv 2604.11035, appendix H.4), and equality of
mathematical answers.
"""

from __future__ import annotations

import re

from idlm.infer.evaluation.mathematics.equality import MATH_VERIFY

BOXED = r"\boxed{"
_BLOCK = re.compile(r"```(?:python|python3|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_FUNCTION = re.compile(r"^\s*(?:async )?def \w+", re.MULTILINE)


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
    """Whether two mathematical answers are equal: as texts or to math-verify. UserError IDLM-0488
    without it.
    """
    if given.strip() == expected.strip():
        return bool(given.strip())
    return MATH_VERIFY.are_equal(given, expected)
