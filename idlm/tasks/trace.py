r"""Straight-line programs: "x=25; a=9\nx=x-a; a=a*2; print x" is answered by "x=25-9=16; a=9*2=18; #### 16".

Without paraphrases the answer is determined (entropy 0) and every step needs a look-up of the newest
assignment; with P > 1 each step takes one of P forms, uniformly. `trace_check.py` judges answers and must not
import this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple

from idlm.tasks import TASKS
from idlm.tasks.base import TaskSample
from idlm.tasks.split import GeneratedTask, canonical_entity, draw_names
from idlm.tasks.trace_check import check_trace

VARIABLES = ("a", "b", "c", "d", "m", "n", "p", "q", "x", "y", "z")
MAX_PARAPHRASES = 4

_FORMS = ("{t}={e};", "{t} becomes {e};", "now {e} in {t};", "set {t} to {e};")


class Assignment(NamedTuple):
    """`target = left sign right`; target and left are variable indices, right is one as well unless
    `constant`."""

    target: int
    left: int
    sign: str
    right: int
    constant: bool


class Program(NamedTuple):
    """The structure of a problem: first values, assignments, and the variable that is printed."""

    starts: tuple[int, ...]
    body: tuple[Assignment, ...]
    printed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All knobs. Values are whole, never negative and never above `cap`."""

    min_variables: int = 2
    max_variables: int = 3
    min_steps: int = 5
    max_steps: int = 8
    start_max: int = 30
    operand_max: int = 9
    cap: int = 99
    paraphrases: int = 1
    seed: int = 0

    def rules(self) -> dict[str, bool]:
        return {
            "2 <= min_variables <= max_variables <= 6": 2 <= self.min_variables <= self.max_variables <= 6,
            "1 <= min_steps <= max_steps": 1 <= self.min_steps <= self.max_steps,
            "2 <= start_max <= cap": 2 <= self.start_max <= self.cap,
            "2 <= operand_max <= cap": 2 <= self.operand_max <= self.cap,
            f"1 <= paraphrases <= {MAX_PARAPHRASES}": 1 <= self.paraphrases <= MAX_PARAPHRASES,
        }


LEVELS = {
    "short": Config(),
    "long": Config(min_variables=3, max_variables=4, min_steps=8, max_steps=14),
    "p4": Config(min_variables=3, max_variables=4, min_steps=8, max_steps=14, paraphrases=4),
}


def _apply(left: int, sign: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def render_prompt(program: Program, names: Sequence[str]) -> str:
    """Write the program; `names` has one variable name per index."""
    first = "; ".join(f"{names[idx]}={start}" for idx, start in enumerate(program.starts))
    body = [
        f"{names[target]}={names[left]}{sign}{right if constant else names[right]}"
        for target, left, sign, right, constant in program.body
    ]
    return f"{first}\n{'; '.join(body)}; print {names[program.printed]}"


def render_response(program: Program, names: Sequence[str], *, forms: Sequence[int]) -> str:
    """Write the reference solution; `forms` has one surface form (0-based) per assignment."""
    values, parts = list(program.starts), []
    for (target, left, sign, right, constant), form in zip(program.body, forms, strict=True):
        operand = right if constant else values[right]
        value = _apply(values[left], sign, operand)
        parts.append(_FORMS[form].format(t=names[target], e=f"{values[left]}{sign}{operand}={value}"))
        values[target] = value
    return f"{' '.join(parts)} #### {values[program.printed]}"


@TASKS.register("trace")
class Trace(GeneratedTask[Program]):
    name: ClassVar[str] = "trace"
    LEVELS: ClassVar[Mapping[str, Config]] = LEVELS
    check = staticmethod(check_trace)

    def draw(self, rng: Random) -> Program:
        config = self.config
        random = rng.random
        num_variables = config.min_variables + int(
            random() * (config.max_variables - config.min_variables + 1)
        )
        num_steps = config.min_steps + int(random() * (config.max_steps - config.min_steps + 1))
        starts = tuple(1 + int(random() * config.start_max) for _ in range(num_variables))
        values = list(starts)
        body: list[Assignment] = []
        while len(body) < num_steps:
            target, left = int(random() * num_variables), int(random() * num_variables)
            sign, constant = "+-*"[int(random() * 3)], random() < 0.5
            if sign == "*":
                right, constant = 2 + int(random() * 2), True
            elif constant:
                right = 1 + int(random() * config.operand_max)
            else:
                right = int(random() * num_variables)
            operand = right if constant else values[right]
            value = _apply(values[left], sign, operand)
            if 0 <= value <= config.cap and operand > 0:
                values[target] = value
                body.append(Assignment(target, left, sign, right, constant))
        assigned = sorted({step.target for step in body})
        return Program(starts, tuple(body), assigned[int(random() * len(assigned))])

    @staticmethod
    def canonical_prompt(problem: Program) -> str:
        """Return the prompt with canonical variables."""
        return render_prompt(problem, [canonical_entity(idx) for idx in range(len(problem.starts))])

    def write(self, problem: Program, random: Callable[[], float]) -> TaskSample:
        names = draw_names(VARIABLES, len(problem.starts), random)
        forms = [int(random() * self.config.paraphrases) for _ in problem.body]
        return TaskSample(
            prompt=render_prompt(problem, names), response=render_response(problem, names, forms=forms)
        )

    @staticmethod
    def surface_texts() -> Iterator[str]:
        for variable in VARIABLES:
            yield from (variable, f" {variable}")
        for form in _FORMS:
            text = form.format(t=0, e="0+0=0")
            yield from (text, f" {text}")
        yield "0; 0\n0=0*0-0; print 0 #### 0"
