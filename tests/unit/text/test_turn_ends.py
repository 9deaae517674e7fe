"""Where answers begin and end, under templates that write the last turn otherwise than those before it."""

from __future__ import annotations

import copy

from idlm.text.tokenizer import encode_messages
from tests.unit.data.template_forms import FORMS, ONE_TOKEN_HEADERS, form_tokenizer, tokenizer_with
from tests.unit.data.test_rendered_turns import CALL, END, QUESTION, answer, encoder_of, parts, sample_of


def test_what_a_template_writes_after_the_last_turn_is_not_trained() -> None:
    messages = [QUESTION, answer(content="Yes"), QUESTION, answer(content="No")]
    for form in ("second end", "always opened"):
        tokenizer = form_tokenizer(form)
        sample = sample_of(tokenizer, messages)
        assert parts(tokenizer, sample)[1] == ["Yes" + END, "No" + END]
        assert tokenizer.decode(sample.token_ids).rstrip().endswith("No" + END)
    without_text = tokenizer_with(ONE_TOKEN_HEADERS)
    sample = sample_of(without_text, messages)
    assert parts(without_text, sample)[1] == ["Yes" + END, "No" + END]
    template = FORMS["second end"].replace("'<|im_end|>\\n'", "'\\n'")
    only_eos = tokenizer_with(template)
    sample = sample_of(only_eos, messages[:2])
    assert parts(only_eos, sample)[1] == ["Yes\n" + END]


def test_an_answer_begins_where_the_prompt_ends_though_it_rewrites_the_turns_before() -> None:
    form = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role }}"
        "{%- if m.reasoning_content and (loop.last or messages[-1].role != 'assistant') %}"
        "{{- '<|bos|>' + m.reasoning_content + '<|im_start|>assistant' }}{%- endif %}"
        "{{- '<|endoftext|>' + m.content + '<|im_end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}"
    )
    tokenizer = tokenizer_with(form)
    messages = [QUESTION, answer(content="Look", reasoning_content="HOW"), answer("tool", content="CET")]
    last = answer(content="Yes", reasoning_content="WHY")
    sample = sample_of(tokenizer, [*messages, last], turns="last")
    prompt, targets = parts(tokenizer, sample)
    assert prompt == tokenizer.decode(encode_messages(tokenizer, messages)) and "HOW" in prompt
    assert targets == ["<|bos|>WHY<|im_start|>assistant<|endoftext|>Yes" + END]


def test_a_last_instruction_of_a_template_with_tools_belongs_to_the_prompt() -> None:
    order = "{{- '<|im_start|>system\\nAct now<|im_end|>\\n' }}"
    form = FORMS["calls"].replace("{%- endfor %}{%- if add_gen", "{%- endfor %}" + order + "{%- if add_gen")
    tool = {"type": "function", "function": {"name": "zone", "description": "Zone of a city"}}
    tokenizer = copy.copy(tokenizer_with(FORMS["chatml"]))
    tokenizer.chat_template = {"default": FORMS["chatml"], "tool_use": form}
    (*_, last) = encoder_of(tokenizer, turns="each").messages(
        [QUESTION, answer(tool_calls=[CALL]), answer("tool", content="CET"), answer(content="Yes")],
        origin="here",
        tools=[tool],
    )
    prompt, targets = parts(tokenizer, last)
    assert targets == ["Yes" + END] and prompt.endswith(f"Act now{END}\n<|im_start|>assistant\n")
