"""Ledger: the generator is pure and uniform, and its checker, which shares nothing with it, lets no slip
through."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from idlm.tasks import TASKS, Task, ledger
from idlm.tasks.ledger_check import check_ledger
from tests.errors import refused

ROOT = Path(__file__).parents[3]
LEVELS = tuple(ledger.LEVELS)
VARIANTS = [
    *({"level": level} for level in LEVELS),
    {"level": "multi", "restate": True, "paraphrases": 4},
    {"level": "multi", "paraphrases": 4, "question": "total"},
    {"level": "tiny", "restate": False, "paraphrases": 4, "operations": ["gain", "lose", "times", "half"]},
]


def make(**settings: object) -> Task:
    return TASKS.get("ledger")(**settings)


def scaled(settings: dict[str, object], num: int) -> int:
    """All samples for the level that CI trains on, a fifth for the others."""
    return num if settings == {"level": "tiny"} else num // 5


def digest(task: Task, num: int) -> str:
    texts = [
        f"{sample.prompt}\n{sample.response}" for sample in (task.sample(i, "train") for i in range(num))
    ]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


@pytest.mark.sweep_but(settings={"level": "p4"})
@pytest.mark.sweep_but(settings={"level": "multi"})
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_checker_accepts_generated_samples(settings):
    task = make(**settings)
    for index in range(scaled(settings, 2000)):
        sample = task.sample(index, "train")
        verdict = task.check(sample.prompt, sample.response)
        assert verdict.correct and verdict.final_answer_correct and verdict.first_bad_step is None, verdict


@pytest.mark.sweep
@pytest.mark.parametrize("settings", VARIANTS[-3:], ids=str)
def test_every_changed_number_is_rejected(settings):
    task = make(**settings)
    for index in range(scaled(settings, 60)):
        sample = task.sample(index, "train")
        for match in re.finditer(r"\d+", sample.response):
            for wrong in (str(int(match.group()) + 1), f"0{match.group()}", match.group()[:-1]):
                changed = sample.response[: match.start()] + wrong + sample.response[match.end() :]
                verdict = task.check(sample.prompt, changed)
                assert not verdict.correct and verdict.first_bad_step is not None and verdict.reason, changed
                if match.end() == len(sample.response) and wrong != f"0{match.group()}":
                    assert not verdict.final_answer_correct, changed


@pytest.mark.sweep
@pytest.mark.parametrize("settings", VARIANTS[-3:], ids=str)
def test_every_dropped_or_doubled_piece_is_rejected(settings):
    task = make(**settings)
    for index in range(scaled(settings, 10)):
        sample = task.sample(index, "train")
        for match in re.finditer(r" ?[A-Za-z]+|\d|\n|[^A-Za-z0-9]", sample.response):
            before, after = sample.response[: match.start()], sample.response[match.end() :]
            assert not task.check(sample.prompt, before + after).correct
            assert not task.check(sample.prompt, before + match.group() * 2 + after).correct
            assert not task.check(sample.prompt, before).correct, "a truncated response"
        for extra in (" ", "\n", ".", " #### 1", f"\n{sample.response}"):
            assert not task.check(sample.prompt, sample.response + extra).correct


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_wrong_entity_is_rejected(settings):
    task = make(**settings)
    for index in range(scaled(settings, 40)):
        sample = task.sample(index, "train")
        people = set(re.findall(r"([A-Z][a-z]+) has", sample.prompt))
        for match in re.finditer("|".join(people), sample.response):
            for other in (people | {"Zed"}) - {match.group()}:
                changed = sample.response[: match.start()] + other + sample.response[match.end() :]
                assert not task.check(sample.prompt, changed).correct, changed


PROMPT = (
    "Lea has 9 nuts. Tom has 4 nuts. Lea wins 3. Tom sells 1. Lea gives 2 to Tom. Tom scales them by 3. "
    "Lea halves them. How many nuts do they have together?"
)
ANSWER = (
    "Lea has 9, then plus 3 gives 9+3=12. Lea has 12. Tom: 4-1=3. "
    "Lea has 12 and Tom has 3, then giving 2 makes 12-2=10 and 3+2=5. Lea has 10 and Tom has 5. "
    "With 5 nuts, Tom multiplies by 3: 5*3=15. Tom has 15. So 10/2=5 for Lea. In total 5+15=20.\n#### 20"
)


def test_checker_follows_a_story_written_by_hand():
    assert check_ledger(PROMPT, ANSWER).correct
    one = PROMPT.replace("do they have together", "does Tom have")
    assert check_ledger(one, ANSWER.replace(" In total 5+15=20.\n#### 20", "\n#### 15")).correct


@pytest.mark.parametrize(
    ("old", "new", "step", "final"),
    [
        ("9+3=12", "9+3=13", 0, True),
        ("4-1=3", "4-1=2", 1, True),
        ("Tom has 5.", "Tom has 6.", 2, True),
        ("5*3=15", "5*3=20", 3, True),
        ("for Lea", "for Tom", 4, True),
        ("5+15=20", "5+15=21", 5, True),
        ("#### 20", "#### 21", 6, False),
        ("#### 20", "", 6, False),
        ("#### 20", "#### 20 nuts", 6, False),
    ],
)
def test_verdict_names_the_first_bad_step(old, new, step, final):
    verdict = check_ledger(PROMPT, ANSWER.replace(old, new))
    assert (verdict.correct, verdict.first_bad_step, verdict.final_answer_correct) == (False, step, final)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Lea wins", "Lea juggles"),
        ("Tom sells 1", "Tom sells 5"),
        ("scales them by 3. Lea halves", "scales them by 3. Tom halves"),
        ("to Tom", "to Lea"),
        ("to Tom", "to Ann"),
        ("Tom has 4 nuts", "Tom has 4 keys"),
        ("Tom has 4 nuts", "Lea has 4 nuts"),
        ("How many nuts", "How many keys"),
        ("together?", "together? Yes."),
        ("3. Tom", "3.Tom"),
    ],
)
def test_ill_posed_prompt_is_no_success(old, new):
    assert old in PROMPT
    verdict = check_ledger(PROMPT.replace(old, new), ANSWER)
    assert not verdict.correct and not verdict.final_answer_correct and verdict.reason.startswith("prompt: ")


@pytest.mark.parametrize("fault", ["sign", "verb", "form", "negative"])
def test_checker_catches_a_planted_generator_fault(monkeypatch, fault):
    if fault == "sign":
        monkeypatch.setattr(ledger, "_SIGN", {**ledger._SIGN, "lose": "+"})
    elif fault == "verb":
        monkeypatch.setattr(ledger, "VERBS", {**ledger.VERBS, "gain": ledger.VERBS["lose"]})
    elif fault == "form":
        spoilt = tuple(form.replace("{n} has {r}", "{n} has {s}") for form in ledger._RESTATED["gain"])
        monkeypatch.setattr(ledger, "_RESTATED", {**ledger._RESTATED, "gain": spoilt})
    else:
        original = ledger._draw_event
        monkeypatch.setattr(
            ledger, "_draw_event", lambda *arguments: original(*arguments)._replace(kind="lose", operand=9)
        )
    task = make(level="tiny")
    samples = [task.sample(index, "train") for index in range(50)]
    assert sum(not task.check(sample.prompt, sample.response).correct for sample in samples) > 25


def test_sample_is_pure_across_objects_and_processes():
    task = make(level="tiny", seed=3)
    forward = [task.sample(index, "train") for index in range(50)]
    assert [make(level="tiny", seed=3).sample(index, "train") for index in reversed(range(50))] == forward[
        ::-1
    ]
    assert make(level="tiny", seed=4).sample(0, "train") != forward[0]
    assert len({sample.prompt for sample in forward}) == 50
    program = (
        "import hashlib; from idlm.tasks import TASKS; t = TASKS.get('ledger')(level='multi');"
        "print(hashlib.sha256(repr([t.sample(i, 'validation') for i in range(5)]).encode()).hexdigest())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1


def test_samples_of_the_tiny_level_never_drift():
    """Committed checkpoints were trained on the train split: a drift would silently move held-out problems
    into it."""
    assert (
        digest(make(level="tiny"), 200) == "8bc2ab5a67d00d47202c8b5124c2582b0ba327200f03ac063d92c061746b2462"
    )


@pytest.mark.parametrize(
    ("settings", "code", "names"),
    [
        ({"level": "tinny"}, "IDLM-0220", "tiny"),
        ({"level": "tiny", "paraphrase": 2}, "IDLM-0221", "paraphrases"),
        ({"level": "tiny", "paraphrases": 9}, "IDLM-0222", "paraphrases <= 4"),
        ({"level": "tiny", "question": "total"}, "IDLM-0222", "min_entities >= 2"),
        ({"level": "tiny", "start_max": 60}, "IDLM-0222", "start_max <= cap"),
        ({"level": "tiny", "operations": ["gain"]}, "IDLM-0222", "gain and lose"),
    ],
)
def test_bad_configuration_is_refused(settings, code, names):
    error = refused(re.escape(names), make, **settings)
    assert error.code == code


def test_bad_index_and_split_are_refused():
    refused("IDLM-0223", make(level="tiny").sample, 0, "dev")
    refused("IDLM-0224", make(level="tiny").sample, -1, "train")
