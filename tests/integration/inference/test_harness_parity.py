"""Tasks of lm-eval by log-likelihood: the engine gives what lm-eval's own backend for transformers gives."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from idlm.infer.evaluation.requests import EngineRequests
from tests.margins import MARGIN
from tests.small_tokenizers import TEXTS
from tests.toy import write_spelling_toy

NO_LM_EVAL = importlib.util.find_spec("lm_eval") is None
pytestmark = pytest.mark.skipif(NO_LM_EVAL, reason="lm-eval (extra eval) is not installed: 25 s of CI")
NUM, CONTEXT, NUM_NEW = 200, 192, 24
MAX_GAP = 1e-3
"""Of a log-likelihood in nats, which is a sum over tokens in float32."""
Problem = tuple[str, list[str], int]


def _problem(draw: random.Random) -> Problem:
    """A question, four answers, and the place of the right one. Some questions are longer than the context;
    some answers are equal, begin with a space, or are a part of a character."""
    words = " ".join([*TEXTS, "Mia has 12 nuts , she's counting\u2026 and"]).split(" ")
    num = draw.choice([1, 1, 3, 3, 8, draw.choice([3, 30])])
    question = (
        draw.choice(["", " "]) + " ".join(draw.choices(words, k=num)) + draw.choice(["", "?", " ", "\n"])
    )
    answers = [" ".join(draw.choices(words, k=draw.randint(1, 4))) or "-" for _ in range(4)]
    if draw.random() < 0.2:
        answers[draw.randrange(3)] = answers[3]
    if draw.random() < 0.2:
        answers[draw.randrange(4)] = "  a" + draw.choice(["", "\u0301", "\n"])
    return question, answers, draw.randrange(4)


def _piqa(question: str, answers: list[str], right: int) -> dict[str, Any]:
    return {"goal": question, "sol1": answers[0], "sol2": answers[right or 1], "label": int(right > 0)}


def _lambada(question: str, answers: list[str], right: int) -> dict[str, Any]:
    return {"text": f"{question} The answer is {answers[right].strip().split(' ')[-1]}"}


def _mmlu(question: str, answers: list[str], right: int) -> dict[str, Any]:
    return {"question": question, "choices": answers, "answer": right, "subject": "elementary_mathematics"}


def _gsm8k(question: str, answers: list[str], right: int) -> dict[str, Any]:
    return {"question": question, "answer": f"{answers[0]} #### {right}"}


TASKS: dict[str, Callable[[str, list[str], int], dict[str, Any]]] = {
    "piqa": _piqa,
    "gsm8k": _gsm8k,
    "lambada_openai": _lambada,
    "mmlu_elementary_mathematics": _mmlu,
}
NUM_FEWSHOT = {"piqa": 1, "mmlu_elementary_mathematics": 2, "gsm8k": 1}


def _write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Random weights whose tokens spell any text, many of them parts of a character."""
    toy = write_spelling_toy(tmp_path_factory.mktemp("toy"))
    return Engine.from_pretrained(
        toy, "ar", device="cpu", dtype="float32", max_num_seqs=4, max_length=CONTEXT
    )


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize(
    ("num", "name", "is_chat"),
    [(12, "piqa", False), (12, "gsm8k", False), *product([NUM], TASKS, [False, True])],
)
@pytest.mark.filterwarnings("ignore:.*lose their beginning")
def test_answers_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine, num: int, name: str, is_chat: bool
) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from idlm.infer.evaluation.lm_eval_model import ProblemFiles, local_task

    draw = random.Random(f"{name} {num}")
    make = TASKS[name]
    files = ProblemFiles(_write(tmp_path / "test.jsonl", [make(*_problem(draw)) for _ in range(num)]))
    if name in NUM_FEWSHOT:
        examples = _write(tmp_path / "dev.jsonl", [make(*_problem(draw)) for _ in range(5)])
        files = dataclasses.replace(files, fewshot_data=examples, num_fewshot=NUM_FEWSHOT[name])
    task = local_task(name, files, str(tmp_path))
    params = SamplingParams(temperature=0, logprobs=2, max_tokens=NUM_NEW)
    sent = EngineRequests(engine, params, is_chat=is_chat)
    ours = task.run(sent, None)
    # The engine keeps room for one more token, and feeds the last one that is scored.
    longest = CONTEXT if name == "gsm8k" else CONTEXT - 2
    monkeypatch.setattr(HFLM, "max_gen_toks", NUM_NEW)
    theirs = lm_eval.simple_evaluate(
        model=HFLM(
            pretrained=str(engine.model.directory),
            dtype="float32",
            device="cpu",
            batch_size=4,
            max_length=longest,
        ),
        tasks=[task.paths[name]],
        bootstrap_iters=0,
        apply_chat_template=is_chat,
        task_manager=TaskManager(include_defaults=False),
    )
    mine, others = (sorted(each["samples"][name], key=_order) for each in (ours, theirs))
    assert [sample["arguments"] for sample in mine] == [sample["arguments"] for sample in others]
    compare = _same_text if name == "gsm8k" else _same_likelihoods
    num_clear = sum(compare(*pair, sent) for pair in zip(mine, others, strict=True))
    assert num_clear > 0.9 * len(mine)


def _order(sample: dict[str, Any]) -> tuple[str, int]:
    return sample["filter"], sample["doc_id"]


def _same_likelihoods(mine: dict[str, Any], other: dict[str, Any], sent: EngineRequests) -> bool:
    """Whether the right answer is clear of rounding; equal answers are."""
    scores = [value for value, _ in mine["filtered_resps"]]
    for (value, is_greedy), (expected, is_best) in zip(
        mine["filtered_resps"], other["filtered_resps"], strict=True
    ):
        assert abs(value - expected) < MAX_GAP and is_greedy == is_best
    first, *others = sorted(scores, reverse=True)
    if any(0 < first - score < 2 * MAX_GAP for score in others):
        return False
    assert mine["acc"] == other["acc"]
    return True


def _same_text(mine: dict[str, Any], other: dict[str, Any], sent: EngineRequests) -> bool:
    """Whether the text is clear of rounding."""
    for each in sent.completions[mine["doc_id"]].logprobs or ():
        first, second = sorted(each.top.values(), reverse=True)
        if first - second < MARGIN:
            return False
    assert mine["resps"] == other["resps"]
    return True
