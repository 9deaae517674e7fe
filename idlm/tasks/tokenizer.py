"""The word-level tokenizer of a generated task, written as stock fast-tokenizer files.

Words include their leading space, digits are single tokens, and decoding gives every text of the task back.
Text outside the task's vocabulary encodes to `<unk>`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from idlm.tasks import TASKS

DEFAULT_TASK = "ledger"
BOS, EOS, PAD, UNK = "<bos>", "<eos>", "<pad>", "<unk>"
SPECIALS = (PAD, BOS, EOS, UNK)
SEPARATOR = "\n\n"
"""Separates prompt and response; one token."""
MAX_LENGTH = 1 << 17
"""Above this stock tokenizers warn; every level is shorter. A model's own limit is in its config."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)

_PIECE = r" ?[A-Za-z]+|[0-9]|####|\n\n|\n| |[^A-Za-z0-9 \n]"
_FIND_PIECES = re.compile(_PIECE).findall


def vocabulary(task: str = DEFAULT_TASK) -> dict[str, int]:
    """Return piece -> id: the specials, then every piece of the task's texts, sorted."""
    pieces = set("0123456789 \n") | {SEPARATOR}
    for text in TASKS.get(task).surface_texts():
        pieces.update(_FIND_PIECES(text))
    return {piece: idx for idx, piece in enumerate((*SPECIALS, *sorted(pieces)))}


def build_tokenizer(task: str = DEFAULT_TASK) -> Any:
    """Return a `tokenizers.Tokenizer`; plain encoding prepends `<bos>`, the chat template writes its own."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = vocabulary(task)
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
    )
    tokenizer.add_special_tokens(
        [AddedToken(special, special=True, normalized=False) for special in SPECIALS]
    )
    return tokenizer


def save_tokenizer(directory: Path, task: str = DEFAULT_TASK) -> int:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory`; return the number of ids."""
    tokenizer = build_tokenizer(task)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return int(tokenizer.get_vocab_size())
