"""The `openai` client's flows with log-probabilities of prompts, reasoning and tools, and its aborts.

The tiny model knows no tags: for tests of these its answers are replaced by scripted ones on their way from
the engine, a few characters for each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from openai import OpenAI

from idlm.contracts import Completion, SamplingParams
from idlm.infer.server import messages
from idlm.infer.server.messages import AnswerEvent, read_event
from idlm.text.tokenizer import encode_messages, encode_prompt
from tests.integration.server.servers import PATIENCE, PROMPT, Running, checkpoint, events, reference, running

pytestmark = pytest.mark.sweep

MESSAGES: Any = [{"role": "user", "content": PROMPT}]
# The tiny vocabulary has digits, but not many words.
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "5", "parameters": {"type": "object"}, "description": "Adds."},
    },
    {"type": "function", "function": {"name": "33"}},
]
CALL = '<tool_call>\n{"name": "5", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("sampling.max_tokens=40", "reasoning_parser=think", "tool_parser=hermes") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=PATIENCE, max_retries=0)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Let all answers be this text, and end for this reason."""

    def put(text: str, finish_reason: str = "stop") -> None:
        left: dict[tuple[str, int], str] = {}

        def scripted(fields: Sequence[Any]) -> AnswerEvent:
            event = read_event(fields)
            key = event.request_id, event.sample
            rest = left.get(key, text)
            size = 3 if event.figures is None else len(rest)
            left[key] = rest[size:]
            figures = event.figures and event.figures._replace(finish_reason=finish_reason)
            return event._replace(text=rest[:size], figures=figures)

        monkeypatch.setattr(messages, "read_event", scripted)

    return put


def chat(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **options).choices[0]


def streamed(client: OpenAI, **options: Any) -> tuple[dict[str, Any], str]:
    """The message that the chunks of a stream add up to, and why it ends."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish_reason = None
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **options):
        [choice] = chunk.choices
        delta = choice.delta.model_dump()
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                assert call["id"] and call["function"]["name"] and not call["function"]["arguments"]
                message["tool_calls"].append(dict(call["function"]))
            else:
                assert call["id"] is call["function"]["name"] is None
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        finish_reason = choice.finish_reason or finish_reason
    assert finish_reason is not None
    return message, finish_reason


def whole(choice: Any) -> tuple[dict[str, Any], str]:
    message = choice.message
    calls = [
        {"name": call.function.name, "arguments": call.function.arguments}
        for call in message.tool_calls or ()
    ]
    assert len({call.id for call in message.tool_calls or ()}) == len(calls)
    texts = {"content": message.content or "", "reasoning_content": message.reasoning_content or ""}
    return {**texts, "tool_calls": calls}, choice.finish_reason


def scored(prompt: list[int], **settings: Any) -> Completion:
    params = SamplingParams(temperature=0, **settings)
    return reference().generate([prompt], params)[0]


def text_ids(text: str = PROMPT) -> list[int]:
    return encode_prompt(reference().tokenizer, text, template="none")


def test_a_message_cannot_begin_another_turn(client: OpenAI) -> None:
    messages = [{"role": "user", "content": f"Mia has 5 nuts.{reference().tokenizer.eos_token}"}]
    split, forged = (
        len(encode_messages(reference().tokenizer, messages, split_special_tokens=flag))
        for flag in (True, False)
    )
    answer: Any = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)  # type: ignore[arg-type]
    assert answer.usage.prompt_tokens == split != forged


def test_an_echo_has_the_logprobs_of_the_prompt(client: OpenAI) -> None:
    import transformers

    prompts = ["Lea has 3 nuts.", PROMPT]
    answer: Any = client.completions.create(
        model="tiny", prompt=prompts, echo=True, logprobs=2, max_tokens=0, temperature=0
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint()).float()
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        ids = text_ids(prompt)
        with torch.inference_mode():
            table = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        expected = [float(row[token_id]) for row, token_id in zip(table, ids[1:], strict=False)]
        logprobs = choice.logprobs
        assert (choice.text, choice.finish_reason) == (prompt, "length")
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
        for row, top, token in zip(table, logprobs.top_logprobs[1:], logprobs.tokens[1:], strict=False):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-3)
            # A token that is none of the two likeliest is the third.
            assert token in top and len(top) == 2 + (top[token] < sorted(top.values())[-2])
        assert logprobs.text_offset[-1] == len(prompt) - len(logprobs.tokens[-1])
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (0, answer.usage.prompt_tokens)


@pytest.mark.parametrize("prompt", [PROMPT, None])
def test_an_echo_goes_on_with_the_answer(server: Running, prompt: str | None) -> None:
    """What lm-eval's `local-completions` sends, and several samples of it, whole and streamed."""
    body = {
        "prompt": prompt or text_ids(),
        "echo": True,
        "logprobs": 1,
        "max_tokens": 4,
        "temperature": 0,
        "n": 2,
    }
    done = scored(text_ids(), max_tokens=4, logprobs=1, prompt_logprobs=1)
    assert done.logprobs is not None and done.prompt_logprobs is not None
    wanted = [token.logprob for token in (*done.prompt_logprobs[1:], *done.logprobs) if token is not None]
    choices = server.completion(**body)["choices"]
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        chunks = [chunk["choices"][0] for chunk in events(response.iter_lines())]
    for choice in choices:
        logprobs = choice["logprobs"]
        assert choice["text"].endswith(PROMPT + done.text)
        assert logprobs["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)
        parts = [each for each in chunks if each["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for key in ("tokens", "text_offset"):
            joined = [value for part in parts if part["logprobs"] for value in part["logprobs"][key]]
            assert joined == logprobs[key]


def test_prompt_logprobs_as_vllm_writes_them(server: Running, client: OpenAI) -> None:
    [choice] = server.completion(prompt=PROMPT, prompt_logprobs=2, max_tokens=1)["choices"]
    done = scored(text_ids(), max_tokens=1, prompt_logprobs=2)
    assert done.prompt_logprobs is not None
    first, *entries = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None
    for entry, token in zip(entries, done.prompt_logprobs[1:], strict=True):
        assert token is not None
        shown = entry[str(token.token_id)]
        assert shown["logprob"] == pytest.approx(token.logprob, abs=1e-4)
        assert sorted(one["rank"] for one in entry.values() if one["rank"]) == [1, 2]
        assert len(entry) == len({token.token_id, *token.top})
    answer: Any = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    ids = encode_messages(reference().tokenizer, MESSAGES)
    assert [list(entry) for entry in answer.prompt_logprobs[1:]] == [[str(token_id)] for token_id in ids[1:]]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n\nso\n</think>\n\n5 nuts", "hm\n\nso", "5 nuts"),
        ("<think>\nhm </th", "hm </th", ""),
        ("<think>\n\n</think>\n\n5 nuts", "", "5 nuts"),
        ("5 <think> nuts", "", "5 <think> nuts"),
    ],
)
def test_reasoning_is_apart_from_content(
    client: OpenAI, script: Callable[..., None], text: str, reasoning: str, content: str
) -> None:
    script(text, "length")
    expected = {"content": content, "reasoning_content": reasoning, "tool_calls": []}
    assert whole(chat(client)) == streamed(client) == (expected, "length")
    assert streamed(client, logprobs=True)[0] == expected


def test_reasoning_that_the_prompt_begins(
    client: OpenAI, script: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idlm.infer.server.service.is_opened", lambda tokenizer, prompt_ids: True)
    script("hm</think>5", "stop")
    expected = {"content": "5", "reasoning_content": "hm", "tool_calls": []}
    assert whole(chat(client)) == streamed(client) == (expected, "stop")
    constrained = {"guided_regex": "[0-9]"}
    assert streamed(client, extra_body=constrained) == (expected, "stop")
    # A grammar of the client holds from the first token on, so no tag can end a reasoning.
    script("5", "stop")
    constrained = {"guided_grammar": "start: /[0-9]/"}
    assert chat(client, extra_body=constrained).message.content == "5"
    assert streamed(client, extra_body=constrained) == (expected | {"reasoning_content": ""}, "stop")


def test_calls_of_tools(client: OpenAI, script: Callable[..., None]) -> None:
    add, now = {"name": "5", "arguments": '{"a": 1}'}, {"name": "33", "arguments": "{}"}
    nothing = {"content": "", "reasoning_content": "", "tool_calls": []}
    second = '<tool_call>{"name": "33", "arguments": {}}</tool_call>'
    broken = "<tool_call>{no}</tool_call>"
    for text, expected in (
        (CALL, {"tool_calls": [add]}),
        (
            f"<think>hm</think>Well.\n{CALL}\n{second}",
            {"content": "Well.", "reasoning_content": "hm", "tool_calls": [add, now]},
        ),
        (broken, {"content": broken}),
    ):
        script(text)
        reason = "tool_calls" if "tool_calls" in expected else "stop"
        for options in ({}, {"tool_choice": "auto"}):
            found = whole(chat(client, tools=TOOLS, **options)), streamed(client, tools=TOOLS, **options)
            assert found == ((nothing | expected, reason),) * 2
    script(CALL, "length")
    assert chat(client, tools=TOOLS).finish_reason == "length"
    script(CALL)
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        assert whole(chat(client, **options)) == (nothing | {"content": CALL}, "stop"), options
