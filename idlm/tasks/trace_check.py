"""Judge an answer to a straight-line program by running the prompt, without any code of the generator."""

from __future__ import annotations

import re

from idlm.tasks.base import Verdict

_NUMBER = r"(?:0|[1-9]\d*)"
_START = re.compile(rf"([a-z])=({_NUMBER})")
_STEP = re.compile(rf"([a-z])=([a-z])([-+*])([a-z]|{_NUMBER})")
_PRINT = re.compile(r"print ([a-z])")
_FINAL = re.compile(rf"#### ({_NUMBER})\Z")


class _Unreadable(Exception):
    """The prompt is not a program that runs."""


def check_trace(prompt: str, response: str) -> Verdict:
    """Compare `response` with the run of `prompt`, step by step, any accepted form in any place."""
    try:
        steps, answer = _execute(prompt)
    except _Unreadable as error:
        return Verdict(reason=f"prompt: {error}")
    final = _FINAL.search(response)
    final_ok = final is not None and int(final.group(1)) == answer
    rest = response
    for idx, (target, arithmetic) in enumerate(steps):
        accepted = (
            f"{target}={arithmetic}; ",
            f"{target} becomes {arithmetic}; ",
            f"now {arithmetic} in {target}; ",
            f"set {target} to {arithmetic}; ",
        )
        matched = next((form for form in accepted if rest.startswith(form)), None)
        if matched is None:
            reason = f"step {idx}: found {rest[:60]!r}, expected for example {accepted[0]!r}"
            return Verdict(final_answer_correct=final_ok, first_bad_step=idx, reason=reason)
        rest = rest[len(matched) :]
    if rest != f"#### {answer}":
        reason = f"ending: found {rest[:60]!r}, expected '#### {answer}'"
        return Verdict(final_answer_correct=final_ok, first_bad_step=len(steps), reason=reason)
    return Verdict(correct=True, final_answer_correct=True)


def _execute(prompt: str) -> tuple[list[tuple[str, str]], int]:
    """Return (assigned variable, arithmetic written out) of every step, and the printed value."""
    lines = prompt.split("\n")
    if len(lines) != 2:
        raise _Unreadable(f"expected 2 lines, found {len(lines)}")
    memory: dict[str, int] = {}
    for text in lines[0].split("; "):
        start = _START.fullmatch(text)
        if start is None or start.group(1) in memory:
            raise _Unreadable(f"cannot read {text!r} as a first value")
        memory[start.group(1)] = int(start.group(2))
    *body, last = lines[1].split("; ")
    steps = [_run(text, memory) for text in body]
    printed = _PRINT.fullmatch(last)
    if not steps or printed is None or printed.group(1) not in memory:
        raise _Unreadable(f"no steps, or cannot read {last!r} as the print statement")
    return steps, memory[printed.group(1)]


def _run(text: str, memory: dict[str, int]) -> tuple[str, str]:
    """Run one assignment in place."""
    step = _STEP.fullmatch(text)
    if step is None:
        raise _Unreadable(f"cannot read {text!r} as an assignment")
    target, left, sign, right = step.groups()
    for name in (target, left, *([right] if right.isalpha() else [])):
        if name not in memory:
            raise _Unreadable(f"{name} in {text!r} has no value")
    first, second = memory[left], memory[right] if right.isalpha() else int(right)
    value = {"+": first + second, "-": first - second, "*": first * second}[sign]
    if value < 0:
        raise _Unreadable(f"{text!r} gives the negative value {value}")
    memory[target] = value
    return target, f"{first}{sign}{second}={value}"
