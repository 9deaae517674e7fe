"""Trace: the checker runs the program in the prompt; nothing but a faithful trace passes."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from idlm.errors import UserError
from idlm.tasks import TASKS, trace
from idlm.tasks.trace_check import check_trace

LEVELS = tuple(trace.LEVELS)


@pytest.mark.parametrize("level", LEVELS)
def test_checker_accepts_generated_samples(level):
    task = TASKS.get("trace")(level=level)
    for index in range(1000):
        sample = task.sample(index, "train")
        verdict = task.check(sample.prompt, sample.response)
        assert verdict.correct and verdict.final_answer_correct and verdict.first_bad_step is None, verdict


@pytest.mark.sweep_but("short")
@pytest.mark.parametrize("level", LEVELS)
def test_every_single_slip_is_rejected(level):
    task = TASKS.get("trace")(level=level)
    for index in range(40):
        sample = task.sample(index, "train")
        for match in re.finditer(r"\d+| ?[a-z]+|[^a-z0-9]", sample.response):
            before, after = sample.response[: match.start()], sample.response[match.end() :]
            text = match.group()
            wrongs = [str(int(text) + 1), f"0{text}"] if text.isdigit() else ["", text * 2]
            for wrong in wrongs:
                verdict = task.check(sample.prompt, before + wrong + after)
                assert not verdict.correct and verdict.first_bad_step is not None, before + wrong + after
            assert not task.check(sample.prompt, before).correct
        for extra in (" ", ";", "0", "\n#### 1"):
            assert not task.check(sample.prompt, sample.response + extra).correct


@pytest.mark.parametrize("level", LEVELS)
def test_every_wrong_variable_is_rejected(level):
    task = TASKS.get("trace")(level=level)
    for index in range(40):
        sample = task.sample(index, "train")
        for match in re.finditer(r"\b[a-z]\b", sample.response):
            for other in {"a", "b", "x", "z"} - {match.group()}:
                changed = sample.response[: match.start()] + other + sample.response[match.end() :]
                assert not task.check(sample.prompt, changed).correct, changed


def test_the_newest_assignment_counts():
    prompt = "x=25; a=9\nx=x-a; a=x*2; x=a+a; a=x-3; print a"
    right = "x=25-9=16; set a to 16*2=32; now 32+32=64 in x; a becomes 64-3=61; #### 61"
    assert check_trace(prompt, right).correct
    stale = check_trace(prompt, right.replace("16*2=32", "25*2=50"))
    assert (stale.correct, stale.first_bad_step, stale.final_answer_correct) == (False, 1, True)
    assert check_trace(prompt, right.replace("#### 61", "#### 64")).first_bad_step == 4


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "x=2; a=9",
        "x=2; a=9\nprint x",
        "x=2; a=9\nx=x-a; print x",
        "x=2; a=9\nb=x+a; print x",
        "x=2; x=9\nx=x+1; print x",
        "x=2; a=9\nx=x+1; print b",
        "x=2; a=9\nx=x/1; print x",
    ],
)
def test_program_that_does_not_run_is_no_success(prompt):
    verdict = check_trace(prompt, "x=2+1=3; #### 3")
    assert not verdict.correct and verdict.reason.startswith("prompt: ")


def test_checker_catches_a_planted_generator_fault(monkeypatch):
    monkeypatch.setattr(trace, "_apply", lambda left, sign, right: left + right)
    task = TASKS.get("trace")(level="long")
    samples = [task.sample(index, "train") for index in range(40)]
    assert sum(not task.check(sample.prompt, sample.response).correct for sample in samples) > 20


def test_without_paraphrases_the_answer_is_determined_and_with_them_uniform():
    forms = Counter()
    for index in range(800):
        response = TASKS.get("trace")(level="p4").sample(index, "train").response
        for step in response.split("; ")[:-1]:
            forms[next((word for word in ("becomes", "now", "set") if word in step), "plain")] += 1
        plain = TASKS.get("trace")(level="short").sample(index, "train").response
        assert re.fullmatch(r"([a-z]=\d+[-+*]\d+=\d+; )+#### \d+", plain)
    expected = sum(forms.values()) / 4
    assert len(forms) == 4 and sum((count - expected) ** 2 / expected for count in forms.values()) < 25.9


def test_bad_configuration_is_refused():
    with pytest.raises(UserError, match="min_variables") as caught:
        TASKS.get("trace")(level="short", min_variables=1)
    assert caught.value.code == "IDLM-0222"
