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
    if (match := _HANDOVER.match(prompt, position)) is not None:
        giver, number, receiver = match.group(1), int(match.group(2)), match.group(3)
        is_valid = giver != receiver and receiver in holdings
        _require(is_valid, f"{match.group()!r} has no valid receiver")
        before = _owned(holdings, giver), holdings[receiver]
        holdings[giver] = _whole(before[0] - number, match)
        holdings[receiver] = before[1] + number
        return _handover_forms(giver, receiver, number, before, item), _after(prompt, match)
    if (match := _PRODUCT.match(prompt, position)) is not None:
        sign, number = "*", int(match.group(2))
    elif (match := _HALVING.match(prompt, position)) is not None:
        sign, number = "/", 2
    elif (match := _CHANGE.match(prompt, position)) is not None and match.group(2) in _SIGNS:
        sign, number = _SIGNS[match.group(2)], int(match.group(3))
    else:
        raise UnreadablePromptError(f"cannot read {prompt[position : position + 60]!r}")
    return _apply(match, holdings, item, sign, number), _after(prompt, match)


def _owned(holdings: dict[str, int], name: str) -> int:
    _require(name in holdings, f"{name} was not introduced")
    return holdings[name]


def _whole(amount: int, match: re.Match[str]) -> int:
    _require(amount >= 0, f"{match.group()!r} takes more than there is")
    return amount


def _apply(match: re.Match[str], holdings: dict[str, int], item: str, sign: str, number: int) -> list[str]:
    name = match.group(1)
    had = _owned(holdings, name)
    _require(sign != "/" or had % 2 == 0, f"{match.group()!r} halves an odd amount")
    values = {"+": had + number, "-": had - number, "*": had * number, "/": had // 2}
    holdings[name] = now = _whole(values[sign], match)
    arithmetic = f"{had}{sign}{number}={now}"
    state = f"{name} has {now}."
    then, does, change, path = {
        "+": (f"plus {number}", "adds", f"{number} more", f"go up by {number}"),
        "-": (f"minus {number}", "removes", f"{number} less", f"go down by {number}"),
        "*": (f"times {number}", "multiplies by", f"{number} times that", f"scale by {number}"),
        "/": ("half of that", "divides by", "half of it", "take half"),
    }[sign]
    return [
        f"{name} has {had}, then {then} gives {arithmetic}. {state}",
        f"With {had} {item}, {name} {does} {number}: {arithmetic}. {state}",
        f"Before it was {had}; {change} makes {arithmetic}. {state}",
        f"From {had} we {path}, so {arithmetic}. {state}",
        f"{name}: {arithmetic}.",
        f"Now {name} has {arithmetic}.",
        f"So {arithmetic} for {name}.",
        f"That makes {arithmetic} for {name}.",
    ]


def _handover_forms(giver: str, receiver: str, number: int, before: tuple[int, int], item: str) -> list[str]:
    less, more = before[0] - number, before[1] + number
    minus, plus = f"{before[0]}-{number}={less}", f"{before[1]}+{number}={more}"
    state = f"{giver} has {less} and {receiver} has {more}."
    had, sums = (f"{before[0]} and {before[1]}", f"{minus} and {plus}")
    return [
        f"{giver} has {before[0]} and {receiver} has {before[1]}, then giving {number} makes {sums}. {state}",
        f"With {before[0]} {item}, {giver} passes {number} to {receiver} with {before[1]}: {sums}. {state}",
        f"Before it was {had}; moving {number} makes {sums}. {state}",
        f"From {had} we move {number}, so {sums}. {state}",
        f"{giver}: {minus}, {receiver}: {plus}.",
        f"Now {giver} has {minus} and {receiver} has {plus}.",
        f"So {minus} for {giver} and {plus} for {receiver}.",
        f"That makes {minus} for {giver} and {plus} for {receiver}.",
    ]
