"""The `openai` client's flows: chats, completions, streams, logprobs, samples; answers are the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from idlm.contracts import Completion, SamplingParams
from idlm.text.tokenizer import encode_messages, encode_prompt
from tests.contracts.engines import clear_answers
from tests.integration.server.servers import PATIENCE, PROMPT, Running, events, reference, running

MESSAGES: Any = [{"role": "user", "content": PROMPT}]
SHORT = 12


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("sampling.max_tokens=9") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=PATIENCE, max_retries=0)


def expected(prompt: list[int], **settings: Any) -> list[Completion]:
    """What the engine answers; rounding decides none of it."""
    return clear_answers(reference(), [prompt], SamplingParams(**settings))


def chat_ids(**options: Any) -> list[int]:
    return encode_messages(reference().tokenizer, MESSAGES, **options)


def text_ids(text: str = PROMPT) -> list[int]:
    return encode_prompt(reference().tokenizer, text, template="none")


def test_the_model_is_listed(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "idlm")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="another", messages=MESSAGES)


def test_a_chat_is_the_engines_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        max_completion_tokens=SHORT,
        logprobs=True,
        top_logprobs=2,
    )
    [done] = expected(chat_ids(), temperature=0, max_tokens=SHORT, logprobs=2)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert (choice.message.content, choice.finish_reason) == (done.text, done.finish_reason)
    assert choice.logprobs is not None and choice.logprobs.content is not None and done.logprobs is not None
    for shown, token in zip(choice.logprobs.content, done.logprobs, strict=True):
        assert shown.logprob == pytest.approx(token.logprob, abs=1e-4)
        assert [each.logprob for each in shown.top_logprobs] == pytest.approx([*token.top.values()], abs=1e-4)
    assert "".join(shown.token for shown in choice.logprobs.content) == done.text
    usage: Any = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (done.num_prompt_tokens, len(done.token_ids))
    assert usage.num_forwards == done.num_forwards
    assert usage.tokens_per_forward == pytest.approx(done.tokens_per_forward)
    assert usage.acceptance_rate == pytest.approx(done.acceptance_rate)
    assert usage.completion_tokens_details.accepted_prediction_tokens == sum(done.accepted_by_position)


def test_messages_of_parts_and_earlier_answers(client: OpenAI) -> None:
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    [done] = expected(chat_ids(), temperature=0, max_tokens=9)
    assert first.choices[0].message.content == done.text
    turns: Any = [
        {"role": "developer", "content": "You are brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " Lea"}]},
        first.choices[0].message,
        {"role": "user", "content": "And Tom?"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=turns, temperature=0)
    plain = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "Hi Lea"},
        {"role": "assistant", "content": done.text},
        {"role": "user", "content": "And Tom?"},
    ]
    [wanted] = expected(encode_messages(reference().tokenizer, plain), temperature=0, max_tokens=9)
    assert answer.choices[0].message.content == wanted.text


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}])
def test_samples_and_seeds_are_the_engines(client: OpenAI, settings: dict[str, float]) -> None:
    answer: Any = client.completions.create(
        model="tiny", prompt=PROMPT, seed=7, n=3, max_tokens=SHORT, extra_body={"top_k": 20}, **settings
    )
    done = expected(text_ids(), seed=7, n=3, max_tokens=SHORT, top_k=20, **settings)
    assert [choice.text for choice in answer.choices] == [each.text for each in done]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == len(text_ids())
    assert answer.usage.completion_tokens == sum(len(each.token_ids) for each in done)


def test_top_p_0_is_the_likeliest_token(server: Running) -> None:
    prompt_ids = encode_prompt(reference().tokenizer, PROMPT)
    [greedy] = expected(prompt_ids, temperature=0, max_tokens=8)
    settings = {"temperature": 1, "top_p": 0, "seed": 1, "max_tokens": 8}
    assert server.completion(prompt=prompt_ids, **settings)["choices"][0]["text"] == greedy.text


def test_several_prompts_of_texts_and_token_ids(server: Running) -> None:
    texts = ["Lea has 3 hats.", "Tom has 4 pens. Tom loses 1."]
    ids = [text_ids(text) for text in texts]
    wanted = [done.text for each in ids for done in expected(each, temperature=0, max_tokens=5)]
    for prompt in (texts, ids):
        answer = server.completion(prompt=prompt, temperature=0, max_tokens=5, return_token_ids=True)
        assert [choice["text"] for choice in answer["choices"]] == wanted
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    done = expected(ids[0], temperature=0, max_tokens=5)
    [alone] = server.completion(prompt=ids[0], temperature=0, max_tokens=5, return_token_ids=True)["choices"]
    assert alone["token_ids"] == list(done[0].token_ids)


def test_what_ends_an_answer(server: Running) -> None:
    [done] = expected(text_ids(), temperature=0, max_tokens=30)
    stop = done.text[5:9]
    [stopped] = server.completion(prompt=PROMPT, temperature=0, max_tokens=30, stop=[stop])["choices"]
    assert (stopped["text"], stopped["finish_reason"]) == (done.text[: done.text.index(stop)], "stop")
    last = done.token_ids[3]
    shown = server.completion(
        prompt=PROMPT, temperature=0, max_tokens=30, stop_token_ids=[last], return_token_ids=True
    )
    assert shown["choices"][0]["token_ids"] == list(done.token_ids[: done.token_ids.index(last) + 1])
    assert server.completion(prompt=PROMPT)["usage"]["completion_tokens"] <= 9, "the server's default"


def test_relaxed_acceptance_is_lossy(server: Running) -> None:
    assert server.completion(prompt=PROMPT, tau=0.5)["exactness"] == "lossy"
    assert server.completion(prompt=PROMPT)["exactness"] == "exact"
    info = server.client.get("/model_info").json()
    assert (info["exactness"], info["decoder"], info["decoder_options"]["stride"]) == ("exact", "isd", 3)


def test_a_stream_is_the_whole_answer_in_parts(client: OpenAI, server: Running) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": SHORT, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **options)
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    *parts, last = chunks
    assert not last.choices and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == SHORT
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    logprobs = [part.choices[0].logprobs for part in parts]
    tokens = [token.token for each in logprobs if each is not None for token in each.content or ()]
    assert len(tokens) == SHORT
    assert [part.choices[0].finish_reason for part in parts[-2:]] == [None, "length"]
    assert len({part.id for part in chunks}) == 1


def test_a_stream_of_several_samples_counts_real_tokens(server: Running) -> None:
    body = {
        "prompt": PROMPT,
        "n": 2,
        "seed": 3,
        "max_tokens": SHORT,
        "stream": True,
        "return_token_ids": True,
    }
    options = {"continuous_usage_stats": True, "include_usage": True}
    with server.client.stream(
        "POST", "/v1/completions", json={**body, "stream_options": options}
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = list(events(response.iter_lines()))
    done = expected(text_ids(), seed=3, n=2, max_tokens=SHORT)
    for index, each in enumerate(done):
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == each.text
        assert [token for choice in own for token in choice["token_ids"]] == list(each.token_ids)
        assert own[-1]["finish_reason"] == each.finish_reason
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == sum(len(each.token_ids) for each in done)
    assert chunks[-1]["usage"]["num_forwards"] == sum(each.num_forwards for each in done)


@pytest.mark.parametrize(("path", "stride"), [("/v1/chat/completions", 3), ("/v1/completions", 1)])
def test_a_stream_says_what_each_pass_emitted(server: Running, path: str, stride: int) -> None:
    """Also of a request that takes one token per pass, under a constraint, beside its other sample."""
    body = {
        "max_tokens": 24,
        "seed": 3,
        "n": 2,
        "stream": True,
        "structured_outputs": {"regex": "[0-9 ]{20}"},
    }
    body |= {"stream_options": {"include_usage": True, "include_passes": True}}
    body |= {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    if stride == 1:
        body["decoder_options"] = {"stride": 1}
    with server.client.stream("POST", path, json=body) as response:
        *chunks, last = events(response.iter_lines())
    passes = [one for chunk in chunks for choice in chunk["choices"] for one in choice["passes"]]
    usage, details = last["usage"], last["usage"]["completion_tokens_details"]
    assert sum(one["tokens"] for one in passes) == usage["completion_tokens"]
    assert sum(one["accepted"] for one in passes) == details["accepted_prediction_tokens"]
    rejected = details["rejected_prediction_tokens"]
    assert sum(one["tested"] - one["accepted"] for one in passes) == rejected
    assert (max(one["tokens"] for one in passes) > 1) == (stride > 1)
    assert (stride > 1) == (rejected > 0) and len(passes) <= usage["num_forwards"]


def test_metrics_count_what_was_answered(server: Running) -> None:
    names = (
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:time_to_first_token_seconds_count",
    )
    before = [server.metric(name) for name in names]
    [done] = expected(text_ids(), temperature=0, max_tokens=SHORT)
    tested = server.metric("vllm:spec_decode_num_draft_tokens_total")
    drafts = server.metric("vllm:spec_decode_num_drafts_total")
    at = [
        server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(k)) for k in (0, 1)
    ]
    server.completion(prompt=PROMPT, temperature=0, max_tokens=SHORT)
    grown = [server.metric(name) - old for name, old in zip(names, before, strict=True)]
    assert grown == [len(done.token_ids), done.num_prompt_tokens, 1]
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") - tested == sum(done.tested_by_position)
    assert server.metric("vllm:spec_decode_num_drafts_total") - drafts == max(done.tested_by_position)
    now = [
        server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(k)) for k in (0, 1)
    ]
    assert [new - old for new, old in zip(now, at, strict=True)] == list(done.accepted_by_position)
    assert server.metric("vllm:request_success_total", finished_reason="length") > 0
    assert server.metric("vllm:inter_token_latency_seconds_count") > 0
    server.wait_until_idle()


def test_penalties_and_biases_are_the_engines(client: OpenAI) -> None:
    """Under OpenAI's names, and vLLM's in `extra_body`."""
    prompt = text_ids()
    changes: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": -0.5}
    extra: dict[str, Any] = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_tokens": 4}
    [done] = expected(prompt, temperature=0, max_tokens=SHORT, logit_bias={5: -3.0}, **changes, **extra)
    [plain] = expected(prompt, temperature=0, max_tokens=SHORT)
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        temperature=0,
        max_tokens=SHORT,
        logit_bias={"5": -3},
        extra_body={**extra, "return_token_ids": True},
        **changes,
    )
    assert answer.choices[0].text == done.text != plain.text
