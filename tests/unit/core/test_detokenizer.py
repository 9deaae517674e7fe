"""The text of an answer: streamed pieces are the whole, whatever the chunks, and the whole is what
transformers decodes, but for runs of byte tokens with a broken one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from idlm.tasks import TASKS
from idlm.tasks.tokenizer import save_tokenizer
from idlm.text import tokenizer as tokens
from idlm.text.detokenizer import Detokenizer, answer_text
from tests.small_tokenizers import TEXTS, save_byte_fallback, save_byte_level

QWEN3 = Path(__file__).parents[4] / "shared" / "data" / "tokenizers" / "qwen3"
FALLBACK = "byte_fallback"
BROKEN = bytes.fromhex("c3 a9 e2 9c 93 f0 9f 98 80 41 ef bf bd")
"""Of these, characters of one to four bytes can be made, and parts of them."""


@pytest.fixture(scope="module")
def all_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    task, byte_level, byte_fallback = (tmp_path_factory.mktemp(name) for name in ("task", "level", "back"))
    save_tokenizer(task)
    paths = {"task": task, "byte_level": save_byte_level(byte_level)}
    paths |= {FALLBACK: save_byte_fallback(byte_fallback)} | ({"qwen3": QWEN3} if QWEN3.is_dir() else {})
    return {name: tokens.load_tokenizer(path) for name, path in paths.items()}


def _byte_ids(tokenizer: Any, run: bytes) -> list[int]:
    """The tokens of single bytes, of either kind."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in run]
    unknown = (None, tokenizer.unk_token_id)
    return [
        tokenizer.convert_tokens_to_ids(bytes_to_unicode()[byte]) if token_id in unknown else token_id
        for byte, token_id in zip(run, ids, strict=True)
    ]


def _streamed(tokenizer: Any, token_ids: Sequence[int], rng: random.Random) -> str:
    """Pushed in random chunks; checked against one at a time, and that nothing is left over."""
    one, many = Detokenizer(tokenizer), Detokenizer(tokenizer)
    shown, index = "", 0
    while index < len(token_ids):
        num = rng.choice((1, 2, 3, 70))
        shown += many.push(token_ids[index : index + num])
        index += num
    shown += many.flush()
    assert shown == "".join(one.push([token_id]) for token_id in token_ids) + one.flush()
    assert many.flush() == ""
    return shown


def _whole(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)


def _random_ids(tokenizer: Any, rng: random.Random) -> list[int]:
    """Any ids, two without a token too, or mostly bytes of which characters can be made."""
    pool = _byte_ids(tokenizer, BROKEN) if rng.random() < 0.5 else []
    num_ids = rng.randint(0, 120 if rng.random() < 0.1 else 20)
    return [
        rng.choice(pool) if pool and rng.random() < 0.9 else rng.randrange(len(tokenizer) + 2)
        for _ in range(num_ids)
    ]


def test_text_is_unchanged_by_a_round_trip(all_tokenizers: dict[str, Any]) -> None:
    rng = random.Random(0)
    for name, tokenizer in all_tokenizers.items():
        for text in TEXTS if name != "task" else []:
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            shown = _streamed(tokenizer, token_ids, rng)
            assert shown == answer_text(tokenizer, token_ids) == _whole(tokenizer, token_ids)
            assert shown == text or name == "qwen3", name
    task, tokenizer = TASKS.get("ledger")(level="tiny"), all_tokenizers["task"]
    for index in range(20):
        response = task.sample(index, "test").response
        token_ids = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
        assert _streamed(tokenizer, token_ids, rng) == response


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2))
def test_random_ids_have_the_text_that_transformers_decodes(
    all_tokenizers: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    for name, tokenizer in all_tokenizers.items():
        for _ in range(150):
            token_ids = [rng.randrange(len(tokenizer) + 2) for _ in range(rng.randint(0, 80))]
            if name in ("byte_level", "qwen3"):
                token_ids = _random_ids(tokenizer, rng)
            shown, whole = _streamed(tokenizer, token_ids, rng), _whole(tokenizer, token_ids)
            assert shown == answer_text(tokenizer, token_ids)
            assert shown == whole or (name == FALLBACK and "\ufffd" in whole), (name, token_ids)


def test_each_broken_byte_of_a_run_is_one_sign_and_spoils_no_other(all_tokenizers: dict[str, Any]) -> None:
    """Against characters read off the bytes one after the other."""
    rng, tokenizer = random.Random(5), all_tokenizers[FALLBACK]
    start = tokenizer.get_vocab()["a"]
    for _ in range(600):
        run = bytes(rng.choices(BROKEN, k=rng.randint(0, 16)))
        token_ids = [start, *_byte_ids(tokenizer, run)]
        expected, index = "a", 0
        while index < len(run):
            pieces = (run[index : index + size] for size in range(1, 5))
            piece = next((piece for piece in pieces if _is_character(piece)), None)
            expected += "\ufffd" if piece is None else piece.decode()
            index += 1 if piece is None else len(piece)
        assert _streamed(tokenizer, token_ids, rng) == answer_text(tokenizer, token_ids) == expected


def _is_character(piece: bytes) -> bool:
    try:
        return len(piece.decode()) == 1
    except UnicodeDecodeError:
        return False


def test_half_a_character_is_held_back(all_tokenizers: dict[str, Any]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    token_ids = tokenizer.encode("a👍b", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in token_ids] == ["a", "", "", "", "👍", "b"]
    pieces = [detokenizer.push([token_ids[1]]), detokenizer.push(token_ids[2:3]), detokenizer.flush()]
    assert pieces == ["", "", "\ufffd"]


def test_what_can_become_no_character_is_not_held_back(all_tokenizers: dict[str, Any]) -> None:
    for name in ("byte_level", FALLBACK):
        tokenizer = all_tokenizers[name]
        detokenizer = Detokenizer(tokenizer)
        shown = "".join(detokenizer.push(_byte_ids(tokenizer, b"\xff")) for _ in range(20))
        assert 16 < len(shown) <= 20
        assert detokenizer.push(_byte_ids(tokenizer, b"A"))[-1] == "A"


@pytest.mark.parametrize("name", ["byte_level", FALLBACK])
def test_an_id_without_a_token_takes_no_space_away(all_tokenizers: dict[str, Any], name: str) -> None:
    tokenizer = all_tokenizers[name]
    words = tokenizer.encode("c the", add_special_tokens=False)
    expected = _whole(tokenizer, words)
    for spare in (len(tokenizer) + 1, tokenizer.eos_token_id):
        for index in range(len(words) + 1):
            token_ids = [*words[:index], spare, *words[index:]]
            assert _streamed(tokenizer, token_ids, random.Random(0)) == expected
    whole_word = all_tokenizers[FALLBACK].get_vocab()
    token_ids = [whole_word["c"], len(all_tokenizers[FALLBACK]) + 1, whole_word["\u2581the"]]
    assert _streamed(all_tokenizers[FALLBACK], token_ids, random.Random(0)) == "c the"


class _Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.num_decoded = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, token_ids: list[int], **settings: Any) -> str:
        self.num_decoded += len(token_ids)
        return str(self.tokenizer.decode(token_ids, **settings))


@pytest.mark.sweep_but("byte_level-a")
@pytest.mark.parametrize("text", [b"\xff", "\u4e00".encode(), b"a"])
@pytest.mark.parametrize("name", ["byte_level", FALLBACK])
def test_the_work_is_linear(all_tokenizers: dict[str, Any], name: str, text: bytes) -> None:
    """Long runs of broken bytes, of characters in parts, and of whole ones: in one piece and in many."""
    ids = _byte_ids(all_tokenizers[name], text)
    for size in (1, 6000):
        counts = []
        for num in (1500, 6000):
            tokenizer = _Counting(all_tokenizers[name])
            detokenizer, given = Detokenizer(tokenizer), (ids * num)[:num]
            for start in range(0, num, size):
                detokenizer.push(given[start : start + size])
            detokenizer.flush()
            counts.append(tokenizer.num_decoded)
        assert num <= counts[1] <= 5 * counts[0]


def test_an_unbroken_answer_is_decoded_once(all_tokenizers: dict[str, Any]) -> None:
    for name, inner in all_tokenizers.items():
        token_ids = inner.encode("Lea has 9 shells. " * 40, add_special_tokens=False)
        tokenizer = _Counting(inner)
        assert answer_text(tokenizer, [inner.eos_token_id, *token_ids, len(inner) + 1]) == _whole(
            inner, token_ids
        )
        assert tokenizer.num_decoded == len(token_ids), name
