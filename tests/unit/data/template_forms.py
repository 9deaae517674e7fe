"""Chat templates of the forms that models have, short and of the same behaviour, and tokenizers with them."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from idlm.text.tokenizer import load_tokenizer

OPENER = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}PREFILL{%- endif %}"
PLAIN_TURN = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
CHATML = "{%- for m in messages %}" + PLAIN_TURN + "{%- endfor %}" + OPENER
LAST_THOUGHT = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}{%- set said = m.content %}
{%- if '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1] %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last WHEN %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- said + '<|im_end|>\\n' }}
{%- else %}
""" + (PLAIN_TURN + "{%- endif %}{%- endfor %}" + OPENER)
DROPS_THOUGHTS = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}"
    "{%- else %}" + PLAIN_TURN + "{%- endif %}{%- endfor %}" + OPENER
)
OPENS, CLOSES = "{{- '<think>\\n' }}", "{{- '<think>\\n\\n</think>\\n\\n' }}"
OFF = "enable_thinking is defined and not enable_thinking"
FORMS = {
    "chatml": CHATML.replace("PREFILL", ""),
    "last thought": LAST_THOUGHT.replace("WHEN", "and (loop.last or thought)").replace(
        "PREFILL", f"{{%- if {OFF} %}}{CLOSES}{{%- endif %}}"
    ),
    "opened": LAST_THOUGHT.replace("WHEN", "").replace("PREFILL", OPENS),
    "opened, dropped": DROPS_THOUGHTS.replace("PREFILL", OPENS),
    "dropped": DROPS_THOUGHTS.replace("PREFILL", ""),
    "opened unless off": LAST_THOUGHT.replace("WHEN", "").replace(
        "PREFILL", f"{{%- if {OFF} %}}{CLOSES}{{%- else %}}{OPENS}{{%- endif %}}"
    ),
    "closed unless on": LAST_THOUGHT.replace("WHEN", "and thought").replace(
        "PREFILL", f"{{%- if enable_thinking %}}{OPENS}{{%- else %}}{CLOSES}{{%- endif %}}"
    ),
    "closed": CHATML.replace("PREFILL", CLOSES),
    "system by default": "{%- if messages[0].role != 'system' %}{{- 'You are kind.\\n' }}{%- endif %}"
    + CHATML.replace("PREFILL", ""),
    "bos": "{{- bos_token }}" + CHATML.replace("PREFILL", ""),
    "two roles": "{%- for m in messages %}{%- if m.role in ('user', 'assistant') %}"
    + PLAIN_TURN
    + "{%- endif %}{%- endfor %}"
    + OPENER.replace("PREFILL", ""),
    "calls": "{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{%- endfor %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}" + OPENER.replace("PREFILL", ""),
}
FORMS["marked"] = FORMS["chatml"].replace(
    PLAIN_TURN,
    "{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"
    "{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}",
)
FORMS["marked with its header"] = FORMS["chatml"].replace(
    PLAIN_TURN,
    "{%- if m.role == 'assistant' %}{% generation %}" + PLAIN_TURN + "{% endgeneration %}"
    "{%- else %}" + PLAIN_TURN + "{%- endif %}",
)
HEADERS_MARKED = {
    "its line break": FORMS["marked"]
    .replace(
        "'\\n' }}{%- if m.role == 'assistant' %}{% generation %}{{- m",
        "'' }}{%- if m.role == 'assistant' %}{% generation %}{{- '\\n' + m",
    )
    .replace("{%- else %}{{- m.content", "{%- else %}{{- '\\n' + m.content"),
    "all of it, and another end": FORMS["marked with its header"].replace(
        "{% endgeneration %}",
        "{%- if loop.last and not add_generation_prompt %}{{- '<|endoftext|>' }}{%- endif %}"
        "{% endgeneration %}",
    ),
}
"""Marks of answers that hold what opens a turn: its end (Qwen2.5 in TRL), or all of it (gpt-oss in TRL)."""
SYSTEM_LAST = (
    "{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}{%- for m in rest %}"
    "{%- if m.role == 'user' %}"
    "{{- '[I] ' + (messages[0].content + ' ' if loop.last and rest != messages else '') }}"
    "{{- m.content + '[/I]' }}"
    "{%- elif m.tool_calls %}{{- '[C] ' + m.tool_calls[0].function | tojson + '<|im_end|>' }}"
    "{%- else %}{{- ' ' + m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
)
"""Nothing opens a turn, and a system prompt is in the last turn if that is the user's."""
FORMS["second end"] = FORMS["chatml"] + "{%- if not add_generation_prompt %}{{- eos_token }}{%- endif %}"
FORMS["always opened"] = FORMS["chatml"].replace(" if add_generation_prompt", " if true")
ONE_TOKEN_HEADERS = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|im_start|>' }}"
    "{{- ('<|endoftext|>' if m.role == 'assistant' else '<|bos|>') + m.content + '<|im_end|>' }}{%- endfor %}"
    "{{- '<|im_start|><|endoftext|>' }}"
)
"""Of Command A: special tokens alone open a turn, and the next answer is always opened."""
NOT_CLOSED = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
"""Of GLM-4: nothing closes a turn."""
FORMS["behind an opened block"] = (
    "{%- for m in messages %}{%- if m.role == 'assistant' and loop.last %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- else %}" + PLAIN_TURN + "{%- endif %}{%- endfor %}" + OPENER.replace("PREFILL", OPENS)
)
THINKING_SWITCH = (
    "{%- if not thinking is defined %}{%- set thinking = false %}{%- endif %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n</think>' + m.content.split('</think>')[-1] + '<|im_end|>\\n' }}"
    "{%- else %}" + PLAIN_TURN + "{%- endif %}{%- endfor %}"
) + OPENER.replace("PREFILL", "{{- '<think>' if thinking else '</think>' }}")
OPENS_AFTER_USERS = CHATML.replace(OPENER, "").replace(
    "{%- endfor %}",
    "{%- if loop.last and m.role == 'user' and add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}{%- endfor %}",
)


def save_tokenizer(directory: Path, template: Any, *, post: Any = None, **config: Any) -> Path:
    """Write a byte-level BPE with ChatML's tokens; `post` makes a post-processor of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system thinks of an answer. "] * 3, trainer)
    if post is not None:
        tokenizer.post_processor = post(tokenizer)
    tokenizer.save(str(directory / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|bos|>",
        "pad_token": "<|endoftext|>",
        **({} if template is None else {"chat_template": template}),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(values | config))
    return directory


@functools.cache
def tokenizer_with(template: str) -> Any:
    """The same tokenizer for all tests: a test that changes it takes a copy."""
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(save_tokenizer(Path(folder), template))


def form_tokenizer(form: str) -> Any:
    return tokenizer_with(FORMS[form])
