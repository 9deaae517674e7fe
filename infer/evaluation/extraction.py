"""The answer in a response, as the paper extracts it (arXiv 2604.11035, appendix H.4), and equality of
mathematical answers."""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Sequence
from contextlib import suppress

from idlm.infer.evaluation.mathematics.equality import MATH_VERIFY

BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""Braces, and what is escaped, such as the brace of a set."""
CONNECTED = re.compile(
    r"(?:\s|\$|\\[()\[\],;]|\\q?quad)*(?:,|,?\s*(?:\\text\s*\{)?\s*(?:and|or)\s*\}?)"
    r"(?:\s|\$|\\[()\[\],;]|\\q?quad)*(?:[A-Za-z](?:_\{?\w+\}?)?\s*=\s*)?"
)
"""Between two boxes of one answer."""
_OPEN = re.compile(r"(?P<before>.*?)(?<![`~])(?P<fence>`{3,}+|~{3,}+)[ \t]*(?P<info>[^`~]*)")
_LOCATION = re.compile(r"(?:[ \t]*>)*[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?")
_PYTHON = re.compile(r"\{?\.?i?py(?:thon)?[\d.]*(?!\w)", re.IGNORECASE)
_FUNCTION = re.compile(r"^\s*(?:async )?def \w+", re.MULTILINE)
MAX_FENCES = 16
"""Lines with a fence that are tried as the end of a block."""


def strip_thinking(text: str) -> str:
    """Return what follows the thinking; nothing if it never ends."""
    _, closed, answer = text.rpartition("</think>")
    if closed:
        return answer
    return "" if "<think>" in text else text


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` after the thinking that is not empty, braces
    balanced, or None. Boxes that a comma, `and` or `or` connects are one answer, as to math-verify."""
    text = strip_thinking(text)
    contents: list[str] = []
    last = len(text)
    for begin in reversed([*BOXED.finditer(text)]):
        end = _closing_brace(text, begin.end())
        if end is None or not (content := text[begin.end() : end].strip()):
            continue
        if contents and not CONNECTED.fullmatch(text, end + 1, last):
            break
        contents.insert(0, content)
        last = begin.start()
    return ", ".join(dict.fromkeys(contents)) or None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for brace in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def function_block(text: str, names: Sequence[str] = ()) -> str | None:
    """Return the last Python code block after the thinking that defines one of the `names`, else the last one
    with any function, or None."""
    blocks = python_blocks(strip_thinking(text))
    any_name = "|".join(map(re.escape, names)) or "(?!)"
    defined = rf"^(?:(?:async )?def|class) (?:{any_name})\b|^(?:{any_name})\s*(?::[^=\n]*)?=(?!=)"
    wanted = [block for block in blocks if re.search(defined, block, re.MULTILINE)]
    found = wanted or [block for block in blocks if _FUNCTION.search(block)]
    return found[-1] if found else None


def python_blocks(text: str) -> list[str]:
    """The contents of fenced blocks whose info string is Python or empty, without their indentation. A fence
    may follow the mark of a list or quotation or, of Python, any text. A block of Python ends at the first
    fence before which it can be parsed, since a docstring may hold fences too."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    blocks, index = [], 0
    while index < len(lines):
        opened = _OPEN.fullmatch(lines[index])
        index += 1
        if opened is None:
            continue
        is_alone = bool(_LOCATION.fullmatch(opened["before"]))
        if _is_python(opened) or (is_alone and not opened["info"]):
            code, index = _block(lines, index, opened["fence"], opened["before"] if is_alone else "")
            blocks.append(code)
        elif is_alone:
            index = _end(lines, index, opened["fence"])
        # What ends a block may begin the next one.
        if index < len(lines) and not _is_python(_OPEN.fullmatch(lines[index])):
            index += 1
    return blocks


def _block(lines: list[str], start: int, fence: str, before: str) -> tuple[str, int]:
    """The code of a block of Python, and the line that ends it."""
    ends = (index for index in range(start, len(lines)) if fence in lines[index])
    for end in itertools.islice(ends, MAX_FENCES):
        last = lines[end].partition(fence)[0]
        if last.lstrip().startswith("#"):
            continue
        code = _code([*lines[start:end], last], before)
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            ast.parse(code)
            return code, end
    end = _end(lines, start, fence)
    return _code(lines[start:end], before), end


def _end(lines: list[str], start: int, fence: str) -> int:
    for index in range(start, len(lines)):
        line = lines[index].strip("> \t")
        if (line.startswith(fence) and not line.strip(fence[0])) or _is_python(_OPEN.fullmatch(line)):
            return index
    return len(lines)


def _is_python(opened: re.Match[str] | None) -> bool:
    return opened is not None and bool(_PYTHON.match(opened["info"]))


def _code(lines: list[str], before: str) -> str:
    if ">" in before:
        lines, before = [re.sub(r"^(?:[ \t]*>)+ ?", "", line) for line in lines], ""
    first = next(filter(str.strip, lines), "")
    width = min(len(before), _indent(first))
    indents = (min(width, _indent(line)) for line in lines)
    code = "\n".join(line[indent:] for line, indent in zip(lines, indents, strict=True)).rstrip() + "\n"
    return textwrap.dedent(code) if code.lstrip("\n")[:1].isspace() else code


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def same_answer(given: str, expected: str) -> bool:
    """Whether two mathematical answers are equal: as texts or to math-verify."""
    if given.strip() == expected.strip():
        return bool(given.strip())
    return MATH_VERIFY.are_equal(given, expected)
