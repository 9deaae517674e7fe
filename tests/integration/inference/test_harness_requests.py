"""What a harness asks of an engine: texts up to a stop string, log-likelihoods. With lm-eval installed, also
its own tasks."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import run_evaluation
from idlm.infer.evaluation.lm_eval_run import ArmResult, scores_of, table
from idlm.infer.evaluation.requests import DEFAULT_MAX_TOKENS, EngineRequests
from tests.errors import refused
from tests.integration.inference.command_lines import ISD, MODEL, PROMPTS, read_lines, reference
from tests.margins import assert_gap

GREEDY = SamplingParams(temperature=0)
NO_LM_EVAL = importlib.util.find_spec("lm_eval") is None
needs_lm_eval = pytest.mark.skipif(NO_LM_EVAL, reason="lm-eval (extra eval) is not installed: 25 s of CI")


def _requests(**settings: Any) -> EngineRequests:
    return EngineRequests(reference(), SamplingParams(temperature=0, **settings))


def test_texts_end_before_a_stop_string_of_the_task_and_of_the_caller() -> None:
    whole = _requests(max_tokens=12).generate_until([(text, {}) for text in PROMPTS[:3]])
    assert all(whole)
    words = whole[0].split()
    sent = _requests(max_tokens=12, stop=("no such text",))
    cut = sent.generate_until([(PROMPTS[0], {"until": [words[1], ""], "do_sample": True})])
    assert cut == [whole[0][: whole[0].index(words[1])]]
    assert [done.finish_reason for done in sent.completions] == ["stop"]
    assert sent.generate_until([(PROMPTS[0], {"until": words[1]})]) == cut
    assert len(sent.completions) == 2


def test_the_caller_says_the_length_before_the_task() -> None:
    lengths = []
    for settings, given in (({}, {"max_gen_toks": 3}), ({"max_tokens": 2}, {"max_gen_toks": 3})):
        sent = _requests(ignore_eos=True, **settings)
        sent.generate_until([(PROMPTS[0], given)])
        lengths.append(len(sent.completions[0].token_ids))
    assert lengths == [3, 2]
    [line] = [_requests()._settings(0, {})]
    assert line.max_tokens == DEFAULT_MAX_TOKENS


def test_thinking_is_removed_and_seeds_are_those_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = EngineRequests(reference(), SamplingParams(temperature=1, seed=2**63 - 1, max_tokens=2))
    sent.generate_until([(text, {}) for text in PROMPTS[:2]])
    assert [done.seed for done in sent.completions] == [2**63 - 1, 0]
    run = EngineRequests._run

    def thinking(requests: EngineRequests, lines: Any) -> Any:
        for done in run(requests, lines):
            yield dataclasses.replace(done, text=f"<think>{done.text}</think>ok")

    monkeypatch.setattr(EngineRequests, "_run", thinking)
    assert sent.generate_until([(PROMPTS[0], {})]) == ["ok"]


def test_likelihood_of_what_greedy_decoding_writes() -> None:
    """The sum of the log-probabilities that decoding reports; another last token is not greedy."""
    sent = _requests()
    contexts = [sent.encode(text) for text in PROMPTS[:4]]
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
    answers = reference().generate(contexts, params)
    for done in answers:
        for each in done.logprobs or ():
            assert_gap(list(each.top.values()))
    pairs = [(context, done.token_ids) for context, done in zip(contexts, answers, strict=True)]
    for (value, is_greedy), done in zip(sent.loglikelihood(pairs), answers, strict=True):
        assert done.logprobs is not None
        assert value == pytest.approx(sum(each.logprob for each in done.logprobs), abs=1e-4)
        assert is_greedy
    assert answers[0].logprobs is not None
    other = next(token for token in answers[0].logprobs[-1].top if token != answers[0].token_ids[-1])
    [(worse, is_greedy)] = sent.loglikelihood([(contexts[0], (*answers[0].token_ids[:-1], other))])
    assert not is_greedy
    expected = sum(each.logprob for each in answers[0].logprobs[:-1]) + answers[0].logprobs[-1].top[other]
    assert worse == pytest.approx(expected, abs=1e-4)


def test_a_context_that_is_too_long_loses_its_beginning() -> None:
    sent, longest = _requests(), reference().table.max_length - 1
    context = sent.encode(" ".join(PROMPTS * 9))
    assert len(context) > longest
    end = context[-2:]
    kept = context[: len(context) - 2][-(longest - 2) :]
    with pytest.warns(UserWarning, match="1 of 2 contexts lose their beginning: max_length=160"):
        cut, whole = sent.loglikelihood([(context[:-2], end), (kept, end)])
    assert cut == whole
    assert sent.loglikelihood([(kept, [])]) == [(0.0, True)]


def test_the_context_of_an_answer_keeps_the_room_for_it() -> None:
    text = " ".join(PROMPTS * 9)
    sent, ids = _requests(ignore_eos=True), reference().tokenizer(text)["input_ids"]
    with pytest.warns(UserWarning, match="1 of 2 contexts lose their beginning: max_length=160"):
        answers = sent.generate_until([(text, {"max_new_tokens": 8}), (PROMPTS[0], {"max_tokens": 300})])
    assert [(done.num_prompt_tokens, len(done.token_ids)) for done in sent.completions] == [
        (152, 8),
        (num := len(sent.encode(PROMPTS[0])), 160 - num),
    ]
    [kept] = reference().generate([ids[-152:]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert answers[0] == kept.text


def test_a_text_that_spells_its_beginning_gets_no_second_one() -> None:
    sent, bos = _requests(), reference().tokenizer.bos_token
    assert sent.encode(bos + PROMPTS[0]) == sent.encode(PROMPTS[0])
    assert sent.encode(PROMPTS[0])[0] == reference().tokenizer.bos_token_id
    assert sent.encode(PROMPTS[0] + bos).count(reference().tokenizer.bos_token_id) == 2


def _sample(doc_id: int, score: Any, kept: str = "none") -> dict[str, Any]:
    return {"doc_id": doc_id, "filter": kept, "metrics": ["acc", "words"], "acc": score, "words": [True]}


def test_the_table_pairs_problems_by_their_number() -> None:
    ar = ArmResult([_sample(0, 1.0), _sample(1, 0.0)], {"acc,none": 0.5, "acc_stderr,none": 0.1}, [], 1.0)
    isd = ArmResult([_sample(1, True), _sample(0, True)], {"acc,none": 1.0, "alias": "x"}, [], 1.0)
    assert scores_of(isd.samples) == {("acc", "none"): [1.0, 1.0]}
    lines = table({"ar": ar, "isd": isd}).splitlines()
    assert lines[1].split() == ["ar", "acc,none", "0.500", "0.095-0.905"]
    assert lines[3].startswith("isd - ar: +0.500 in acc,none, 95% interval ")
    assert len(lines) == 4


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "idlm.infer.evaluation.lm_eval_model", raising=False)
    monkeypatch.setattr(Engine, "from_pretrained", None)
    with pytest.raises(UserError, match="IDLM-0486: .*lm_eval") as caught:
        run_evaluation([*MODEL, "harness=lm_eval", "task=gsm8k", f"data={tmp_path}/x"])
    assert "[eval]" in caught.value.fix


@needs_lm_eval
@pytest.mark.parametrize(
    ("task", "record", "words"),
    [
        ("gsm8", {"question": "a", "answer": "#### 1"}, "did you mean 'gsm8k'"),
        ("gsm8k", {"problem": "a"}, "question"),
        ("humaneval", {"prompt": "a"}, "without a sandbox"),
    ],
)
def test_lm_eval_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, record: dict[str, str], words: str
) -> None:
    monkeypatch.setattr(Engine, "from_pretrained", None)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(record) + "\n")
    error = refused("IDLM-0487", run_evaluation, [*MODEL, "harness=lm_eval", f"task={task}", f"data={data}"])
    assert words in error.message


@needs_lm_eval
def test_data_of_nltk_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ifeval")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(Engine, "from_pretrained", None)
    data = tmp_path / "data.jsonl"
    record = {"key": 1, "prompt": "a", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    data.write_text(json.dumps(record) + "\n")
    with pytest.raises(UserError, match="IDLM-0487: .*punkt_tab") as caught:
        run_evaluation([*MODEL, "harness=lm_eval", "task=ifeval", f"data={data}"])
    assert "python -m nltk.downloader punkt_tab" in caught.value.fix


@needs_lm_eval
def test_mmlu_is_all_subjects_of_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subjects = ["anatomy", "astronomy", "anatomy"]
    records = [
        {"question": f"{subject} {index}?", "subject": subject, "choices": [*"1234"], "answer": index}
        for index, subject in enumerate(subjects)
    ]
    data, output = tmp_path / "all.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = [*MODEL, "decoder=ar", "baseline=null", "harness=lm_eval", "task=mmlu", f"data={data}"]
    assert run_evaluation([*arguments, f"output={output}", "chat_template=none"]) == 0
    found = read_lines(output)
    assert [record["doc"]["question"] for record in found] == ["anatomy 0?", "anatomy 2?", "astronomy 1?"]
    assert [record["doc_id"] for record in found] == [0, 1, 2]
    accuracy = sum(record["acc"] for record in found) / 3
    assert f"acc,none {accuracy:>30.3f}".split() == capsys.readouterr().out.splitlines()[1].split()[1:3]
    examples = tmp_path / "dev.jsonl"
    examples.write_text(json.dumps(records[0]) + "\n")
    with pytest.raises(UserError, match="IDLM-0487: .*no examples of astronomy"):
        run_evaluation([*arguments, f"fewshot_data={examples}", "num_fewshot=1"])
    examples.write_text(json.dumps({"question": "a"}) + "\n")
    with pytest.raises(UserError, match="IDLM-0487: .*not a file of MMLU's problems"):
        run_evaluation([*arguments, f"fewshot_data={examples}", "num_fewshot=1"])


@needs_lm_eval
def test_tasks_of_lm_eval_run_with_both_decoders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    lines = [{"question": text, "answer": f"#### {number}"} for number, text in enumerate(PROMPTS[:3])]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [*MODEL, *ISD, "harness=lm_eval", f"data={data}", "sampling.temperature=0"]
    with pytest.warns(UserWarning, match="stride 4"):
        done = run_evaluation([*arguments, "task=gsm8k", "sampling.max_tokens=5", f"output={output}"])
    assert done == 0
    out = capsys.readouterr().out
    assert "isd - ar: +0.000 in exact_match,strict-match" in out
    records = read_lines(output)
    assert {record["decoder"] for record in records} == {"ar", "isd"}
    assert len(records) == 2 * 2 * 3
    texts = {record["decoder"]: record["resps"] for record in records if record["doc_id"] == 0}
    assert texts["ar"] == texts["isd"]


@needs_lm_eval
def test_multiple_choice_and_perplexity_of_lm_eval(tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance

    from idlm.infer.evaluation.lm_eval_model import EngineLM

    sent = _requests()
    model = EngineLM(sent)
    pair = (PROMPTS[0], " Lea has 5.")
    [(value, _)] = model.loglikelihood([Instance("loglikelihood", {}, pair, 0)], disable_tqdm=True)
    whole, context = sent.encode(PROMPTS[0] + pair[1]), sent.encode(PROMPTS[0])
    assert value == pytest.approx(sent.loglikelihood([(context, whole[len(context) :])])[0][0], abs=1e-4)
    texts = [" ".join(PROMPTS[:2]), " ".join(PROMPTS * 9)]
    windows = model.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    )
    ids = sent.encode(texts[0], add_special_tokens=False)
    assert windows[0] == pytest.approx(sent.loglikelihood([([model.prefix_token_id], ids)])[0][0], abs=1e-3)
    assert windows[1] < windows[0] < 0
