"""What is told of texts: conversations that are written as text, and thoughts and tags within the answers."""

from __future__ import annotations

import copy

import pytest

from idlm.text.transcripts import is_transcript, opens_answer
from idlm.train.data.encoder import (
    LATER_BLOCK,
    OPENED,
    OTHER_TAGS,
    SPECIAL,
    TAGS_TWICE,
    TRANSCRIPT,
    UNKNOWN,
    Encoder,
)
from tests.unit.data.template_forms import FORMS, form_tokenizer, tokenizer_with
from tests.unit.data.test_rendered_turns import QUESTION, answer, sample_of

TRANSCRIPTS = [
    "### Human: a### Assistant: b",
    "Below is an instruction.\n\n### Instruction:\na\n\n### Response:\nb",
    "\n\nHuman: a\n\nAssistant: b",
    "**User:** a\n**Assistant:** b",
    "**User**: a\n**Bot**: b",
    "A chat. USER: a ASSISTANT: b</s>",
    "<s>[INST] a [/INST] b </s>",
    "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>",
    "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>assistant<|end_header_id|>b",
    "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb",
    "<|prompter|>a<|endoftext|><|assistant|>b",
    "<｜User｜>a<｜Assistant｜>b",
]
TEXTS = [
    "The user: he asks the assistant: go on.",
    "user: root\nmodel: x",
    "def f(user: str, assistant: str) -> None: ...",
    "Assistant: b\nHuman: a",
    "Human beings. Assistant professors.",
]


@pytest.mark.parametrize("text", TRANSCRIPTS)
def test_a_transcript_has_a_user_and_an_answer(text: str) -> None:
    assert is_transcript(text)
    assert opens_answer(text[: text.rindex("b")].rstrip())


@pytest.mark.parametrize("text", TEXTS)
def test_words_about_users_are_no_transcript(text: str) -> None:
    assert not is_transcript(text) and not opens_answer(text)


def test_turns_within_a_text_or_a_prompt_are_told() -> None:
    encoder = Encoder(form_tokenizer("chatml"), mask_token_id=None, use_chat_template=True)
    assert encoder.text("USER: a ASSISTANT: b", origin="here").notes == (TRANSCRIPT,)
    assert encoder.text("a<|endoftext|>b", origin="here").notes == (SPECIAL,)
    assert encoder.text("a<|im_end|>", origin="here").notes == ()
    for prompt, notes in (("\n\nHuman: a\n\nAssistant:", (OPENED,)), ("Human: a", ())):
        assert encoder.pair(prompt, "b", origin="here").notes == notes
    bare = Encoder(encoder.tokenizer, mask_token_id=None, use_chat_template=False)
    assert bare.pair("\n\nHuman: a\n\nAssistant:", "b", origin="here").notes == ()


def test_an_end_that_is_by_name_the_unknown_token_is_not_told() -> None:
    for unknown, notes in (("<|im_end|>", ()), ("b", (UNKNOWN,))):
        tokenizer = copy.deepcopy(form_tokenizer("chatml"))
        tokenizer.unk_token = unknown
        encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=False)
        assert encoder.pair("a", "b", origin="here").notes == notes


def test_thoughts_that_are_not_read_as_such_are_told() -> None:
    tokenizer = form_tokenizer("chatml")
    other, later = answer(content="<thinking>hm</thinking>4"), answer(content="4 <think>hm</think>")
    assert sample_of(tokenizer, [QUESTION, other]).notes == (OTHER_TAGS,)
    assert sample_of(tokenizer, [QUESTION, later], thinking="strip").notes == (LATER_BLOCK,)
    for output in (later, answer(content="<think>hm</think>4"), answer(content="<thinker> is a tag")):
        assert sample_of(tokenizer, [QUESTION, output]).notes == ()


def test_tags_of_a_tool_are_told_where_the_template_writes_them_too() -> None:
    result = {"role": "tool", "content": "<tool_response>\n4\n</tool_response>"}
    messages = [QUESTION, answer(content="I look"), result, answer(content="4")]
    tagged = FORMS["chatml"].replace(
        "{%- for m in messages %}",
        "{%- for m in messages %}{%- if m.role == 'tool' %}{{- '<tool_response>\\n' }}{%- endif %}",
    )
    assert sample_of(tokenizer_with(tagged), messages).notes == (TAGS_TWICE,)
    assert sample_of(form_tokenizer("chatml"), messages).notes == ()
