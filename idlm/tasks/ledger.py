"""Word problems about amounts: one sentence per event, solved by a written chain of thought.

"Lea has 9 shells. Lea wins 3. ... How many shells does Lea have?" The response to an event has one of P
surface forms, chosen uniformly: sampling tests rely on the entropy of that choice. `ledger_check.py` judges
answers and must not import this file."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, NamedTuple

from idlm.tasks import TASKS
from idlm.tasks.base import Task, TaskSample, canonical_entity, draw_names
from idlm.tasks.ledger_check import check_ledger

NAMES = ("Lea", "Tom", "Mia", "Ben", "Ana", "Max", "Zoe", "Sam", "Ida", "Leo", "Eva", "Jan")
ITEMS = (
    "shells", "coins", "stamps", "marbles", "apples", "books", "cards", "pens", "stones", "beads",
    "nuts", "keys",
)  # fmt: skip
VERBS = {
    "gain": ("wins", "finds", "gets", "buys", "earns", "picks"),
    "lose": ("sells", "loses", "drops", "spends", "uses", "breaks"),
    "give": ("gives", "hands", "sends"),
    "times": ("multiplies", "scales"),
    "half": ("halves",),
}
MAX_PARAPHRASES = 4
QUESTIONS = ("one", "total", "any")

_TOTAL = -1
_SIGN = {"gain": "+", "lose": "-", "give": "-", "times": "*", "half": "/"}
_CHANGE = {
    "gain": operator.add,
    "lose": operator.sub,
    "give": operator.sub,
    "times": operator.mul,
    "half": operator.floordiv,
}
_EVENT = {
    "gain": "{n} {v} {k}.",
    "lose": "{n} {v} {k}.",
    "give": "{n} {v} {k} to {o}.",
    "times": "{n} {v} them by {k}.",
    "half": "{n} {v} them.",
}
# n, o: actor and receiver; s, t: their amounts before; e, f: their sums written out; r, u: their amounts now.
_WORDS = {
    "gain": ("plus {k} gives", "adds {k}", "{k} more", "go up by {k}"),
    "lose": ("minus {k} gives", "removes {k}", "{k} less", "go down by {k}"),
    "give": ("giving {k} makes", "passes {k} to {o} with {t}", "moving {k}", "move {k}"),
    "times": ("times {k} gives", "multiplies by {k}", "{k} times that", "scale by {k}"),
    "half": ("half of that gives", "divides by {k}", "half of it", "take half"),
}
_ONE = ("{n} has {s}", "{s}", "{e}", "{n} has {r}")
_BOTH = ("{n} has {s} and {o} has {t}", "{s} and {t}", "{e} and {f}", "{n} has {r} and {o} has {u}")
_RESTATED = {
    kind: (
        f"{before}, then {then} {sums}. {now}.",
        f"With {{s}} {{i}}, {{n}} {does}: {sums}. {now}.",
        f"Before it was {had}; {change} makes {sums}. {now}.",
        f"From {had} we {path}, so {sums}. {now}.",
    )
    for kind, (then, does, change, path) in _WORDS.items()
    for before, had, sums, now in (_BOTH if kind == "give" else _ONE,)
}
_PLAIN_ONE = ("{n}: {e}.", "Now {n} has {e}.", "So {e} for {n}.", "That makes {e} for {n}.")
_PLAIN_GIVE = (
    "{n}: {e}, {o}: {f}.",
    "Now {n} has {e} and {o} has {f}.",
    "So {e} for {n} and {f} for {o}.",
    "That makes {e} for {n} and {f} for {o}.",
)


class AmountChange(NamedTuple):
    """One change: `actor` and `other` are entity indices, `other` is -1 unless something is given."""

    kind: str
    actor: int
    operand: int
    other: int


class WordProblem(NamedTuple):
    """The structure of a problem, without words. `asked` is an entity index or -1 for the total."""

    starts: tuple[int, ...]
    events: tuple[AmountChange, ...]
    asked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All knobs. Amounts are whole, never negative and never above `cap`."""

    min_entities: int = 1
    max_entities: int = 1
    min_steps: int = 4
    max_steps: int = 8
    start_max: int = 20
    operand_max: int = 9
    cap: int = 50
    operations: tuple[str, ...] = ("gain", "lose")
    paraphrases: int = 2
    restate: bool = True
    question: str = "one"
    seed: int = 0

    def rules(self) -> dict[str, bool]:
        return {
            "1 <= min_entities <= max_entities <= 4": 1 <= self.min_entities <= self.max_entities <= 4,
            "1 <= min_steps <= max_steps": 1 <= self.min_steps <= self.max_steps,
            "1 <= start_max <= cap": 1 <= self.start_max <= self.cap,
            "1 <= operand_max <= cap": 1 <= self.operand_max <= self.cap,
            f"operations among {', '.join(VERBS)}": set(self.operations) <= set(VERBS),
            "operations contain gain and lose": {"gain", "lose"} <= set(self.operations),
            "give needs min_entities >= 2": "give" not in self.operations or self.min_entities >= 2,
            f"1 <= paraphrases <= {MAX_PARAPHRASES}": 1 <= self.paraphrases <= MAX_PARAPHRASES,
            f"question among {', '.join(QUESTIONS)}": self.question in QUESTIONS,
            "a total needs min_entities >= 2": self.question == "one" or self.min_entities >= 2,
        }


LEVELS = {
    "tiny": Config(),
    "p4": Config(paraphrases=4, start_max=50, cap=99),
    "multi": Config(
        min_entities=2,
        max_entities=3,
        min_steps=5,
        max_steps=9,
        cap=99,
        operations=("gain", "lose", "give", "times", "half"),
        restate=False,
        question="any",
    ),
}


def _draw_event(random: Callable[[], float], config: Config, amounts: list[int]) -> AmountChange:
    """Draw a legal event uniformly over operations (by rejection) and apply it to `amounts` in place."""
    num_entities = len(amounts)
    while True:
        kind = config.operations[int(random() * len(config.operations))]
        actor = int(random() * num_entities) if num_entities > 1 else 0
        have, other = amounts[actor], -1
        if kind == "give":
            other = (actor + 1 + int(random() * (num_entities - 1))) % num_entities
        limit = {
            "gain": min(config.operand_max, config.cap - have),
            "lose": min(config.operand_max, have),
            "give": min(config.operand_max, have, config.cap - amounts[other]),
            "times": min(3, config.cap // have) - 1 if have else 0,
            "half": int(have > 0 and have % 2 == 0),
        }[kind]
        if limit < 1:
            continue
        # The factor of "times" is 2 or 3, and "half" divides by 2: both add 1 to the draw.
        operand = 1 + int(random() * limit) + (kind in ("times", "half"))
        amounts[actor] = _CHANGE[kind](have, operand)
        if kind == "give":
            amounts[other] += operand
        return AmountChange(kind, actor, operand, other)


def render_prompt(problem: WordProblem, names: Sequence[str], item: str, verbs: Sequence[str]) -> str:
    """Write the problem; `verbs` has one verb per event."""
    parts = [f"{names[idx]} has {start} {item}." for idx, start in enumerate(problem.starts)]
    for (kind, actor, operand, other), verb in zip(problem.events, verbs, strict=True):
        parts.append(_EVENT[kind].format(n=names[actor], v=verb, k=operand, o=names[other]))
    if problem.asked == _TOTAL:
        parts.append(f"How many {item} do they have together?")
    else:
        parts.append(f"How many {item} does {names[problem.asked]} have?")
    return " ".join(parts)


def render_response(
    problem: WordProblem, names: Sequence[str], item: str, *, forms: Sequence[int], restate: bool
) -> str:
    """Write the reference solution; `forms` has one surface form (0-based) per event."""
    amounts, parts = list(problem.starts), []
    for (kind, actor, operand, other), form in zip(problem.events, forms, strict=True):
        words: dict[str, Any] = {"k": operand, "i": item}
        changes = [("nser", actor, kind), ("otfu", other, "gain")]
        for fields, entity, change in changes[: 1 + (kind == "give")]:
            had = amounts[entity]
            amounts[entity] = now = _CHANGE[change](had, operand)
            written = f"{had}{_SIGN[change]}{operand}={now}"
            words |= zip(fields, (names[entity], had, written, now), strict=True)
        plain = _PLAIN_GIVE if kind == "give" else _PLAIN_ONE
        parts.append((_RESTATED[kind] if restate else plain)[form].format_map(words))
    answer = sum(amounts) if problem.asked == _TOTAL else amounts[problem.asked]
    if problem.asked == _TOTAL:
        parts.append(f"In total {'+'.join(map(str, amounts))}={answer}.")
    return f"{' '.join(parts)}\n#### {answer}"


@TASKS.register("ledger")
class Ledger(Task[WordProblem]):
    name: ClassVar[str] = "ledger"
    LEVELS: ClassVar[Mapping[str, Config]] = LEVELS
    check = staticmethod(check_ledger)

    def draw(self, rng: Random) -> WordProblem:
        config = self.config
        random = rng.random
        num_entities = config.min_entities + int(random() * (config.max_entities - config.min_entities + 1))
        num_steps = config.min_steps + int(random() * (config.max_steps - config.min_steps + 1))
        starts = tuple(1 + int(random() * config.start_max) for _ in range(num_entities))
        amounts = list(starts)
        events = tuple(_draw_event(random, config, amounts) for _ in range(num_steps))
        total = config.question == "total" or (config.question == "any" and random() < 0.5)
        return WordProblem(starts, events, _TOTAL if total else int(random() * num_entities))

    @staticmethod
    def canonical_prompt(problem: WordProblem) -> str:
        """Return the prompt with the first item, and the first verb of each kind."""
        names = [canonical_entity(idx) for idx in range(len(problem.starts))]
        return render_prompt(problem, names, ITEMS[0], [VERBS[event.kind][0] for event in problem.events])

    def write(self, problem: WordProblem, random: Callable[[], float]) -> TaskSample:
        names = draw_names(NAMES, len(problem.starts), random)
        item = ITEMS[int(random() * len(ITEMS))]
        verbs = [VERBS[event.kind][int(random() * len(VERBS[event.kind]))] for event in problem.events]
        forms = [int(random() * self.config.paraphrases) for _ in problem.events]
        return TaskSample(
            prompt=render_prompt(problem, names, item, verbs),
            response=render_response(problem, names, item, forms=forms, restate=self.config.restate),
        )

    @staticmethod
    def surface_texts() -> Iterator[str]:
        blank = dict.fromkeys("nosktrueif", 0)
        for name in NAMES:
            yield from (name, f" {name}")
        for group in (ITEMS, *VERBS.values()):
            yield from (f" {word}" for word in group)
        for forms in (*_RESTATED.values(), _PLAIN_ONE, _PLAIN_GIVE):
            for form in forms:
                text = form.format_map(blank)
                yield from (text, f" {text}")
        yield from (template.format_map(blank | {"v": 0}) for template in _EVENT.values())
        # Words of no problem, which the tokenizer of the bundled models has: new models get the same ids.
        yield from (f"0{word} {word}" for word in (*"abcdmnpqxyz", "now", "set"))
        yield "0 becomes in print"
        yield " In total 0+0=0.\n#### 0 How many 0 do they have together? How many 0 does 0 have? +-*/"
