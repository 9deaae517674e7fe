"""Inputs and outputs of the engine: refusals by code and words, log-probabilities, seeds, streams."""

from __future__ import annotations

import math
import reprlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from idlm.contracts import Constraint, SamplingParams
from idlm.infer.engine import Engine
from idlm.semantics import Semantics
from idlm.tasks.tokenizer import save_tokenizer
from tests.errors import refused
from tests.toy import write_toy_checkpoint
from tests.unit.task_encoder import num_embedding_rows

MASK_ID, VOCAB = 47, 48
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_length": 64}
MESSAGE = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_toy_checkpoint(tmp_path_factory.mktemp("toy"))
    Semantics(mask_token_id=MASK_ID, stride=4).save(directory)
    return directory


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return Engine.from_pretrained(checkpoint, **OPTIONS)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine with the task tokenizer over a random model."""
    directory = tmp_path_factory.mktemp("speaking")
    num_ids = save_tokenizer(directory)
    write_toy_checkpoint(directory, vocab_size=num_embedding_rows(num_ids), sharpness=2.0)
    Semantics(mask_token_id=num_ids, stride=4).save(directory)
    return Engine.from_pretrained(directory, **OPTIONS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", True),
        ("top_p", -0.1),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("logprobs", -1),
        ("logprobs", 100_000),
        ("n", 0),
        ("n", 10**9),
        ("tau", -0.1),
        ("tau", math.nan),
        ("tau", 10**400),
        ("temperature", 10**400),
        ("stop", 5),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("decoder_options", ["threshold"]),
        ("decoder_options", None),
        ("decoder_options", {1: 0.5}),
        ("decoder_options", {"": 0.5}),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "much"),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", math.inf),
        ("logit_bias", {5: 101}),
        ("logit_bias", {5: -100.5}),
        ("logit_bias", {-5: 1.0}),
        ("logit_bias", {"five": 1.0}),
        ("logit_bias", {5: True}),
        ("logit_bias", [5, 6]),
        ("logit_bias", None),
        ("no_repeat_ngram_size", -1),
        ("no_repeat_ngram_size", 1.5),
        ("min_tokens", -1),
        ("min_tokens", True),
    ],
)
def test_sampling_settings_out_of_range_are_named(field: str, value: Any) -> None:
    error = refused("IDLM-0401", SamplingParams, **{field: value})
    assert f"{field}=" in error.message
    assert reprlib.repr(value) in error.message


@pytest.mark.parametrize(
    "given",
    [
        {"min_tokens": 5, "max_tokens": 4},
        {"logit_bias": dict.fromkeys(range(1025), 0.5)},
        {"no_repeat_ngram_size": 2, "constraint": Constraint(kind="json_object")},
    ],
    ids=lambda given: next(iter(given)),
)
def test_changes_of_logits_that_do_not_fit_the_others_are_refused(given: dict[str, Any]) -> None:
    error = refused("IDLM-0401", SamplingParams, **given)
    assert f"{next(iter(given))}=" in error.message
    assert len(error.message) < 200, "values of a thousand entries are not repeated"


def test_a_top_p_of_0_keeps_the_likeliest_token_alone(speaking: Engine) -> None:
    for decoder_options in ({}, {"stride": 1}):
        given = {"max_tokens": 8, "ignore_eos": True, "decoder_options": decoder_options}
        [greedy] = speaking.generate([[3, 5]], params=SamplingParams(temperature=0, **given))
        [drawn] = speaking.generate([[3, 5]], params=SamplingParams(temperature=1, top_p=0, seed=1, **given))
        assert drawn.token_ids == greedy.token_ids


def test_all_wrong_settings_are_named_at_once_and_edges_are_allowed() -> None:
    error = refused("IDLM-0401", SamplingParams, temperature=-1, top_p=2, n=0)
    assert all(f"{field}=" in error.message for field in ("temperature", "top_p", "n"))
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, seed=2**63 - 1, max_tokens=1, tau=0, logprobs=0)
    assert SamplingParams(stop="x").stop == ("x",)
    options = {"threshold": 0.5}
    params = SamplingParams(decoder_options=options)
    options["threshold"] = 0.6
    assert params.decoder_options == {"threshold": 0.5}
    assert hash(params) == hash(SamplingParams(decoder_options={"threshold": 0.5}))
    twice = {"05": 1, 5: 2, "five": 1}
    refused("IDLM-0401: logit_bias has 2 values for token 5\n", SamplingParams, logit_bias=twice)
    assert SamplingParams(logit_bias={"5": 1, 7: -100.0}).logit_bias == {5: 1, 7: -100.0}  # type: ignore[dict-item]
    assert SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-3).changes
    assert not SamplingParams(logit_bias={}, repetition_penalty=1, presence_penalty=0).changes
    assert SamplingParams(stop=None, stop_token_ids=7).stop_token_ids == (7,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "prompts", "params", "words"),
    [
        ("IDLM-0410", [[]], None, ("empty",)),
        ("IDLM-0411", [[1, VOCAB]], None, (str(VOCAB), "vocabulary")),
        ("IDLM-0411", [[-1]], None, ("-1",)),
        ("IDLM-0411", [[1]], SamplingParams(stop_token_ids=(3, VOCAB)), ("stop_token_ids [48]", "[0, 48)")),
        ("IDLM-0411", [[1]], SamplingParams(logprobs=VOCAB + 1), ("logprobs=49", "48 tokens")),
        ("IDLM-0421", [[1, "a"]], None, ("[1, 'a']", "list of token ids")),
        ("IDLM-0421", [b"text"], None, ("list of token ids",)),
        ("IDLM-0421", [[MESSAGE]], None, ("'role'", "encode_messages")),
        ("IDLM-0421", [MESSAGE], None, ("'role'", "encode_messages")),
        ("IDLM-0412", [[1] * 64], None, ("64 tokens", "context")),
        ("IDLM-0414", ["hello"], None, ("tokenizer",)),
        ("IDLM-0406", [[1]], SamplingParams(stop=("x",)), ("stop", "tokenizer")),
        ("IDLM-0421", [1, 2], None, ("not 1", "list of token ids")),
        ("IDLM-0407", "hello", None, ("'hello'", "generate([prompt]")),
        ("IDLM-0407", {"a": [1, 2]}, None, ("{'a': [1, 2]}", "a list of token ids")),
        ("IDLM-0407", None, None, ("prompts=None", "give a list")),
        ("IDLM-0454", [[1]], {"temperature": 0}, ("{'temperature': 0}", "SamplingParams")),
        ("IDLM-0454", [[1]], {}, ("{}",)),
        ("IDLM-0454", [[1], [2]], [SamplingParams(), 0.5], ("0.5",)),
        (
            "IDLM-0453",
            [[1], [2]],
            [SamplingParams(), SamplingParams(decoder_options={"stride": 2})],
            ("decoder_options.stride=2", "1 or the engine's stride, 4"),
        ),
        (
            "IDLM-0453",
            [[1], [2]],
            [SamplingParams(), SamplingParams(decoder_options={"adaptive": True})],
            ("decoder_options.adaptive", "decoder isd"),
        ),
        ("IDLM-0408", [[1], [2]], [SamplingParams()], ("2 prompts", "1 ")),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(
    engine: Engine, code: str, prompts: Any, params: Any, words: tuple[str, ...]
) -> None:
    error = refused(code, engine.generate, prompts, params)
    assert all(word in str(error) for word in words), str(error)
    assert not engine._active
    assert engine.step() == []


def test_prompts_may_be_a_generator_or_rows_of_an_array(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    given = [[1, 2], [3, 4]]
    expected = [answer.token_ids for answer in engine.generate(given, params)]
    found = engine.generate((prompt for prompt in given), (params for _ in given), request_ids=iter("ab"))
    assert [(one.request_id, one.token_ids) for one in found] == list(zip("ab", expected, strict=True))
    for rows in (np.array(given), torch.tensor(given)):
        assert [answer.token_ids for answer in engine.generate(rows, params)] == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [["hello"], [[1, 2], [3]], ("a", "b")], ids=str)
def test_a_stream_is_of_one_prompt(engine: Engine, prompts: Any) -> None:
    refused("IDLM-0421", engine.stream, prompts)
    assert not engine.has_work


def test_a_check_queues_nothing_and_refuses_what_adding_refuses(engine: Engine) -> None:
    engine.check_request("a", [1, 2], SamplingParams(n=3))
    refused("IDLM-0411", engine.check_request, "a", [VOCAB])
    assert not engine.has_work


@pytest.mark.parametrize("request_id", [3, None, ["a"]])
def test_request_ids_are_strings(engine: Engine, request_id: Any) -> None:
    refused("IDLM-0409", engine.add_request, request_id, [1, 2])
    assert engine.abort("unknown") == []
    assert not engine.has_work


@pytest.mark.parametrize("decoder", ["ar", "isd"])
def test_logprobs_are_the_models_own(checkpoint: Path, decoder: str) -> None:
    """Equal to log_softmax of one transformers forward, at any sampling temperature."""
    import transformers

    engine = Engine.from_pretrained(checkpoint, decoder, **OPTIONS)
    prompt = [3, 14, 15, 9]
    params = SamplingParams(max_tokens=12, temperature=0.7, top_k=9, seed=5, logprobs=3)
    [completion] = engine.generate([prompt], params)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).float().eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + list(completion.token_ids)])).logits[0].double()
    table = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 12
    for row, token_id, entry in zip(table, completion.token_ids, completion.logprobs, strict=True):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        best = row.topk(3)
        assert list(entry.top) == best.indices.tolist()
        assert list(entry.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.sweep_but("ar")
@pytest.mark.parametrize("decoder", ["ar", "isd"])
def test_a_seed_determines_the_answer_in_any_batch(checkpoint: Path, decoder: str) -> None:
    prompts = [[(7 * i + j) % MASK_ID for j in range(1 + 2 * i % 11)] for i in range(16)]
    params = [SamplingParams(max_tokens=12, temperature=1.0 + i / 20, seed=i) for i in range(16)]
    crowd = Engine.from_pretrained(checkpoint, decoder, **OPTIONS).generate(prompts, params)
    engine = Engine.from_pretrained(checkpoint, decoder, max_num_seqs=1, **OPTIONS)
    for prompt, setting, expected in zip(prompts, params, crowd, strict=True):
        [alone] = engine.generate([prompt], setting)
        assert alone.token_ids == expected.token_ids
        assert alone.seed == setting.seed
    [other] = engine.generate([prompts[0]], replace(params[0], seed=99))
    assert other.token_ids != crowd[0].token_ids


def test_seeds_reproduce_samples_and_are_reported(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, seed=3, n=6)
    first, again = engine.generate([[1, 2]], params), engine.generate([[1, 2]], params)
    assert len({c.token_ids for c in first}) > 3
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert [c.index for c in first] == list(range(6))
    drawn = engine.generate([[1, 2]] * 6, SamplingParams(max_tokens=10))
    assert len({c.seed for c in drawn}) == 6
    assert len({c.token_ids for c in drawn}) > 3
    [repeated] = engine.generate([[1, 2]], SamplingParams(max_tokens=10, seed=drawn[2].seed))
    assert repeated.token_ids == drawn[2].token_ids


def test_generated_request_ids_avoid_given_ones(engine: Engine) -> None:
    few = SamplingParams(temperature=0, max_tokens=3)
    given = f"r{engine._num_added + 1}"
    engine.add_request(given, [1], few)
    answers = engine.generate([[2], [3]], few)
    assert len({given, *(answer.request_id for answer in answers)}) == 3
    while engine.has_work:
        engine.step()


def test_threads_share_an_engine(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [[number, 2, 3] for number in range(1, 7)]
    expected = [each.token_ids for each in engine.generate(prompts, params)]

    def answer(number: int) -> tuple[int, ...]:
        if number % 2:
            return tuple(one for event in engine.stream(prompts[number], params) for one in event.token_ids)
        return engine.generate([prompts[number]], params)[0].token_ids

    with ThreadPoolExecutor(max_workers=6) as threads:
        for _ in range(2):
            assert [*threads.map(answer, range(6))] == expected
    assert not engine.has_work


def test_streams_side_by_side_leave_nothing_when_one_is_closed(engine: Engine) -> None:
    """Events of the closed stream that arrived while the other was read are dropped."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    [expected] = engine.generate([[1, 2, 3]], params)
    read, closed = engine.stream([1, 2, 3], params), engine.stream([1, 2, 4], params)
    pieces = [next(read), next(read)]
    assert engine._unread, "nothing was waiting"
    closed.close()
    assert tuple(t for event in [*pieces, *read] for t in event.token_ids) == expected.token_ids
    assert not engine.has_work


def test_stop_strings_that_straddle_tokens_end_text_before_them(speaking: Engine) -> None:
    """Stop strings across token borders of the unstopped answer; held-back text is never released."""
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    [free] = speaking.generate(["Lea has 9 shells."], params)
    assert len(free.text) > 40
    for start in range(5, 35, 3):
        stop = free.text[start : start + 7]
        first = free.text.index(stop)
        events = list(speaking.stream("Lea has 9 shells.", replace(params, stop=(stop, "never there"))))
        final = events[-1].completion
        assert final is not None
        assert final.finish_reason == "stop"
        assert final.text == "".join(event.text for event in events) == free.text[:first]
        assert final.token_ids == free.token_ids[: len(final.token_ids)]
        [whole] = speaking.generate(["Lea has 9 shells."], replace(params, stop=stop))
        assert (whole.text, whole.token_ids) == (final.text, final.token_ids)


def test_a_stop_id_is_a_token_of_the_answer_but_not_of_its_text(speaking: Engine) -> None:
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    [free] = speaking.generate(["Lea"], params)
    stop_id = free.token_ids[6]
    [cut] = speaking.generate(["Lea"], replace(params, stop_token_ids=(stop_id,)))
    end = free.token_ids.index(stop_id) + 1
    assert cut.token_ids == free.token_ids[:end]
    assert cut.finish_reason == "stop"
    assert cut.text == speaking.tokenizer.decode(list(cut.token_ids[:-1]), skip_special_tokens=True)
    refused("IDLM-0410", speaking.generate, [""])
