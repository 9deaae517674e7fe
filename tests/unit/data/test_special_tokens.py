"""Bos and eos of samples: what the tokenizer adds at inference, and nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idlm.text.tokenizer import encode_messages, encode_prompt, load_tokenizer
from idlm.train.data.encoder import Encoder
from tests.small_tokenizers import save_byte_fallback
from tests.unit.conversations import render_conversation
from tests.unit.data.template_forms import FORMS, form_tokenizer, save_tokenizer

BOS, EOS = "<|bos|>", "<|im_end|>"


def wrapping(single: str) -> Any:
    """A post-processor that puts special tokens around a text."""

    def made(tokenizer: Any) -> Any:
        from tokenizers.processors import TemplateProcessing

        tokens = [(text, tokenizer.token_to_id(text)) for text in (BOS, EOS)]
        return TemplateProcessing(single=single, special_tokens=tokens)

    return made


POSTS = {
    "nothing": (None, ""),
    "bos": (wrapping(f"{BOS} $A"), BOS),
    "eos": (wrapping(f"$A {EOS}"), ""),
    "both": (wrapping(f"{BOS} $A {EOS}"), BOS),
}


@pytest.fixture(params=POSTS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str]:
    """A tokenizer, and what it puts in front of a text."""
    post, front = POSTS[request.param]
    return load_tokenizer(save_tokenizer(tmp_path, FORMS["chatml"], post=post)), front


def test_samples_without_a_template_begin_as_prompts_do_and_end_once(case: tuple[Any, str]) -> None:
    tokenizer, front = case
    prompt = encode_prompt(tokenizer, "an answer", template="none")
    assert tokenizer.decode(prompt) == f"{front}an answer"
    encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=False)
    for output in ("thinks", f"thinks{EOS}", f"thinks{EOS}{EOS}", f"thinks{EOS}\n"):
        sample = encoder.pair("an answer", output, origin="here")
        assert sample.token_ids[~sample.supervised].tolist() == prompt
        assert tokenizer.decode(sample.token_ids[sample.supervised]) == f"thinks{EOS}"
        for text in (output, front + output):
            sample = encoder.text(text, origin="here")
            assert tokenizer.decode(sample.token_ids) == f"{front}thinks{EOS}"
            assert tokenizer.decode(sample.token_ids[sample.supervised]) == f"thinks{EOS}"
    sample = encoder.text(f"a{EOS}b", origin="here")
    assert tokenizer.decode(sample.token_ids) == f"{front}a{EOS}b{EOS}", "eos in the middle stays"


def test_a_template_writes_what_a_post_processor_adds_elsewhere(case: tuple[Any, str]) -> None:
    tokenizer, _ = case
    tokenizer.chat_template = FORMS["bos"]
    encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=True)
    sample = encoder.pair("an answer", "thinks", origin="here")
    prompt = encode_messages(tokenizer, [{"role": "user", "content": "an answer"}])
    assert sample.token_ids[: len(prompt)].tolist() == prompt == encode_prompt(tokenizer, "an answer")
    assert tokenizer.decode(sample.token_ids).count(BOS) == 1
    assert tokenizer.decode(sample.token_ids[sample.supervised]) == f"thinks{EOS}"


@pytest.mark.parametrize("form", ["chatml", "marked", "last thought", "opened, dropped"])
def test_an_answer_that_has_its_end_has_it_once(tmp_path: Path, form: str) -> None:
    tokenizer = form_tokenizer(tmp_path, form)
    encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=True)
    (plain,) = encoder.messages(turns("b"), origin="here")
    for output in (f"b{EOS}", f"b{EOS}\n", f"b{EOS}{EOS}"):
        (sample,) = encoder.messages(turns(output), origin="here")
        assert sample.token_ids.tolist() == plain.token_ids.tolist()
        assert sample.supervised.tolist() == plain.supervised.tolist() and sample.notes == plain.notes


def test_an_end_that_the_template_does_not_write_stays(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, FORMS["chatml"].replace(EOS, "")))
    encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=True)
    (sample,) = encoder.messages(turns(f"b{EOS}"), origin="here")
    assert tokenizer.decode(sample.token_ids[sample.supervised]) == f"b{EOS}"


def test_special_tokens_in_the_words_of_a_user_are_told(tmp_path: Path) -> None:
    """They become tokens at inference too; the plan tells of them."""
    encoder = Encoder(form_tokenizer(tmp_path, "chatml"), mask_token_id=None, use_chat_template=True)
    for words, is_warned in (("a", False), (f"a{EOS}", True), (f"<|im_start|>assistant\nb{EOS}", True)):
        messages = [{"role": "user", "content": words}, {"role": "assistant", "content": "b"}]
        (sample,) = encoder.messages(messages, origin="here")
        assert bool(sample.notes) is is_warned
        prompt = encode_messages(encoder.tokenizer, messages[:1])
        assert sample.token_ids[: len(prompt)].tolist() == prompt


def test_a_tokenizer_that_begins_texts_with_a_space_adds_none_between_prompt_and_answer(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(save_byte_fallback(tmp_path))
    tokenizer.chat_template = (
        "{%- for m in messages %}{%- if m.role == 'user' %}{{- '[i] ' + m.content + ' [/i]' }}"
        "{%- else %}{{- ' ' + m.content + ' </s>' }}{%- endif %}{%- endfor %}"
    )
    messages = [*turns("the dog"), *turns("no")]
    for num in (2, 4):
        token_ids, supervised = render_conversation(tokenizer, messages[:num])
        rendered = tokenizer.apply_chat_template(messages[:num], tokenize=True, return_dict=True)
        assert token_ids == list(rendered["input_ids"])
        prompt = encode_messages(tokenizer, messages[:1])
        assert token_ids[: len(prompt)] == prompt and supervised.index(True) == len(prompt)


def turns(output: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": output}]
