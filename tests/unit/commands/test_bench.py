"""Loads, figures and the parity gate of `idlm-bench`, and what its options mean."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import read_arguments
from idlm.infer.clients.arms import Greedy, check_parity
from idlm.infer.clients.bench import bench, make_loads
from idlm.infer.clients.config import BenchConfig, ChatConfig
from idlm.infer.clients.http import sampling_fields
from idlm.infer.clients.loads import Job, Load, Record, aggregate, load_prompts
from tests.errors import refused

GENAI_BENCH = {
    *("scenario", "num_concurrency", "batch_size", "iteration_type", "run_duration", "requests_per_second"),
    *(f"mean_{name}_throughput_tokens_per_s" for name in ("output", "input", "total_tokens")),
    *("error_codes_frequency", "error_rate", "num_error_requests", "num_completed_requests", "num_requests"),
    "stats",
}
"""Fields of `aggregated_metrics` in a result of genai-bench 0.0.5."""


def test_figures_have_the_names_and_formulas_of_genai_bench() -> None:
    good = Record(
        1.0, times=[1.5, 2.0, 3.0], end=3.0, num_input_tokens=10, num_output_tokens=7, num_forwards=4
    )
    good.num_accepted, good.num_tested = 3, 6
    single = Record(2.0, times=[2.5], end=2.5, num_input_tokens=5, num_output_tokens=1)
    bad = Record(2.0, end=6.0, error="status 429: wait", error_code=429)
    row = aggregate([good, single, bad], Load("mixed", [], concurrency=2))
    assert set(row) >= GENAI_BENCH
    assert row["run_duration"] == 5.0
    assert row["mean_output_throughput_tokens_per_s"] == pytest.approx(8 / 5)
    assert row["mean_total_tokens_throughput_tokens_per_s"] == pytest.approx(23 / 5)
    assert (row["num_requests"], row["num_completed_requests"], row["num_error_requests"]) == (3, 2, 1)
    assert row["error_codes_frequency"] == {"429": 1} and row["first_error"] == "status 429: wait"
    stats = row["stats"]
    assert (stats["ttft"]["min"], stats["ttft"]["max"]) == (0.5, 0.5)
    assert stats["tpot"]["sum"] == pytest.approx(1.5 / 6), "one token has no time between tokens"
    assert stats["output_inference_speed"]["sum"] == pytest.approx(4)
    assert (stats["itl"]["min"], stats["itl"]["max"]) == (0.5, 1.0)
    # The server of `single` counts no passes.
    assert row["tokens_per_forward"] == pytest.approx(7 / 4) and row["acceptance_rate"] == 0.5


def test_loads_of_the_options() -> None:
    words = [
        "model=x",
        "load=fixed",
        "input_tokens=3",
        "output_tokens=5",
        "concurrency=[1,20]",
        "vocab_size=9",
    ]
    config, _ = read_arguments("bench", BenchConfig, words)
    one, many = make_loads(config)
    assert (one.scenario, one.concurrency, len(one.jobs), len(many.jobs)) == ("D(3,5)", 1, 16, 40)
    assert all(len(job.prompt) == 3 and job.params.max_tokens == 5 for job in many.jobs)
    assert {token for job in many.jobs for token in job.prompt} <= {*range(3, 9)}
    assert [job.prompt for job in one.jobs] != [job.prompt for job in many.jobs[:16]], "prefix caches"
    config, _ = read_arguments("bench", BenchConfig, [*words, "rate=[50]", "endpoint=chat"])
    [opened] = make_loads(config)
    assert opened.concurrency is None and isinstance(opened.jobs[0].prompt, str)
    assert len(opened.jobs[0].prompt.split()) == 3
    assert list(opened.arrivals) == sorted(opened.arrivals) and opened.arrivals[0] == 0


def test_prompts_of_a_file_a_task_and_the_list(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    path.write_text(json.dumps({"messages": turns, "source": "x"}) + '\n{"prompt": "a"}\n')
    assert load_prompts(str(path)) == [turns[:1], "a"]
    path.write_text(" one \n\ntwo\n")
    assert load_prompts(str(path)) == ["one", "two"]
    assert len({*load_prompts("text")}) >= 16 and "How many" in load_prompts("ledger")[0]
    config, _ = read_arguments("bench", BenchConfig, ["model=x", f"prompts={path}", "concurrency=[1,2]"])
    one = make_loads(config)[0]
    assert {job.prompt for job in one.jobs} == {"one", "two"} and one.scenario == "prompts"
    assert not one.jobs[0].params.ignore_eos, "answers end where they end"
    for text, output in (
        ("", "no file with prompts"),
        ('{"prompt": "a", "sampling": {"n": 2}}', "sampling settings"),
    ):
        path.write_text(text)
        refused(f"IDLM-0706.*{output}", load_prompts, str(path))
    refused(r"prompts=nothing is no file with prompts\n.*ledger", load_prompts, "nothing")


def test_what_comes_beside_a_load_has_other_prompts() -> None:
    params = SamplingParams()
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "abc"}]
    backwards = [turns[0], {"role": "user", "content": "cb"}]
    for prompt, expected in (("abc", "cb"), ([1, 2, 3], [3, 2]), (turns, backwards)):
        assert Job(prompt, params).backwards(params, 2).prompt == expected
    assert [Job(prompt, params).turns for prompt in (turns, "a", [1])] == [turns, [], []]


def test_the_gate_refuses_another_choice_but_for_rounding() -> None:
    first = [Greedy((5, 6, 7), (1.0, 0.01, 1.0)), Greedy((8,), (2.0,))]
    assert check_parity(first, first, rounding=1e-3) == 4
    near = [Greedy((5, 9, 9), (1.0, 1.0, 1.0)), first[1]]
    assert check_parity(first, near, rounding=0.1) == 2
    for other in (near, [Greedy((5, 6, 9), (1.0,) * 3), first[1]], [Greedy((5,), (1.0,)), first[1]]):
        refused("IDLM-0711", check_parity, first, other, rounding=1e-3)


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        ([], "IDLM-0438", "url=http"),
        (["model=x", "concurrency=0,1"], "IDLM-0101", "concurrency=0"),
        (["model=x", "rate=0"], "IDLM-0101", "rate=0"),
        (["model=x", "concurrency=[]"], "IDLM-0101", "no load"),
        (["model=x", "num_requests=0", "scale=0"], "IDLM-0101", "scale=0"),
        (["url=http://127.0.0.1:1", "device=cpu"], "IDLM-0710", "device"),
        (["url=http://127.0.0.1:1", "decoder.stride=3"], "IDLM-0710", "decoder"),
        (["url=http://127.0.0.1:1"], "IDLM-0707", "idlm-serve"),
        (["url=127.0.0.1:1"], "IDLM-0707", "http://HOST"),
        (["model=x", "plot=there/is/none.png"], "IDLM-0442", "plot="),
        (["model=x", "plot=figure"], "IDLM-0442", ".svg"),
        (["model=x", "overwrite=true"], "IDLM-0439", "output="),
    ],
)
def test_mistakes_are_named(words: list[str], code: str, output: str) -> None:
    error = refused(code, bench, [*words])
    assert output in str(error)


def test_a_request_names_what_is_not_the_default() -> None:
    assert sampling_fields(SamplingParams()) == {}
    params = SamplingParams(temperature=0, max_tokens=3, stop=("a",), logprobs=2, n=2)
    assert sampling_fields(params) == {"temperature": 0, "max_tokens": 3, "stop": ("a",)}
    assert sampling_fields(SamplingParams(), {"temperature"}) == {"temperature": 1.0}


def test_a_server_needs_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "idlm.infer.clients.http")
    refused("IDLM-0704", bench, ["url=http://127.0.0.1:1"])


@pytest.mark.parametrize("word", ["sampling.n=2", "chat_template=none"])
def test_a_chat_has_one_answer_and_a_template(word: str) -> None:
    with pytest.raises(UserError, match="a chat (has one answer|needs the chat template)"):
        read_arguments("chat", ChatConfig, ["model=x", word])
