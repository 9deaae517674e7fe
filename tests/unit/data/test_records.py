"""What a record becomes: other names of its parts, weights, tools, and what lies beside its turns."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from idlm.files.records import without_nulls
from idlm.train.data.records.detect import check_shape, detect_shape, ignored_keys, samples_of, wanted_columns
from tests.errors import refused

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHAT = [USER, ANSWER]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Recorder:
    """An encoder that keeps what it is given."""

    tokenizer = SimpleNamespace(chat_template="{{ m.role }} {{ m.content }} {{ m.name }}", decode=str)

    use_chat_template = True

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def messages(self, messages: Any, *, origin: str, **given: Any) -> list[Any]:
        self.given = {"messages": messages, **{key: value for key, value in given.items() if value}}
        return [SimpleNamespace(token_ids=[message.get("name") for message in messages[:1]])]

    def pair(self, prompt: str, response: str, *, origin: str) -> Any:
        self.given = {"pair": (prompt, response)}

    def text(self, text: str, *, origin: str) -> Any:
        self.given = {"text": text}

    def answer(self, prompt: Any, answer: Any, *, origin: str) -> list[Any]:
        self.given = {"answer": prompt}
        return []


def read(record: dict[str, Any], shape: str = "auto") -> dict[str, Any]:
    """What the encoder gets, and under "ignored" the keys that nothing reads."""
    encoder = Recorder()
    found = detect_shape(record, shape, origin="here")
    check_shape(record, found, shape, origin="here", first="here")
    _, in_turns = samples_of(record, found, encoder, origin="here")  # type: ignore[arg-type]
    ignored = {*ignored_keys(record, found), *in_turns}
    return encoder.given | ({"ignored": ignored} if ignored else {})


def refusal(record: dict[str, Any], shape: str = "auto") -> str:
    return str(refused("IDLM-02", read, record, shape))


SAME_CHATS: dict[str, Any] = {
    "role and content under conversations": {"conversations": CHAT},
    "from and value under messages": {
        "messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    },
    "mixed names": {"messages": [{"role": "human", "value": "a"}, {"from": "model", "content": "b"}]},
    "capital letters": {"messages": [USER | {"role": "User"}, ANSWER | {"role": "AI"}]},
    "another name of the list": {"dialogue": CHAT},
    "JSON text": {"messages": json.dumps(CHAT)},
    "an object of lists": {"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}},
    "texts in turn": {"conversations": ["a", "b"]},
    "JSON texts of turns": {"conversations": [json.dumps(USER), json.dumps(ANSWER)]},
    "JSON text of parts": {"messages": [USER | {"content": '[{"type": "text", "text": "a"}]'}, ANSWER]},
    "parts of text": {"messages": [USER | {"content": [{"type": "text", "text": "a"}]}, ANSWER]},
    "nulls of other keys": {"messages": [USER | {"tool_calls": None, "name": None}, ANSWER], "tools": None},
    "nulls in JSON text": {"messages": [USER, ANSWER | {"tool_calls": "null"}], "tools": "null"},
    "a prompt and a completion of messages": {"prompt": [USER], "completion": [ANSWER]},
    "a prompt of text": {"prompt": "a", "completion": [ANSWER]},
    "a completion of text": {"prompt": [USER], "completion": "b"},
}


@pytest.mark.parametrize("name", SAME_CHATS)
def test_the_same_chat_under_other_names(name: str) -> None:
    assert read(SAME_CHATS[name]) == {"messages": CHAT}


def test_parts_in_the_json_text_of_a_result_or_a_single_answer_are_what_was_said() -> None:
    written = json.dumps([{"type": "text", "text": "b"}])
    result = {"role": "tool", "content": written}
    turns = [USER, ANSWER | {"content": written}]
    assert read({"prompt": "a", "response": written}) == {"pair": ("a", written)}
    assert read({"messages": [*turns, result, ANSWER]}) == {"messages": [*turns, result, ANSWER]}
    asked = USER | {"content": written.replace("b", "a")}
    assert read({"messages": [asked, turns[1]]}) == {"messages": CHAT}
    ruled, rule = ({"role": "system", "content": text} for text in (written, "b"))
    for answer in turns[1], ANSWER:
        assert read({"messages": [ruled, asked, answer]}) == {"messages": [rule, *CHAT]}


@pytest.mark.parametrize(
    "keys", [("question", "answer"), ("query", "response"), ("problem", "solution"), ("input", "output")]
)
def test_other_names_of_a_prompt_and_its_response(keys: tuple[str, str]) -> None:
    assert read(dict(zip(keys, "ab", strict=True))) == {"pair": ("a", "b")}


def test_own_names_win_over_other_names() -> None:
    record = {"messages": CHAT, "problem": "p", "solution": "s", "answer": "4", "generations": ["s"]}
    assert read(record) == {
        "messages": CHAT,
        "ignored": {"problem", "solution", "answer", "generations"},
    }
    assert read({"text": None, "conversations": None, "messages": CHAT}) == {"messages": CHAT}
    assert "problem with solution, problem with answer" in refusal(
        {"problem": "p", "solution": "s", "answer": "4"}
    )
    assert read({"instruction": "a", "context": "c", "response": "b"}) == {"pair": ("a\n\nc", "b")}


BARE: dict[str, dict[str, Any]] = {
    "messages": {"messages": CHAT},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "alpaca": {"instruction": "a", "input": "", "output": "b"},
    "pair": {"prompt": "a", "response": "b"},
    "question": {"question": "a", "answer": "b"},
}


@pytest.mark.parametrize("shape", BARE)
def test_what_lies_beside_any_shape_is_used(shape: str) -> None:
    beside = {
        "system_prompt": "s",
        "history": [["old", "reply"]],
        "tools": json.dumps([TOOL]),
        "chat_template_kwargs": {"day": "Monday", "name": "x"},
        "enable_thinking": False,
        "id": 7,
    }
    old = [{"role": "user", "content": "old"}, {"role": "assistant", "content": "reply"}]
    assert read(BARE[shape] | beside) == {
        "messages": [{"role": "system", "content": "s"}, *old, *CHAT],
        "tools": [TOOL],
        "template_kwargs": {"enable_thinking": False, "day": "Monday", "name": "x"},
        "ignored": {"id", "enable_thinking", "chat_template_kwargs.day"},
    }
    empty = {"system": "", "history": [], "tools": "[]", "functions": None, "chat_template_kwargs": {}}
    assert read(BARE[shape] | empty) == read(BARE[shape])


@pytest.mark.parametrize("shape", ["pair", "alpaca"])
def test_without_a_template_nothing_lies_beside_a_pair(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "use_chat_template", False)
    assert read(BARE[shape]) == read(BARE[shape] | {"loss_mask": [0, 1]}) == {"pair": ("a", "b")}
    assert "system next to a prompt and its response" in refusal(BARE[shape] | {"system": "s"})


def test_a_system_prompt_beside_a_system_turn() -> None:
    system = {"role": "system", "content": "s"}
    assert read({"messages": [system, *CHAT], "system": "s "})["messages"] == [system, *CHAT]
    assert "different system and a first turn of the system" in refusal(
        {"messages": [system, *CHAT], "system": "t"}
    )
    empty = {"role": "system", "content": ""}
    assert read({"input": [empty, USER], "output": "b", "system_prompt": "s"})["messages"] == [system, *CHAT]
    # SmolTalk2's, which its own template reads.
    given = {"custom_instructions": "s", "enable_thinking": False}
    assert read({"messages": CHAT, "chat_template_kwargs": given})["messages"] == [system, *CHAT]
    history = [{"from": "human", "value": "old"}, {"from": "gpt", "value": "reply"}]
    found = read({"messages": [system, *CHAT], "history": history})["messages"]
    assert [message["content"] for message in found] == ["s", "old", "reply", "a", "b"]


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, 0) for key in ("weight", "train", "training", "trainable", "loss", "loss_mask", "train_on_turn")]
    + [("weight", 0.0), ("train", False), ("masked", True), ("mask", 1), ("no_loss", True), ("learn", False)],
)
def test_turns_without_weight_are_context(key: str, value: Any) -> None:
    bad = ANSWER | {"content": "bad"}
    expected = {"messages": [USER, bad, *CHAT], "untrained": {1}}
    assert read({"messages": [USER, bad | {key: value}, *CHAT]}) == expected
    opposite = type(value)(1 - value)
    assert "untrained" not in read({"messages": [USER, ANSWER | {key: opposite}]})
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bad", key: value}]
    assert read({"conversations": [*turns, *CHAT]}) == expected
    assert "all 1 assistant turns have the weight 0" in refusal({"messages": [USER, ANSWER | {key: value}]})


def test_what_may_be_a_weight_a_thought_or_a_context_is_not_dropped() -> None:
    for key in ("is_target", "train_on", "ignore", "use_loss", "label", "training_weight", "trainOnTurn"):
        assert f"{key}=False" in refusal({"messages": [USER, ANSWER | {key: False}]})
    assert read({"messages": [USER | {"target": 0}, ANSWER]})["ignored"] == {"messages[].target"}
    assert "assistant has cot='hm'" in refusal({"messages": [USER, ANSWER | {"cot": "hm"}]})
    for record in ({"prompt": "a", "response": "b"}, {"instruction": "a", "output": "b"}):
        for key in ("rationale", "reasoning_trace", "r1_reasoning", "Complex_CoT"):
            assert f"rename {key} to reasoning_content" in refusal(record | {key: "hm"})
        # What describes the record, as in Multilingual-Thinking, s1K and OpenR1.
        for key, value in {"reasoning_language": "French", "cot_type": "math", "is_reasoning": 1}.items():
            assert read(record | {key: value})["ignored"] == {key}
        assert read(record | {"preamble": "s"})["messages"] == [{"role": "system", "content": "s"}, *CHAT]
    columns = ["prompt", "chosen", "rejected", "rationale", "other"]
    assert wanted_columns(columns) == (columns[:4], ("other",))
    assert "context='c' next to prompt and answer" in refusal({"prompt": "a", "answer": "b", "context": "c"})
    for record in ({"question": "a", "answer": "b"}, {"instruction": "a", "chosen": "b", "rejected": "c"}):
        assert "context='c' next to" in refusal(
            record | {"context": "c"}, "preference" if "chosen" in record else "auto"
        )
    assert "option_a='c' next to question" in refusal({"question": "a", "answer": "b", "option_a": "c"})


def test_weights_beside_the_turns_and_of_other_turns() -> None:
    record = {"messages": [USER, ANSWER, *CHAT], "system": "s", "loss_mask": [None, 0, 0, 1]}
    assert read(record)["untrained"] == {2}
    for key in ("assistant_masks", "turn_weights", "labels"):
        assert f"{key}=[0, 1]" in refusal({"messages": CHAT, key: [0, 1]})
        assert read({"messages": CHAT, key: ["x"]})["ignored"] == {key}
    assert wanted_columns(["messages", "turn_weights", "other"])[1] == ("other",)
    assert read({"messages": [USER | {"weight": 0}, ANSWER | {"weight": 1}]}) == {"messages": CHAT}
    assert read({"messages": [USER | {"train": True}, ANSWER]})["ignored"] == {"messages[].train"}
    record = {"prompt": [*CHAT, USER], "completion": [ANSWER]}
    assert read(record) == {"messages": [*CHAT, USER, ANSWER], "untrained": {1}}


def test_reasoning_and_other_keys_of_turns_go_to_the_template() -> None:
    turns = [USER | {"name": "Sam", "id": 1}, {"role": "assistant", "reasoning_content": "hm"}]
    assert read({"messages": turns}) == {
        "messages": [turns[0], turns[1] | {"content": ""}],
        "ignored": {"messages[].id"},
    }
    assert read({"messages": [USER, ANSWER | {"name": "Kim"}]})["ignored"] == {"messages[].name"}
    asked = USER | {"reasoning_content": "hm"}
    assert read({"messages": [asked, ANSWER]})["ignored"] == {"messages[].reasoning_content"}


def test_preferences_are_trained_on_where_that_is_said() -> None:
    text = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert "data.shape=preference" in refusal(text)
    assert read(text, "preference") == {"pair": ("a", "b")}
    for record in (
        {"prompt": "a", "chosen": CHAT},
        {"chosen": CHAT},
        {"prompt": [USER], "chosen": [ANSWER]},
        {"conversations": [USER], "chosen": {"from": "gpt", "value": "b"}},
    ):
        assert read({**record, "rejected": "c"}, "preference") == {"messages": CHAT}
    both = {"messages": CHAT, "chosen": CHAT, "rejected": CHAT}
    assert "several shapes: messages, preference" in refusal(both)
    assert read(both, "messages") == {"messages": CHAT, "ignored": {"chosen", "rejected"}}
    assert "without a prompt" in refusal({"chosen": "b", "rejected": "c"}, "preference")
    # A table writes integers as floats where a row has none.
    for label in (False, 0, 0.0, "0"):
        for record in ({"prompt": "a", "completion": "b"}, {"messages": CHAT}, {"conversations": CHAT}):
            assert f"label={label}," in refusal(record | {"label": label})
            assert "kto_tag=False," in refusal(record | {"kto_tag": False})


@pytest.mark.parametrize(
    "beside", [{"role": "prompter"}, {"system": "s"}, {"tools": [TOOL]}, {"completion": "b"}, {"answer": "b"}]
)
def test_a_text_that_is_part_of_a_conversation_is_refused(beside: dict[str, Any]) -> None:
    assert f"has {next(iter(beside))} next to a text" in refusal({"text": "a"} | beside)


def test_reasoning_beside_a_pair_is_that_of_its_response() -> None:
    for shape in ("pair", "alpaca", "question"):
        for key in ("reasoning_content", "reasoning", "thinking"):
            assert read(BARE[shape] | {key: "hm"}) == {"messages": [USER, ANSWER | {key: "hm"}]}
        assert "different values of reasoning_content and reasoning" in refusal(
            BARE[shape] | {"reasoning_content": "hm", "reasoning": "x"}
        )
        # How the model was asked to reason, as in Nemotron's data.
        for mode in ("off", "On", "high", True):
            assert read(BARE[shape] | {"reasoning": mode}) == {"pair": ("a", "b"), "ignored": {"reasoning"}}
        assert "cot='hm'" in refusal(BARE[shape] | {"reasoning": "on", "cot": "hm"})
        twice = BARE[shape] | {"reasoning_content": "hm", "reasoning_details": [{"text": "hm"}]}
        assert read(twice)["ignored"] == {"reasoning_details"}


def test_details_of_the_thought_of_a_turn_may_repeat_it() -> None:
    twice = ANSWER | {"reasoning": "hm", "reasoning_details": [{"text": "hm"}]}
    found = read({"messages": [USER, twice]})
    assert found["messages"][1]["reasoning"] == "hm"
    assert found["ignored"] == {"messages[].reasoning_details"}


def test_reasoning_beside_turns_is_that_of_the_only_answer() -> None:
    thought, expected = {"reasoning": "hm"}, [USER, ANSWER | {"reasoning": "hm"}]
    assert read({"prompt": [USER], "completion": [ANSWER]} | thought) == {"messages": expected}
    assert read({"input": [USER], "output": "b"} | thought) == {"messages": expected}
    preferred = {"prompt": "a", "chosen": [ANSWER], "rejected": [ANSWER]}
    assert read(preferred | thought, "preference") == {"messages": expected}
    for answers in ([ANSWER, USER, ANSWER], [ANSWER | {"reasoning_content": "x"}]):
        assert "may belong to any of them" in refusal({"prompt": [USER], "completion": answers} | thought)


def test_answers_follow_their_prompt_as_it_was_given() -> None:
    call = {"name": "add", "arguments": '{"x": 1}'}
    prompt = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    record = {
        "prompt": prompt,
        "text": "b",
        "token_ids": [2],
        "finish_reason": "stop",
        "num_forwards": 1,
        "id": 1,
    }
    assert read(record) == {"answer": prompt, "ignored": {"id"}}
    assert "tools is next to an answer" in refusal(record | {"tools": [TOOL]})


def test_nulls_are_absent_but_inside_schemas_arguments_and_lists() -> None:
    table = {"a": None, "b": [{"c": None, "d": {"e": None, "f": 0}}], "g": ["x", None], "h": {"i": None}}
    assert without_nulls(table) == {"b": [{"d": {"f": 0}}], "g": ["x", None], "h": {}}
    schema = {"type": "object", "properties": {"x": {"default": None}}}
    tool = {
        "type": "function",
        "strict": None,
        "function": {"name": "f", "strict": None, "parameters": schema},
    }
    call = {"id": None, "function": {"name": "f", "arguments": {"x": None}}}
    given = read({"messages": [USER, {"role": "assistant", "tool_calls": [call]}], "tools": [tool]})
    assert given["tools"] == [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert given["messages"][1]["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    ]
