"""Recall: the checker looks keys up in the prompt, contexts have their exact length, early samples are
easy."""

from __future__ import annotations

import re

import pytest

from idlm.errors import UserError
from idlm.tasks import TASKS, recall
from idlm.tasks.recall_check import check_recall, queried_pairs
from idlm.tasks.tokenizer import vocabulary
from tests.unit.task_encoder import TaskEncoder
from tests.unit.tasks.skeletons import split_of


@pytest.mark.parametrize(("level", "num"), [("tiny", 400), ("long", 20)])
def test_checker_accepts_generated_samples(level, num):
    task = TASKS.get("recall")(level=level)
    for index in range(num):
        sample = task.sample(index, "train")
        verdict = task.check(sample.prompt, sample.response)
        assert verdict.correct and verdict.final_answer_correct and verdict.first_bad_step is None, verdict


def test_every_single_slip_is_rejected():
    task = TASKS.get("recall")(level="tiny")
    for index in range(20):
        sample = task.sample(index, "train")
        for match in re.finditer(r" ?[a-z]+|[:.]", sample.response):
            before, after = sample.response[: match.start()], sample.response[match.end() :]
            for wrong in ("", match.group() * 2, " qq", " so so"):
                verdict = task.check(sample.prompt, before + wrong + after)
                assert not verdict.correct and verdict.first_bad_step is not None, before + wrong + after
        for extra in (" ", ".", " ba q."):
            assert not task.check(sample.prompt, sample.response + extra).correct


def test_needles_are_looked_up_whatever_is_around_them():
    prompt = " Lea now finds shells. baq. Tom sells nuts. dux. kaq. du? ba?"
    assert queried_pairs(prompt) == [("du", "x"), ("ba", "q")]
    assert check_recall(prompt, ": du x ba q.").correct
    wrong = check_recall(prompt, ": du q ba q.")
    assert (wrong.first_bad_step, wrong.final_answer_correct) == (0, True)


@pytest.mark.parametrize(
    "prompt", ["", " baq.", " baq. bax. ba?", " baq. du?", " baq. ba? dux.", " baq. Lea finds. ba?"]
)
def test_prompt_without_an_answer_is_no_success(prompt):
    verdict = check_recall(prompt, ": ba q.")
    assert not verdict.correct and verdict.reason.startswith("prompt: ")


@pytest.mark.parametrize("context", [128, 1000, 1025, 1026, 1027, 2048])
def test_a_context_has_its_exact_length(context):
    task = TASKS.get("recall")(level="long", min_context=context, max_context=context, min_records=14)
    encoder = TaskEncoder(vocabulary("recall"))
    for index in range(4):
        sample = task.sample(index, "train")
        prompt_ids, response_ids = encoder.encode_sample(sample)
        assert (len(prompt_ids), len(response_ids)) == (context, 31)
        asked = [key for key, _ in queried_pairs(sample.prompt)]
        assert len(set(asked)) == len(asked) == 14


def test_the_split_depends_on_neither_keys_nor_filler():
    task = TASKS.get("recall")(level="tiny")
    other = dict(zip(recall.KEYS, reversed(recall.KEYS), strict=True))
    for split in ("train", "validation", "test"):
        for index in range(8):
            prompt = task.sample(index, split).prompt
            assert split_of("recall", prompt) == split
            renamed = re.sub(r" ([a-z]{2})(?=[a-z]?[.?])", lambda match: f" {other[match.group(1)]}", prompt)
            assert renamed != prompt and split_of("recall", renamed) == split
            assert split_of("recall", f" Ben gets pens.{prompt}") == split


def test_limits_rise_with_the_samples_of_train():
    task = TASKS.get("recall")(level="long", ramp=1000)
    limits = [task.limited(index).config for index in range(1001)]
    contexts = [limit.max_context for limit in limits]
    assert contexts == sorted(contexts) and len(set(contexts)) == 8
    assert contexts[0] == 117 and limits[0].max_records == 3 and contexts[-1] == 8192
    assert contexts.count(117) == contexts.count(4466) == 125
    whole = TASKS.get("recall")(level="long")
    assert task.limited(1000) is task and whole.limited(0) is whole
    assert len(task.sample(0, "train").prompt) < 800


@pytest.mark.parametrize(
    ("knobs", "named"),
    [({"min_records": 0}, "min_records"), ({"max_records": 65}, "64"), ({"asked": 40}, "min_context")],
)
def test_bad_configuration_is_refused(knobs, named):
    with pytest.raises(UserError, match=named) as caught:
        TASKS.get("recall")(level="tiny", **knobs)
    assert caught.value.code == "IDLM-0222"
