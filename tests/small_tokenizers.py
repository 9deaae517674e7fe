"""Small tokenizers of the two kinds that split characters over tokens, and texts that make them do so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
TEXTS = [
    "Plain words, 12 numbers.\n\n\tTabs  and   spaces ",
    "naïve café — Ünïcödé, 日本語のテキスト, 한국어, Ελληνικά, עברית",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 and 𝔘𝔫𝔦 \u200b zero width",
    "a real \ufffd in the text \ufffd\ufffd x \ufffd",
    " leading space",
]


def save_byte_level(directory: Path) -> Path:
    """A byte-level BPE with ChatML's specials, trained on too little text to merge most characters whole."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:2] * 3, trainer)
    return _save_chatml(tokenizer, directory)


TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def save_tagged(
    directory: Path, *, special: bool = False, words: Sequence[str] = (), special_words: Sequence[str] = ()
) -> Path:
    """Bytes, ChatML's special tokens, and as added tokens the tags of reasoning and of calls, special or not,
    one more of this form, which is text, `words` and `special_words`: like the tokenizers of Qwen."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: idx for idx, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in TAGS])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("<|fim_pad|>", *words)])
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in special_words])
    return _save_chatml(tokenizer, directory)


def _save_chatml(tokenizer: Any, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def save_byte_fallback(directory: Path) -> Path:
    """Like sentencepiece: words start with a meta space, unknown characters fall back to byte tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"abcdefghijklmnopqrstuvwxyz",
        "\u2581the",
    ]
    vocab = {piece: idx for idx, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>", "unk_token": "<unk>"}')
    return directory
