"""Judge an answer to a straight-line program by running the prompt, without any code of the generator."""

from __future__ import annotations

import re

from idlm.tasks.base import UnreadablePromptError, Verdict, judge

_NUMBER = r"(?:0|[1-9]\d*)"
_START = re.compile(rf"([a-z])=({_NUMBER})")
_STEP = re.compile(rf"([a-z])=([a-z])([-+*])([a-z]|{_NUMBER})")
_PRINT = re.compile(r"print ([a-z])")


def check_trace(prompt: str, response: str) -> Verdict:
    """Compare `response` with the run of `prompt`, step by step, any accepted form in any place."""
    return judge(prompt, response, _execute)


def _execute(prompt: str) -> tuple[list[list[str]], str]:
    """Return the accepted forms of every step, and the ending."""
    lines = prompt.split("\n")
    if len(lines) != 2:
        raise UnreadablePromptError(f"expected 2 lines, found {len(lines)}")
    memory: dict[str, int] = {}
    for text in lines[0].split("; "):
        start = _START.fullmatch(text)
        if start is None or start.group(1) in memory:
            raise UnreadablePromptError(f"cannot read {text!r} as a first value")
        memory[start.group(1)] = int(start.group(2))
    *body, last = lines[1].split("; ")
    steps = [_run(text, memory) for text in body]
    printed = _PRINT.fullmatch(last)
    if not steps or printed is None or printed.group(1) not in memory:
        raise UnreadablePromptError(f"no steps, or cannot read {last!r} as the print statement")
    return steps, f"#### {memory[printed.group(1)]}"


def _run(text: str, memory: dict[str, int]) -> list[str]:
    """Run one assignment in place; return its accepted forms."""
    step = _STEP.fullmatch(text)
    if step is None:
        raise UnreadablePromptError(f"cannot read {text!r} as an assignment")
    target, left, sign, right = step.groups()
    for name in (target, left, *([right] if right.isalpha() else [])):
        if name not in memory:
            raise UnreadablePromptError(f"{name} in {text!r} has no value")
    first, second = memory[left], memory[right] if right.isalpha() else int(right)
    value = {"+": first + second, "-": first - second, "*": first * second}[sign]
    if value < 0:
        raise UnreadablePromptError(f"{text!r} gives the negative value {value}")
    memory[target] = value
    arithmetic = f"{first}{sign}{second}={value}"
    return [
        f"{target}={arithmetic}; ",
        f"{target} becomes {arithmetic}; ",
        f"now {arithmetic} in {target}; ",
        f"set {target} to {arithmetic}; ",
    ]
