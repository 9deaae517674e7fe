"""The word-level tokenizer of the generated tasks, written as stock fast-tokenizer files.

Words include their leading space, digits are single tokens, and decoding gives every task text back.
The embedding has more rows than the tokenizer has ids, so the first spare row can be the mask token, as in
Qwen3 (151669). Text outside the tasks' vocabulary encodes to `<unk>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from idlm.errors import UserError
from idlm.tasks import TASKS
from idlm.tasks.base import TaskSample

BOS, EOS, PAD, UNK = "<bos>", "<eos>", "<pad>", "<unk>"
SPECIALS = (PAD, BOS, EOS, UNK)
SEPARATOR = "\n\n"
"""Separates prompt and response; one token."""
ROW_MULTIPLE = 32
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)

_PIECE = r" ?[A-Za-z]+|[0-9]|####|\n\n|\n| |[^A-Za-z0-9 \n]"
_FIND_PIECES = re.compile(_PIECE).findall


def vocabulary() -> dict[str, int]:
    """Return piece -> id: the specials, then every piece of every registered task in sorted order."""
    pieces = set("0123456789 \n") | {SEPARATOR}
    for name in TASKS.names():
        for text in TASKS.get(name).surface_texts():
            pieces.update(_FIND_PIECES(text))
    return {piece: idx for idx, piece in enumerate((*SPECIALS, *sorted(pieces)))}


def num_embedding_rows(num_ids: int) -> int:
    """Return the embedding size for `num_ids` token ids: a multiple of 32 with at least one spare row."""
    return (num_ids // ROW_MULTIPLE + 1) * ROW_MULTIPLE


def build_tokenizer() -> Any:
    """Return a `tokenizers.Tokenizer`; plain encoding prepends `<bos>`, the chat template writes its own."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = vocabulary()
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


def save_tokenizer(directory: Path) -> int:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory`; return the number of ids."""
    tokenizer = build_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return int(tokenizer.get_vocab_size())


class TaskEncoder:
    """Bulk encoder of task samples: the tokenizer's ids from one dictionary and one regular expression.

    `ids` is the tokenizer's `get_vocab()`: samples are encoded for that checkpoint, whichever tasks exist
    now.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a task text, without specials; an unknown word raises IDLM-0219."""
        ids = self._ids
        try:
            return [ids[piece] for piece in _FIND_PIECES(text)]
        except KeyError as error:
            raise UserError(
                "IDLM-0219",
                f"{error.args[0]!r} is not in the task vocabulary of {len(ids)} pieces",
                fix="encode text from outside the tasks with the tokenizer itself",
            ) from None

    def encode_sample(self, sample: TaskSample) -> tuple[list[int], list[int]]:
        """Return (prompt ids, response ids): `<bos>` prompt separator, and response `<eos>`."""
        ids = self._ids
        prompt_ids = [ids[BOS], *self.encode(sample.prompt), ids[SEPARATOR]]
        return prompt_ids, [*self.encode(sample.response), ids[EOS]]
