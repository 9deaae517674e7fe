"""Which class loads a tokenizer: transformers' own, the file as it is, or one with the rules of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from idlm.errors import UserError
from idlm.text.tokenizer import encode_messages, load_tokenizer, special_token_ids
from tests.small_tokenizers import CHATML, save_byte_level

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("1", "2"), ("Ġ", "hello"))
CODE = {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}


def save_dream(directory: Path, *, lists_added: bool = True, **config: Any) -> Path:
    """Vocabulary, merges and special tokens in the files of Dream, which has no tokenizer.json."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in MERGES)]
    (directory / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    lines = ["#version: 0.2", *map(" ".join, MERGES)]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n")
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    added = {
        str(len(words) + number): {"content": token, "special": True, **flags}
        for number, token in enumerate(SPECIAL)
    }
    named: dict[str, Any] = {"eos_token": SPECIAL[0], "pad_token": SPECIAL[0], "mask_token": SPECIAL[3]}
    content = {**named, "chat_template": CHATML, **config}
    if lists_added:
        content["added_tokens_decoder"] = added
    else:
        ids = {token["content"]: int(token_id) for token_id, token in added.items()}
        (directory / "added_tokens.json").write_text(json.dumps(ids))
        named["additional_special_tokens"] = SPECIAL[1:3]
        (directory / "special_tokens_map.json").write_text(json.dumps(named))
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    (directory / "config.json").write_text('{"model_type": "Dream"}')
    return directory


@pytest.mark.parametrize(
    ("lists_added", "config"),
    [
        (True, {"tokenizer_class": "DreamTokenizer", "auto_map": CODE}),
        (True, {"tokenizer_class": "DreamTokenizer"}),
        (True, {"auto_map": CODE}),
        (False, {"tokenizer_class": "DreamTokenizer", "auto_map": CODE}),
    ],
)
def test_dream_has_the_rules_of_qwen2(tmp_path: Path, lists_added: bool, config: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(save_dream(tmp_path, lists_added=lists_added, **config))
    eos, start, end, mask = special = [len(tokenizer) - 4 + index for index in range(4)]
    assert special_token_ids(tokenizer) == {*special}
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id) == (eos, mask)
    # Digits stand alone, composed characters are equal to decomposed ones, and special tokens are found.
    one, two, hello = (tokenizer.convert_tokens_to_ids(token) for token in ("1", "2", "hello"))
    assert tokenizer.encode("hello12<|mask|>") == [hello, one, two, mask]
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
    turn = encode_messages(tokenizer, [{"role": "user", "content": "hello"}])
    assert (turn.count(start), turn.count(end), turn.count(hello)) == (2, 1, 1)
    assert tokenizer.decode(tokenizer.encode(" hello  héllo\n")) == " hello  héllo\n"


@pytest.mark.parametrize("name", ["DreamTokenizer", "SomeTokenizer", "SomeTokenizerFast", None])
def test_the_file_is_complete_where_the_class_is_unknown(tmp_path: Path, name: str | None) -> None:
    path = save_byte_level(tmp_path) / "tokenizer_config.json"
    expected = load_tokenizer(tmp_path).encode("Hi  12")
    code = {"AutoTokenizer": [None, "tokenization_some.SomeTokenizerFast"]}
    config = json.loads(path.read_text()) | {"tokenizer_class": name, "auto_map": code}
    path.write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(tmp_path).encode("Hi  12") == expected


def test_an_unknown_class_without_the_file_is_refused_by_name(tmp_path: Path) -> None:
    save_dream(tmp_path, tokenizer_class="SomeTokenizer")
    with pytest.raises(UserError, match=r"IDLM-0203.*SomeTokenizer is code .* no tokenizer\.json"):
        load_tokenizer(tmp_path)
