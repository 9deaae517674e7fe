"""Judge a ledger answer by executing the prompt's text again, without any code of the generator.

This file states the grammar of prompts and the accepted sentences a second time on purpose: a mistake in
either position makes generated samples fail their own check. Names and items are those of the prompt."""

from __future__ import annotations

import re

from idlm.tasks.base import Grade, UnreadablePromptError, judge

_HAS = re.compile(r"([A-Z][a-z]+) has (0|[1-9]\d*) ([a-z]+)\.")
_CHANGE = re.compile(r"([A-Z][a-z]+) ([a-z]+) (0|[1-9]\d*)\.")
_HANDOVER = re.compile(r"([A-Z][a-z]+) (?:gives|hands|sends) (0|[1-9]\d*) to ([A-Z][a-z]+)\.")
_PRODUCT = re.compile(r"([A-Z][a-z]+) (?:multiplies|scales) them by (0|[1-9]\d*)\.")
_HALVING = re.compile(r"([A-Z][a-z]+) halves them\.")
_ASK_ONE = re.compile(r"How many ([a-z]+) does ([A-Z][a-z]+) have\?")
_ASK_ALL = re.compile(r"How many ([a-z]+) do they have together\?")

_SIGNS = {
    **dict.fromkeys(("wins", "finds", "gets", "buys", "earns", "picks"), "+"),
    **dict.fromkeys(("sells", "loses", "drops", "spends", "uses", "breaks"), "-"),
}
_WORDS = {
    "+": ("plus {0} gives", "adds {0}", "{0} more", "go up by {0}"),
    "-": ("minus {0} gives", "removes {0}", "{0} less", "go down by {0}"),
    "*": ("times {0} gives", "multiplies by {0}", "{0} times that", "scale by {0}"),
    "/": ("half of that gives", "divides by {0}", "half of it", "take half"),
    "-+": ("giving {0} makes", "passes {0} to {1} with {2}", "moving {0}", "move {0}"),
}
"""0: the number; 1, 2: who receives it, and what that one has before."""
_Change = tuple[str, int, str, int]
"""A name, the amount before, the sum written out, and the amount now."""


def check_ledger(prompt: str, response: str) -> Grade:
    """Compare `response` with the run of `prompt`, sentence by sentence, any accepted form in any
    position."""
    return judge(prompt, response, _execute)


def _execute(prompt: str) -> tuple[list[list[str]], str]:
    """Return the accepted sentences of every step, and the ending."""
    holdings: dict[str, int] = {}
    item, position = "", 0

    while (match := _HAS.match(prompt, position)) is not None:
        name, amount, noun = match.group(1), int(match.group(2)), match.group(3)
        contradicts = name in holdings or (item and noun != item)
        _require(not contradicts, f"{match.group()!r} contradicts an earlier statement")
        holdings[name], item, position = amount, noun, _after(prompt, match)
    _require(bool(holdings), "there are no amounts at the start")

    steps: list[list[str]] = []
    while not prompt.startswith("How many", position):
        forms, position = _event(prompt, position, holdings, item)
        steps.append(forms)
    _require(bool(steps), "nothing happens")

    one, everyone = _ASK_ONE.fullmatch(prompt, position), _ASK_ALL.fullmatch(prompt, position)
    if one is not None and one.group(1) == item and one.group(2) in holdings:
        answer = holdings[one.group(2)]
    elif everyone is not None and everyone.group(1) == item and len(holdings) > 1:
        answer = sum(holdings.values())
        steps.append([f"In total {'+'.join(map(str, holdings.values()))}={answer}."])
    else:
        raise UnreadablePromptError(f"no answerable question in {prompt[position:]!r}")
    later = [[f" {form}" for form in forms] for forms in steps[1:]]
    return [steps[0], *later], f"\n#### {answer}"


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise UnreadablePromptError(problem)


def _after(prompt: str, match: re.Match[str]) -> int:
    _require(prompt[match.end() : match.end() + 1] == " ", f"no space after {match.group()!r}")
    return match.end() + 1


def _event(prompt: str, position: int, holdings: dict[str, int], item: str) -> tuple[list[str], int]:
    """Read one event, apply it to `holdings` in place; return its accepted sentences and where it ends."""
    receiver = ""
    if (match := _HANDOVER.match(prompt, position)) is not None:
        sign, number, receiver = "-", int(match.group(2)), match.group(3)
        is_valid = match.group(1) != receiver and receiver in holdings
        _require(is_valid, f"{match.group()!r} has no valid receiver")
    elif (match := _PRODUCT.match(prompt, position)) is not None:
        sign, number = "*", int(match.group(2))
    elif (match := _HALVING.match(prompt, position)) is not None:
        sign, number = "/", 2
    elif (match := _CHANGE.match(prompt, position)) is not None and match.group(2) in _SIGNS:
        sign, number = _SIGNS[match.group(2)], int(match.group(3))
    else:
        raise UnreadablePromptError(f"cannot read {prompt[position : position + 60]!r}")
    given = ((match.group(1), sign), (receiver, "+"))
    changes = [_change(match, holdings, name, each, number) for name, each in given if name]
    return _forms(changes, sign, number, item), _after(prompt, match)


def _change(match: re.Match[str], holdings: dict[str, int], name: str, sign: str, number: int) -> _Change:
    _require(name in holdings, f"{name} was not introduced")
    had = holdings[name]
    _require(sign != "/" or had % 2 == 0, f"{match.group()!r} halves an odd amount")
    now = {"+": had + number, "-": had - number, "*": had * number, "/": had // 2}[sign]
    _require(now >= 0, f"{match.group()!r} takes more than there is")
    holdings[name] = now
    return name, had, f"{had}{sign}{number}={now}", now


def _forms(changes: list[_Change], sign: str, number: int, item: str) -> list[str]:
    """Return the accepted sentences of an event: one change, or those of the giver and the receiver."""

    def each(text: str, separator: str = " and ") -> str:
        return separator.join(text.format(*change) for change in changes)

    (name, had, *_), (receiver, received, *_) = changes[0], changes[-1]
    words = _WORDS["-+" if len(changes) > 1 else sign]
    then, does, change, path = (text.format(number, receiver, received) for text in words)
    sums, state = each("{2}"), each("{0} has {3}")
    return [
        f"{each('{0} has {1}')}, then {then} {sums}. {state}.",
        f"With {had} {item}, {name} {does}: {sums}. {state}.",
        f"Before it was {each('{1}')}; {change} makes {sums}. {state}.",
        f"From {each('{1}')} we {path}, so {sums}. {state}.",
        f"{each('{0}: {2}', ', ')}.",
        f"Now {each('{0} has {2}')}.",
        f"So {each('{2} for {0}')}.",
        f"That makes {each('{2} for {0}')}.",
    ]
