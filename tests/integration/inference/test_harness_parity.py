"""Tasks of lm-eval by log-likelihood: the engine gives what lm-eval's own backend for transformers gives."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.infer.evaluation.requests import EngineRequests
from tests.integration.inference.command_lines import TINY, reference

NO_LM_EVAL = importlib.util.find_spec("lm_eval") is None
pytestmark = pytest.mark.skipif(NO_LM_EVAL, reason="lm-eval (extra eval) is not installed: 25 s of CI")
NUM = 40
MAX_GAP = 1e-3
"""Of a log-likelihood in nats, which is a sum over tokens in float32."""


def _problem(draw: random.Random) -> tuple[str, list[str], int]:
    """A question, four answers, and the place of the right one."""
    name, thing = draw.choice(["Mia", "Tom", "Lea"]), draw.choice(["nuts", "pens", "cups"])
    some, more = draw.randint(2, 9), draw.randint(1, 5)
    answers = [f"{some + more + each} {thing}" for each in (0, 1, 2, 5)]
    right = answers[0]
    draw.shuffle(answers)
    question = f"{name} has {some} {thing}. {name} finds {more}. How many {thing} does {name} have?"
    return question, answers, answers.index(right)


def _arc(question: str, answers: list[str], right: int) -> dict[str, Any]:
    return {
        "question": question,
        "choices": {"text": answers, "label": [*"ABCD"]},
        "answerKey": "ABCD"[right],
    }


def _hellaswag(question: str, answers: list[str], right: int) -> dict[str, Any]:
    endings = [f"counts {answer}. [title] Then it rests." for answer in answers]
    texts = {"activity_label": "Counting", "ctx_a": question, "ctx_b": "the squirrel"}
    return {**texts, "endings": endings, "label": str(right)}


def _piqa(question: str, answers: list[str], right: int) -> dict[str, Any]:
    return {"goal": question, "sol1": answers[0], "sol2": answers[right or 1], "label": int(right > 0)}


def _lambada(question: str, answers: list[str], right: int) -> dict[str, Any]:
    return {"text": f"{question} The answer is {answers[right]}"}


def _mmlu(question: str, answers: list[str], right: int) -> dict[str, Any]:
    return {"question": question, "choices": answers, "answer": right, "subject": "elementary_mathematics"}


TASKS: dict[str, Callable[[str, list[str], int], dict[str, Any]]] = {
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "lambada_openai": _lambada,
    "mmlu_elementary_mathematics": _mmlu,
}


def _write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.sweep
@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("name", TASKS)
def test_log_likelihoods_are_those_of_transformers(tmp_path: Path, name: str, is_chat: bool) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from idlm.infer.evaluation.lm_eval_model import ProblemFiles, local_task

    draw = random.Random(name)
    records = [TASKS[name](*_problem(draw)) for _ in range(NUM)]
    files = ProblemFiles(_write(tmp_path / "test.jsonl", records))
    if name == "piqa":
        files = dataclasses.replace(
            files, fewshot_data=_write(tmp_path / "dev.jsonl", records[:3]), num_fewshot=1
        )
    task = local_task(name, files, str(tmp_path))
    asked = EngineRequests(reference(), SamplingParams(temperature=0), is_chat=is_chat)
    ours = task.run(asked, None)
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(TINY), dtype="float32", device="cpu", batch_size=4),
        tasks=[task.paths[name]],
        bootstrap_iters=0,
        apply_chat_template=is_chat,
        task_manager=TaskManager(include_defaults=False),
    )
    pairs = list(zip(ours["samples"][name], theirs["samples"][name], strict=True))
    assert len(pairs) == NUM
    num_clear = 0
    for mine, other in pairs:
        assert mine["arguments"] == other["arguments"]
        for (value, is_greedy), (expected, is_best) in zip(
            mine["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert abs(value - expected) < MAX_GAP and is_greedy == is_best
        first, *others = sorted((value for value, _ in mine["filtered_resps"]), reverse=True)
        if not others or first - others[0] > 2 * MAX_GAP:
            assert mine["acc"] == other["acc"]
            num_clear += 1
    # The letters of MMLU are no tokens of this model, so that all are equally likely.
    assert num_clear > NUM // 2 or name.startswith("mmlu")
