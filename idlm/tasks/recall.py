"""Needles in filler: " Lea finds shells. baq. Tom sells nuts. ... du? ba?" is answered by ": du x ba q."

A record is a word of a key and its value; the question has `asked` of them, and each answer repeats its key.
The rest of the context is filler without keys. With as many records as questions the task is needle
retrieval, with more it is multi-key recall. `recall_check.py` judges answers and must not import this file.

What makes it learnable in minutes: a record is one token. Attention from a key to it has a gradient from the
start. Where a key and its value are two tokens, one layer must join them before another gains from looking
the key up: a GPU run of 158M tokens ended with guesses; a model of three layers of width 64 retrieves 99 %
after 2.7M tokens. An answer's keys are as far from their questions as all others of a level; many keys are
queried at once, some twice where there are fewer records; `ramp` begins with short contexts of few records.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar, NamedTuple

from idlm.tasks import TASKS
from idlm.tasks.base import Task, TaskSample, canonical_entity, draw_names
from idlm.tasks.recall_check import check_recall

VALUES = tuple("bdfgklmnprstvwxz")
KEYS = tuple(map("".join, itertools.product(VALUES, "aeio")))
NAMES = ("Lea", "Tom", "Mia", "Ben", "Ana", "Max", "Zoe", "Sam")
VERBS = ("finds", "sells", "buys", "drops", "gets", "uses")
ITEMS = ("shells", "coins", "stamps", "marbles", "apples", "books", "cards", "pens")

_FILLER = tuple(itertools.starmap(" {} {} {}.".format, itertools.product(NAMES, VERBS, ITEMS)))
_FILLER_TOKENS, _RECORD_TOKENS, _QUESTION_TOKENS, _FRAME_TOKENS = 4, 2, 2, 14
"""Tokens of one part of each kind; the frame is the first token, the separator before the answer, and three
sentences, which are enough to give a context any length."""
_STEPS_OF_RAMP = 8


class Records(NamedTuple):
    """The structure of a problem: tokens of the context, the value of each record, which ones are queried."""

    context: int
    values: tuple[str, ...]
    asked: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All knobs. A context is what is before the answer, in tokens; lengths are log-uniform, numbers of
    records uniform. The samples of `train` below number `ramp` have upper limits that rise from the lower
    ones, in steps. Training numbers samples by the rows of all pools before theirs (train/data/packing.py),
    so that `ramp` counts tokens there."""

    min_context: int = 64
    max_context: int = 128
    min_records: int = 2
    max_records: int = 12
    asked: int = 8
    ramp: int = 0
    seed: int = 0

    def rules(self) -> dict[str, bool]:
        minimum = _FRAME_TOKENS + _RECORD_TOKENS * self.min_records + _QUESTION_TOKENS * self.asked
        has_room = minimum <= self.min_context <= self.max_context
        has_keys = 1 <= self.min_records <= self.max_records <= len(KEYS)
        return {
            f"{minimum} (for min_records and asked) <= min_context <= max_context": has_room,
            f"1 <= min_records <= max_records <= {len(KEYS)}": has_keys,
            "asked >= 1": self.asked >= 1,
            "ramp >= 0": self.ramp >= 0,
        }


LEVELS = {"tiny": Config(), "long": Config(max_context=8192, max_records=64, asked=14)}


def _between(low: float, high: float, share: float) -> float:
    """Log-uniform for a uniform `share` in [0, 1)."""
    return float(low * (high / low) ** share)


def _question(keys: Sequence[str]) -> str:
    return "".join(f" {key}?" for key in keys)


@TASKS.register("recall")
class Recall(Task[Records]):
    name: ClassVar[str] = "recall"
    LEVELS: ClassVar[Mapping[str, Config]] = LEVELS
    check = staticmethod(check_recall)
    config: Config

    def sample(self, index: int, split: str) -> TaskSample:
        """As every task; contexts of early training samples are short."""
        limited = self.limited(index) if split == "train" else self
        return super(Recall, limited).sample(index, split)

    def limited(self, index: int) -> Recall:
        """Return the task with the limits of training sample `index`."""
        config = self.config
        if not 0 <= index < config.ramp:
            return self
        share = (_STEPS_OF_RAMP * index // config.ramp + 1) / _STEPS_OF_RAMP
        task = Recall()
        task.config = replace(
            config,
            max_context=int(_between(config.min_context, config.max_context, share)),
            max_records=int(_between(config.min_records, config.max_records, share)),
            ramp=0,
        )
        return task

    def draw(self, rng: Random) -> Records:
        config, random = self.config, rng.random
        context = int(_between(config.min_context, config.max_context, random()))
        capacity = (context - _FRAME_TOKENS - _QUESTION_TOKENS * config.asked) // _RECORD_TOKENS
        maximum = min(config.max_records, capacity)
        num = config.min_records + int(random() * (maximum - config.min_records + 1))
        values = tuple(VALUES[int(random() * len(VALUES))] for _ in range(num))
        numbers = list(range(num))
        asked = tuple(numbers.pop(int(random() * len(numbers))) for _ in range(min(num, config.asked)))
        asked += tuple(int(random() * num) for _ in range(config.asked - len(asked)))
        return Records(context, values, asked)

    @staticmethod
    def canonical_prompt(problem: Records) -> str:
        """Return the records and the question with canonical keys, without filler."""
        keys = [canonical_entity(idx) for idx in range(len(problem.values))]
        records = "".join(f" {key} {value}." for key, value in zip(keys, problem.values, strict=True))
        return records + _question([keys[idx] for idx in problem.asked])

    def write(self, problem: Records, random: Callable[[], float]) -> TaskSample:
        keys = draw_names(KEYS, len(problem.values), random)
        num_tokens = problem.context - 2 - _QUESTION_TOKENS * len(problem.asked)
        num, rest = divmod(num_tokens - _RECORD_TOKENS * len(keys), _FILLER_TOKENS)
        parts = [_FILLER[int(random() * len(_FILLER))] for _ in range(num)]
        # One more word in some sentences gives the context its exact length.
        parts[:rest] = [re.sub(r"^( \w+)", r"\1 now", part) for part in parts[:rest]]
        indices = sorted(int(random() * (num + 1)) for _ in keys)
        for idx in reversed(range(len(keys))):
            parts.insert(indices[idx], f" {keys[idx]}{problem.values[idx]}.")
        pairs = "".join(f" {keys[idx]} {problem.values[idx]}" for idx in problem.asked)
        question = _question([keys[idx] for idx in problem.asked])
        return TaskSample(prompt="".join(parts) + question, response=f":{pairs}.")

    @staticmethod
    def surface_texts() -> Iterator[str]:
        yield from (f": {key} {value} {key}{value}.? {NAMES[0]} now" for key in KEYS for value in VALUES)
        yield from _FILLER
