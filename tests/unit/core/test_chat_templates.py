"""Conversations through chat templates of real shapes: ids as transformers renders them, labels as the
assistant speaks, prompts as inference feeds them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from idlm.text.templates import render
from idlm.text.thoughts import without_thinking
from idlm.text.tokenizer import encode_messages, encode_prompt, load_tokenizer
from idlm.train.data.base import Encoder
from tests.unit.conversations import render_conversation

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
]
# Rewrites history as Qwen3 does: thoughts before the last question vanish, the last turn always has a block.
QWEN3 = """
{%- set ns = namespace(last_query=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}{%- set said = m.content %}
{%- if not thought and '</think>' in m.content %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- said + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
LLAMA3 = """
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
LLADA2 = """
{{- '<role>SYSTEM</role>' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{{- 'detailed thinking off<|role_end|>' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<role>HUMAN</role>' + m.content + '<|role_end|>' }}
{%- elif m.role == 'assistant' %}{{- '<role>ASSISTANT</role>' + m.content + '<|role_end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<role>ASSISTANT</role>' }}{%- endif %}
"""
CHATML = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}OPEN{{- m.content + INSIDE }}CLOSE{{- OUTSIDE }}
{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def chatml(inside: str, outside: str, *, is_marked: bool) -> str:
    marks = ("{%- generation %}", "{%- endgeneration %}") if is_marked else ("", "")
    return (
        CHATML.replace("OPEN", marks[0])
        .replace("CLOSE", marks[1])
        .replace("INSIDE", f"'{inside}'")
        .replace("OUTSIDE", f"'{outside}'")
    )


TEMPLATES = {
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "plain": chatml("<|im_end|>\\n", "", is_marked=False),
    "marked": chatml("<|im_end|>", "\\n", is_marked=True),
    "marked with its newline": chatml("<|im_end|>\\n", "", is_marked=True),
    "marked without its end": chatml("", "<|im_end|>\\n", is_marked=True),
}
WORDS = [
    *(
        "so",
        "the",
        "café",
        "sum",
        "12",
        "x=3",
        "naïve",
        "日本",
        "👍🏽",
        "is\n",
        "-",
        "a\t",
        "list,",
        "(3",
        "+",
        "4)",
    ),
    *("=", "7.\n\n", "|", "if", "not:", "<b>", "they're"),
]
# Breaks run behind the last line break of a run of white space, as those of Qwen and Llama 3 do.
PIECES = r"(?i:'s|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS) + "system user assistant\n\n"] * 4, trainer)
    tokenizer.add_tokens(
        [AddedToken(word, special=False, normalized=False) for word in ("<think>", "</think>")]
    )
    path = tmp_path_factory.mktemp("chat")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def tokenizer_with(directory, template: str) -> Any:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|eot_id|>" if template == "llama3" else "<|im_end|>",
        "bos_token": "<|begin_of_text|>",
        "chat_template": TEMPLATES[template],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(directory)


def conversation(rng: random.Random, *, num_turns: int, thinks: bool) -> list[dict[str, str]]:
    def text() -> str:
        return "w" + " ".join(rng.choices(WORDS, k=rng.randint(0, 12))) + "."

    messages = [{"role": "system", "content": text()}] if rng.random() < 0.5 else []
    for _ in range(num_turns):
        thought = f"<think>\n{text()}\n</think>\n\n" if thinks and rng.random() < 0.5 else ""
        messages.append({"role": "user", "content": text()})
        messages.append({"role": "assistant", "content": thought + text()})
    return messages


def transformers_ids(tokenizer: Any, messages: list[dict[str, str]], **extra: Any) -> list[int]:
    rendered = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **extra)
    return list(rendered["input_ids"])


@pytest.mark.sweep_but("marked without its end")
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "qwen3"])
def test_all_turns_of_random_conversations(directory, name: str) -> None:
    tokenizer, rng = tokenizer_with(directory, name), random.Random(1)
    end = tokenizer.eos_token
    for _ in range(60):
        messages = conversation(rng, num_turns=rng.randint(1, 4), thinks=True)
        token_ids, supervised = render_conversation(tokenizer, messages)
        assert token_ids == transformers_ids(tokenizer, messages)
        targets = [token_id for token_id, flag in zip(token_ids, supervised, strict=True) if flag]
        output = [m["content"] for m in messages if m["role"] == "assistant"]
        assert tokenizer.decode(targets) == "".join(text + end for text in output)
        last_ids, last = render_conversation(tokenizer, messages, turns="last")
        assert last_ids == token_ids
        targets = [token_id for token_id, flag in zip(token_ids, last, strict=True) if flag]
        assert tokenizer.decode(targets) == output[-1] + end
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt_ids = encode_messages(tokenizer, messages[:turn])
                assert token_ids[: len(prompt_ids)] == prompt_ids, "training sees another prompt"
                assert supervised[len(prompt_ids)]
                assert not supervised[len(prompt_ids) - 1]


@pytest.mark.sweep_but("strip")
@pytest.mark.parametrize("thinking", ["keep", "strip", "off"])
def test_a_template_that_rewrites_history_is_cut_into_turns(directory, thinking: str) -> None:
    tokenizer, rng = tokenizer_with(directory, "qwen3"), random.Random(2)
    extra = {"enable_thinking": False} if thinking == "off" else {}
    encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=True, thinking=thinking, turns="each")
    for _ in range(60):
        messages = conversation(rng, num_turns=rng.randint(1, 3), thinks=True)
        samples = encoder.messages(messages, origin="here")
        turns = [turn for turn, m in enumerate(messages) if m["role"] == "assistant"]
        assert len(samples) == len(turns)
        for sample, turn in zip(samples, turns, strict=True):
            output = messages[: turn + 1]
            if thinking != "keep":
                output = [m | {"content": without_thinking(m["content"], origin="")} for m in output]
            assert sample.token_ids.tolist() == transformers_ids(tokenizer, output, **extra)
            prompt_ids = encode_messages(tokenizer, output[:-1], **extra)
            assert sample.token_ids[: len(prompt_ids)].tolist() == prompt_ids
            assert sample.supervised.tolist().index(True) == len(prompt_ids)
            target = tokenizer.decode(sample.token_ids[sample.supervised])
            text = output[-1]["content"]
            has_thought = text.startswith("<think>")
            empty = "" if has_thought or thinking == "off" else "<think>\n\n</think>\n\n"
            assert target == f"{empty}{text}<|im_end|>"


def test_a_token_across_the_border_is_cut_as_at_inference(directory) -> None:
    tokenizer = tokenizer_with(directory, "plain")
    messages = [{"role": "user", "content": "w"}, {"role": "assistant", "content": "\n - a"}]
    token_ids, supervised = render_conversation(tokenizer, messages)
    prompt_ids = encode_messages(tokenizer, messages[:1])
    assert token_ids[: len(prompt_ids)] == prompt_ids
    assert supervised.index(True) == len(prompt_ids)
    assert tokenizer.decode(token_ids) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_ids_of_calls_are_as_short_as_a_template_wants(directory) -> None:
    tokenizer = load_tokenizer(directory)
    wanted = (
        "{% if NAME is defined %}{% if NAME|length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "{{ NAME }} {% endif %}"
    )
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{wanted.replace('NAME', 'm.tool_call_id')}"
        f"{{% for c in m.tool_calls or [] %}}{wanted.replace('NAME', 'c.id')}{{% endfor %}}{{% endfor %}}"
    )
    function = {"name": "f", "arguments": {}}
    calls = [{"id": name, "type": "function", "function": function} for name in ("call_1", "a1B2c3D4e")]
    results = [{"role": "tool", "content": "1", "tool_call_id": call["id"]} for call in calls]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    made = render(tokenizer, messages, open_turn=False).split()
    assert made[:2] == made[2:] and made[1] == "a1B2c3D4e" and made[0].isalnum()
    assert calls[0]["id"] == "call_1"


def test_strip_removes_the_thoughts_of_other_fields(directory) -> None:
    tokenizer = tokenizer_with(directory, "qwen3")
    messages = [
        {"role": "user", "content": "w"},
        {"role": "assistant", "content": "7", "reasoning_content": "3 + 4"},
    ]
    for thinking, is_kept in (("keep", True), ("strip", False), ("off", False)):
        encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=True, thinking=thinking)
        (sample,) = encoder.messages(messages, origin="here")
        assert ("3 + 4" in tokenizer.decode(sample.token_ids)) == is_kept


def test_prompts_think_as_the_checkpoints_own_template_says(directory) -> None:
    """Thinking is on by Qwen3's template, where I-DLM's figures were taken, and off by LLaDA2's: the engine
    renders the template's default, and nothing is put in behind it."""
    tokenizer = tokenizer_with(directory, "qwen3")
    sent = encode_prompt(tokenizer, "so the sum")
    assert tokenizer.decode(sent) == "<|im_start|>user\nso the sum<|im_end|>\n<|im_start|>assistant\n"
    off = encode_messages(tokenizer, [{"role": "user", "content": "so the sum"}], enable_thinking=False)
    assert tokenizer.decode(off[len(sent) :]) == "<think>\n\n</think>\n\n"
    tokenizer.chat_template = LLADA2
    assert tokenizer.decode(encode_prompt(tokenizer, "so the sum")) == (
        "<role>SYSTEM</role>detailed thinking off<|role_end|>"
        "<role>HUMAN</role>so the sum<|role_end|><role>ASSISTANT</role>"
    )
