"""What of a conversation is trained under templates of many forms: thoughts, first turns, ends, and what a
template leaves out."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from idlm.errors import UserError
from idlm.text.chat import TRAILING
from idlm.text.left_out import kinds_left_out
from idlm.text.templates import render
from idlm.text.thoughts import without_thinking
from idlm.text.tokenizer import encode_messages
from idlm.train.data.encoder import Encoder
from idlm.train.data.layout import Sample
from tests.errors import refused
from tests.unit.data.template_forms import (
    FORMS,
    HEADERS_MARKED,
    OPENS_AFTER_USERS,
    SYSTEM_LAST,
    THINKING_SWITCH,
    form_tokenizer,
    tokenizer_with,
)

QUESTION = {"role": "user", "content": "Is it so?"}
THOUGHT = "<think>\nWHY so\n</think>\n\nYes it is"
END = "<|im_end|>"
CALL = {"function": {"name": "zone", "arguments": {"city": "Rome"}}}


def encoder_of(tokenizer: Any, **settings: Any) -> Encoder:
    return Encoder(tokenizer, mask_token_id=None, **{"use_chat_template": True} | settings)


def sample_of(
    tokenizer: Any, messages: list[Any], *, untrained: Any = (), tools: Any = (), **settings: Any
) -> Sample:
    """The only sample of a conversation."""
    given: Any = {"untrained": frozenset(untrained), "tools": tools}
    (sample,) = encoder_of(tokenizer, **settings).messages(messages, origin="here", **given)
    return sample


def answer(role: str = "assistant", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": "", **fields}


def parts(tokenizer: Any, sample: Sample) -> tuple[str, list[str]]:
    """The text before the first target, and each run of targets."""
    runs: list[list[int]] = [[]]
    for token_id, flag in zip(sample.token_ids.tolist(), sample.supervised.tolist(), strict=True):
        runs += [[]] if not flag and runs[-1] else []
        runs[-1] += [token_id] if flag else []
    first = int(sample.supervised.argmax())
    return tokenizer.decode(sample.token_ids[:first]), [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("form", ["chatml", "last thought", "opened"])
def test_a_thought_that_is_given_twice_is_trained_once(form: str) -> None:
    encoder = encoder_of(form_tokenizer(form))

    def ids(**fields: str) -> list[int]:
        [sample] = encoder.messages([QUESTION, answer(**fields)], origin="here")
        return sample.token_ids.tolist()

    expected = ids(content="Yes it is", reasoning_content="WHY so")
    assert ids(content=THOUGHT, reasoning_content="WHY so\n") == expected
    assert ids(content=THOUGHT.removeprefix("<think>"), reasoning="WHY so") == expected
    refused("IDLM-0202: here.*another one", ids, content=THOUGHT, reasoning_content="so")


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("closed", "calls")])
@pytest.mark.parametrize("is_field", [False, True])
def test_a_thought_is_what_the_model_has_to_produce_behind_the_prompt(form: str, is_field: bool) -> None:
    tokenizer = form_tokenizer(form)
    output = answer(content="Yes it is", reasoning_content="WHY so") if is_field else answer(content=THOUGHT)
    for turns in ("last", "each"):
        sample = sample_of(tokenizer, [QUESTION, output], turns=turns)
        prompt, targets = parts(tokenizer, sample)
        extra = {"enable_thinking": True} if form == "closed unless on" else {}
        assert prompt == tokenizer.decode(encode_messages(tokenizer, [QUESTION], **extra))
        opened = "<think>\n" if prompt.endswith("<think>\n") else ""
        assert [opened + target for target in targets] == [THOUGHT + END]


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_without_a_thought_closes_an_opened_block_once(form: str) -> None:
    tokenizer = form_tokenizer(form)
    for thinking, content in (("keep", "Yes it is"), ("strip", THOUGHT)):
        sample = sample_of(tokenizer, [QUESTION, answer(content=content)], thinking=thinking)
        prompt, targets = parts(tokenizer, sample)
        assert prompt == tokenizer.decode(encode_messages(tokenizer, [QUESTION]))
        whole = tokenizer.decode(sample.token_ids)
        assert whole.rstrip().endswith("Yes it is" + END) and targets[-1].endswith("Yes it is" + END)
        has_block = "think" in FORMS[form] and form != "dropped"
        assert whole.count("<think>") == whole.count("</think>") == has_block
        is_warned = "close the <think> block" in " ".join(sample.notes)
        assert is_warned == (form in ("opened, dropped", "behind an opened block"))


def test_a_prompt_that_leaves_no_room_for_a_thought_is_refused_with_a_fix_that_works() -> None:
    tokenizer = form_tokenizer("closed")
    messages = [QUESTION, answer(content=THOUGHT)]
    error = refused(r"IDLM-0214.*no room", sample_of, tokenizer, messages)
    assert "data.thinking=strip" in error.fix
    sample = sample_of(tokenizer, messages, thinking="strip")
    assert parts(tokenizer, sample)[1] == ["Yes it is" + END]


@pytest.mark.parametrize("form", ["last thought", "opened", "opened, dropped", "dropped", "closed unless on"])
def test_what_rewrites_history_is_trained_turn_by_turn_as_its_refusal_says(form: str) -> None:
    tokenizer = form_tokenizer(form)
    messages = [QUESTION, answer(content="<think>\nONE\n</think>\n\nYes"), QUESTION, answer(content=THOUGHT)]
    error = refused("IDLM-0214", sample_of, tokenizer, messages)
    assert "data.turns=each" in error.fix and "data.turns=last" in error.fix
    first, second = encoder_of(tokenizer, turns="each").messages(messages, origin="here")
    assert "ONE" in tokenizer.decode(first.token_ids[first.supervised]) and not [
        note for note in first.notes if "earlier" in note
    ]
    assert "WHY so" in tokenizer.decode(second.token_ids[second.supervised])
    assert "the chat template leaves out thoughts of earlier turns" in second.notes
    last = sample_of(tokenizer, [*messages, QUESTION], turns="last")
    assert last.token_ids.tolist() == second.token_ids.tolist()
    assert "turns after the last trained answer are left out" in last.notes


def test_a_thought_that_the_answer_repeats_is_not_taken_for_shown() -> None:
    for form in ("dropped", "marked", "chatml"):
        output = answer(content="Yes it is", reasoning_content="Yes")
        sample = sample_of(form_tokenizer(form), [QUESTION, output])
        tokenizer = form_tokenizer(form)
        assert parts(tokenizer, sample)[1] == ["<think>\nYes\n</think>\n\nYes it is" + END]
        is_warned = "does not support reasoning_content" in " ".join(sample.notes)
        assert is_warned == (form != "dropped")


@pytest.mark.parametrize("fields", [{"content": "Yes"}, {"content": THOUGHT}, {"tool_calls": [CALL]}])
def test_turns_that_are_rendered_otherwise_once_they_are_answered_are_trained_as_prompted(
    fields: dict[str, Any],
) -> None:
    tokenizer = tokenizer_with(SYSTEM_LAST)
    history = [{"role": "system", "content": "Be brief."}, QUESTION]
    sample = sample_of(tokenizer, [*history, answer(**fields)])
    prompt, (target,) = parts(tokenizer, sample)
    assert prompt == tokenizer.decode(encode_messages(tokenizer, history)) and "Be brief." in prompt
    assert target == (
        f" {fields['content']}{END}" if "content" in fields else f"[C] {json.dumps(CALL['function'])}{END}"
    )
    messages = [*history, answer(**fields), QUESTION, answer(content="No")]
    error = refused(r"IDLM-0214", sample_of, tokenizer, messages)
    assert "data.turns=each" in error.fix
    assert len(encoder_of(tokenizer, turns="each").messages(messages, origin="here")) == 2


@pytest.mark.parametrize("form", ["chatml", "system by default", "bos", "marked", "marked with its header"])
def test_of_a_conversation_that_the_assistant_opens_its_words_are_targets(form: str) -> None:
    tokenizer = form_tokenizer(form)
    messages = [answer(content="Hello"), QUESTION, answer(content="b")]
    for untrained, output in (((), ["Hello", "b"]), ((0,), ["b"]), ((2,), ["Hello"])):
        sample = sample_of(tokenizer, messages, untrained=untrained)
        _, targets = parts(tokenizer, sample)
        assert targets == [text + END for text in output]
        assert tokenizer.decode(sample.token_ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    sample = sample_of(tokenizer, [{"role": "system", "content": "Hi"}, answer(content="Hello")])
    assert parts(tokenizer, sample)[1] == ["Hello" + END]


@pytest.mark.parametrize("marks", HEADERS_MARKED)
def test_what_the_prompt_of_inference_ends_with_is_no_target(marks: str) -> None:
    tokenizer = tokenizer_with(HEADERS_MARKED[marks])
    messages = [QUESTION, answer(content="Yes"), QUESTION, answer(content="No")]
    samples = encoder_of(tokenizer, turns="each").messages(messages, origin="here")
    for num, sample in zip((1, 3), samples, strict=True):
        prompt, targets = parts(tokenizer, sample)
        assert prompt == tokenizer.decode(encode_messages(tokenizer, messages[:num]))
        assert [target.partition(END)[0] for target in targets] == [messages[num]["content"]]


def test_a_template_that_joins_arguments_as_text_gets_them_as_json() -> None:
    for sign in "+~":
        written = f"call.function.name {sign} call.function.arguments"
        tokenizer = tokenizer_with(FORMS["calls"].replace("call.function | tojson", written))
        sample = sample_of(tokenizer, [QUESTION, answer(tool_calls=[CALL])])
        assert parts(tokenizer, sample)[1] == ['zone{"city": "Rome"}' + END]
    asked = {"role": "user", "content": "What is {'city': 'Rome'}?"}
    items = "call.function.name ~ (call.function.arguments.items() | list | tojson)"
    for form, written in (
        (FORMS["calls"], '"arguments": {"city": "Rome"}'),
        (FORMS["calls"].replace("call.function | tojson", items), '[["city", "Rome"]]'),
    ):
        sample = sample_of(tokenizer_with(form), [asked, answer(tool_calls=[CALL])])
        assert written in parts(tokenizer, sample)[1][0]


def test_a_header_is_no_answer_where_the_template_opens_turns_behind_users_alone() -> None:
    tokenizer = tokenizer_with(OPENS_AFTER_USERS)
    for turns in ([{"role": "system", "content": "Hi"}], [QUESTION]):
        sample = sample_of(tokenizer, [*turns, answer(content="Hello")])
        assert parts(tokenizer, sample)[1] == ["Hello" + END]


@pytest.mark.parametrize("content", [THOUGHT, "WHY so\n</think>\n\nYes it is"])
def test_a_switch_of_another_name_lets_an_answer_think(content: str) -> None:
    tokenizer = tokenizer_with(THINKING_SWITCH)
    for thinking, is_on, output in (
        ("keep", True, "\nWHY so\n</think>\n\nYes it is"),
        ("off", False, "Yes it is"),
    ):
        output = output.removeprefix("" if content == THOUGHT else "\n")
        sample = sample_of(tokenizer, [QUESTION, answer(content=content)], thinking=thinking)
        prompt, targets = parts(tokenizer, sample)
        assert prompt == tokenizer.decode(encode_messages(tokenizer, [QUESTION], enable_thinking=is_on))
        assert prompt.endswith("<think>" if is_on else "</think>") and targets == [output + END]


def test_a_last_thought_that_the_template_leaves_out_follows_earlier_answers() -> None:
    tokenizer = form_tokenizer("chatml")
    last = answer(content="Yes it is", reasoning_content="WHY so")
    sample = sample_of(tokenizer, [QUESTION, answer(content="No"), QUESTION, last, QUESTION])
    assert parts(tokenizer, sample)[1] == [f"No{END}", THOUGHT + END]
    assert TRAILING in sample.notes
    refused("IDLM-0214.*message 1", sample_of, tokenizer, [QUESTION, last, QUESTION, last])


def test_a_thought_follows_what_the_template_writes_before_an_answer() -> None:
    template = FORMS["chatml"].partition("{%- if add_generation")[0]
    tokenizer = tokenizer_with(template)
    sample = sample_of(tokenizer, [QUESTION, answer(content="Yes it is", reasoning_content="WHY so")])
    assert parts(tokenizer, sample)[1] == ["<|im_start|>assistant\n" + THOUGHT + END]


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_a_turn_that_the_template_leaves_out_is_refused_by_name_or_counted(role: str) -> None:
    tokenizer = form_tokenizer("two roles")
    for text in ("a", "SECRET", "a text that is long enough to be told from any other"):
        messages = [{"role": role, "content": text}, QUESTION, answer(content="a")]
        error = refused(
            rf"IDLM-0225.*here.*content of the {role} turn at message 0", sample_of, tokenizer, messages
        )
        assert "data.left_out=accept" in error.fix
        sample = sample_of(tokenizer, messages, left_out="accept")
        assert sample.notes == (f"the chat template leaves out content of {role} turns",)


def test_an_equal_turn_does_not_hide_one_that_is_left_out() -> None:
    form = FORMS["chatml"].replace(
        "{{- '<|im_start|>' + m.role", "{%- if m.role != 'system' or loop.first %}{{- '<|im_start|>' + m.role"
    )
    form = form.replace("{%- endfor %}", "{%- endif %}{%- endfor %}")
    tokenizer = tokenizer_with(form)
    for text in ("same", "a text that is long enough to be told from any other"):
        shown = {"role": "system", "content": text}
        with pytest.raises(UserError, match=r"IDLM-0225.*content of the system turn at message 2"):
            sample_of(tokenizer, [shown, QUESTION, shown, QUESTION, answer(content="a")])


def test_developers_are_the_system_of_a_template_that_does_not_know_them() -> None:
    turns = [[{"role": role, "content": "Be brief."}, QUESTION] for role in ("developer", "system")]
    tokenizer = copy.copy(form_tokenizer("chatml"))
    encoded = [encode_messages(tokenizer, messages) for messages in turns]
    assert encoded[0] == encoded[1]
    tokenizer.chat_template = FORMS["chatml"] + "{# developer #}"
    assert "<|im_start|>developer" in tokenizer.decode(encode_messages(tokenizer, turns[0]))


TOOL = {"name": "zone", "description": "Looks up a time zone", "parameters": {"properties": {"city": {}}}}


@pytest.mark.parametrize(
    ("fields", "lost"),
    [
        ({"content": "INTRO <think>\nWHY\n</think>\n\nYes"}, "content of the assistant turn"),
        ({"tool_calls": [{"function": {"name": "zone", "arguments": {"city": "Rome"}}}]}, "tool_calls"),
        (
            {"tool_calls": [{"function": {"name": "zone", "arguments": {"n": 3}}}], "content": "7"},
            "tool_calls",
        ),
    ],
)
def test_every_part_of_an_answer_is_looked_for(fields: dict[str, Any], lost: str) -> None:
    messages = [QUESTION, answer(**fields)]
    for form in ("last thought", "dropped"):
        refused(f"IDLM-0225.*{lost}", sample_of, form_tokenizer(form), messages)
    tokenizer = form_tokenizer("calls")
    sample = sample_of(tokenizer, messages, tools=[{"function": TOOL}])
    assert sample.notes == ()
    named = tokenizer_with(FORMS["calls"].replace("function |", "function.name |"))
    if "tool_calls" in fields:
        refused("IDLM-0225.*tool_calls", sample_of, named, messages)
    with pytest.raises(UserError, match=r"IDLM-0225.*the tools.*zone"):
        sample_of(form_tokenizer("chatml"), [QUESTION, answer(content="zone")], tools=[{"function": TOOL}])


def test_white_space_and_escapes_are_no_losses() -> None:
    quoted = 'a "quoted"\n text, \\ and é <b> '
    messages = [
        {"role": "system", "content": "  two \n lines that a template may trim  "},
        {"role": "user", "content": quoted},
        answer(tool_calls=[{"function": {"name": "f", "arguments": {"a": quoted, "b": [True, None, 0.5]}}}]),
        {"role": "tool", "content": quoted},
        answer(content="\n\ndone  "),
    ]
    form = FORMS["calls"].replace(
        "+ m.content }}", "+ (m.content | trim if m.role != 'tool' else m.content | tojson) }}"
    )
    tokenizer = tokenizer_with(form)
    sample = sample_of(tokenizer, messages)
    assert sample.notes == () and sample.num_targets


def test_calls_that_are_left_out_do_not_teach_empty_answers() -> None:
    tokenizer = form_tokenizer("chatml")
    call, shown = answer(tool_calls=[CALL]), answer(role="tool", content="Noon")
    messages = [QUESTION, call, shown, answer(content="It is noon"), QUESTION, call, shown]
    for turns in ("all", "last", "each"):
        encoder = encoder_of(tokenizer, turns=turns, left_out="accept")
        (sample,) = encoder.messages(messages, origin="here")
        assert parts(tokenizer, sample)[1] == ["It is noon" + END]
        assert any("calls alone" in note for note in sample.notes)
        refused("IDLM-0204.*calls alone", encoder.messages, messages[:2], origin="here")
    spoken = [QUESTION, answer(content="I look", tool_calls=[CALL])]
    sample = sample_of(tokenizer, spoken, left_out="accept")
    assert parts(tokenizer, sample)[1] == ["I look" + END]
    knows_calls = form_tokenizer("calls")
    sample = sample_of(knows_calls, messages[:2], left_out="accept")
    assert "zone" in parts(knows_calls, sample)[1][0]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>\nhm\n</think>\n\n4", "4"),
        ("\n<think></think>4", "4"),
        ("hm</think>\n4", "4"),
        ("4", "4"),
        ("use <think>x</think> tags", "use <think>x</think> tags"),
    ],
)
def test_only_a_leading_thought_is_removed(text: str, left: str) -> None:
    assert without_thinking(text, origin="here") == left


def test_only_a_leading_thought_with_an_end_is_removed() -> None:
    refused(r"IDLM-0229.*here opens", without_thinking, "<think>and so on", origin="here")
    for tag in ("<thinking>", "<|begin_of_thought|>", "<Think>", "\n<reasoning>"):
        with pytest.raises(UserError, match=f"IDLM-0229.*{re.escape(tag.strip())}, and only <think>"):
            without_thinking(f"{tag}and so on", origin="here")


@pytest.mark.parametrize(
    ("form", "messages", "lost"),
    [
        ("chatml", [QUESTION, answer(tool_calls=[CALL]), QUESTION], ["tool_calls of assistant turns"]),
        ("calls", [QUESTION, answer(tool_calls=[CALL]), QUESTION], []),
        ("two roles", [{"role": "system", "content": "Hi"}, QUESTION], ["content of system turns"]),
        ("dropped", [QUESTION, answer(content=THOUGHT), QUESTION], []),
        ("dropped", [QUESTION, answer(content="Yes", reasoning_content="WHY"), QUESTION], []),
    ],
)
def test_a_form_of_chats_loses_the_same_kinds_whatever_they_say(
    form: str, messages: list[dict[str, Any]], lost: list[str]
) -> None:
    tokenizer, known, drawn = form_tokenizer(form), dict[int, list[str]](), []

    def redraw(changed: Any, tools: Any) -> str:
        drawn.append(changed)
        return render(tokenizer, changed, open_turn=True, tools=tools)

    for question in ("Is it so?", "And now?"):
        messages[-1] = {**messages[-1], "content": question}
        assert kinds_left_out(messages, [], redraw=redraw, known=known) == lost
    assert len(drawn) == 1
