"""Which class loads a tokenizer; bytes and positions of single tokens, and what log-probabilities tell."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from idlm.infer.server.messages import AnswerEvent, SampleCounts
from idlm.infer.server.protocol.requests import ChatRequest, CompletionRequest
from idlm.infer.server.replies.choices import ChatReply, CompletionReply, Shown, TokenTexts
from idlm.tasks.tokenizer import save_tokenizer
from idlm.text.detokenizer import answer_text
from idlm.text.token_bytes import TokenBytes, TokenOffsets, prompt_offsets
from idlm.text.tokenizer import encode_messages, encode_prompt, encode_text, load_tokenizer, special_token_ids
from tests.errors import refused
from tests.small_tokenizers import CHATML, TEXTS, save_byte_fallback, save_byte_level, save_tagged

SAVERS = {"byte_level": save_byte_level, "byte_fallback": save_byte_fallback, "tagged": save_tagged}
FIGURES = SampleCounts("stop", 1, 1, 0, 1, [], [], "exact")


@pytest.fixture(scope="module", params=SAVERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(SAVERS[request.param](tmp_path_factory.mktemp(request.param)))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return encode_text(tokenizer, text, after="\n")


@pytest.mark.parametrize("text", [*TEXTS, "é😊x", "¡­ÿ\x7f\x00"], ids=ascii)
def test_the_bytes_of_tokens_are_those_of_their_text(tokenizer: Any, text: str) -> None:
    bytes_of = TokenBytes(tokenizer)
    shown = b"".join(map(bytes_of, tokenizer.encode(text, add_special_tokens=False))).decode()
    # Sentencepiece begins a text with a space.
    assert shown in (text, f" {text}")


def test_a_space_and_an_added_token_stay(tokenizer: Any) -> None:
    texts, the = TokenTexts(tokenizer), tokenizer.encode(" the", add_special_tokens=False)
    assert "".join(map(texts.text, the)).lstrip() == "the"
    assert "".join(map(texts.text, the)).startswith(" ")
    assert texts.text_and_bytes(tokenizer.eos_token_id) == (
        tokenizer.eos_token,
        [*tokenizer.eos_token.encode()],
    )


def test_places_count_characters(tokenizer: Any) -> None:
    """A character's bytes all begin where it does, and special tokens take no place."""
    eos = tokenizer.eos_token_id
    first, second = (len(ids_of(tokenizer, character)) for character in "é😊")
    answer = ids_of(tokenizer, "é😊x")
    answer = [*answer[:first], eos, *answer[first:], eos]
    text, indices = answer_text(tokenizer, answer), TokenOffsets(tokenizer).push(answer)
    assert text == "é😊x"
    assert indices == [*[0] * first, 1, *[1] * second, 2, 3]
    for prompt in ("é😊x", f"é{tokenizer.eos_token}", "the"):
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        last = len(answer_text(tokenizer, ids[-1:])) or len(tokenizer.eos_token)
        assert prompt_offsets(tokenizer, prompt, ids)[-1] == len(prompt) - last


def test_what_the_tokenizer_puts_in_front_takes_a_place_where_the_text_spells_it(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for prompt, offsets in (("<bos>Lea 9", [0, 5]), ("Lea 9", [0, 0])):
        ids = encode_prompt(tokenizer, prompt, template="none")
        assert prompt_offsets(tokenizer, prompt, ids)[:2] == offsets


def completion(texts: TokenTexts, events: list[AnswerEvent], **body: Any) -> list[dict[str, Any]]:
    generation: Any = SimpleNamespace(prompts=[[1]], num_samples=1)
    reply = CompletionReply(
        CompletionRequest(prompt="a", logprobs=2, **body), generation, Shown("tiny", texts)
    )
    choices = [reply.deltas(0, event, is_first=False)[0] for event in events]
    return [choice["logprobs"] for choice in choices]


def test_alternatives_of_one_text_are_all_there(tokenizer: Any) -> None:
    texts = TokenTexts(tokenizer)
    broken = [token for token in ids_of(tokenizer, "😊é") if len(texts.text_and_bytes(token)[1]) == 1]
    first, *others = broken
    values = {token: -float(index) for index, token in enumerate(others, start=1)}
    event = AnswerEvent("0-0", 0, [first], "", [(first, 0.0, [*values.items()])])
    [shown] = completion(texts, [event])
    [top] = shown["top_logprobs"]
    assert [*top.values()] == [0.0, *values.values()] and shown["tokens"] == [next(iter(top))]
    # Also of two tokens whose bytes are equal.
    assert TokenTexts(None).by_text({3: -1.0, 5: -2.0}) == {"token_id:3": -1.0, "token_id:5": -2.0}
    texts.text_and_bytes = lambda _: ("a", [97])  # type: ignore[assignment]
    assert texts.by_text({3: -1.0, 5: -2.0}) == {"a": -1.0, "token_id:5": -2.0}


def test_the_drawn_token_is_among_its_alternatives(tokenizer: Any) -> None:
    event = AnswerEvent("0-0", 0, [40], "", [(40, -3.0, [(41, -0.5), (42, -1.0)])])
    [shown] = completion(TokenTexts(tokenizer), [event])
    assert sorted(shown["top_logprobs"][0].values()) == [-3.0, -1.0, -0.5]


def test_no_place_is_beyond_the_text(tokenizer: Any) -> None:
    """A stop string is cut off the text and not off the tokens."""
    ids = ids_of(tokenizer, "abcd")[-4:]
    entries: Any = [(token, 0.0, []) for token in ids]
    [shown] = completion(TokenTexts(tokenizer), [AnswerEvent("0-0", 0, ids, "ab", entries, FIGURES)])
    assert shown["text_offset"] == [0, 1, 2, 2]


def test_chats_tell_true_bytes(tokenizer: Any) -> None:
    generation: Any = SimpleNamespace(prompts=[[1]], num_samples=1)
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "logprobs": True})
    reply: Any = ChatReply(body, generation, Shown("tiny", TokenTexts(tokenizer)))
    ids = ids_of(tokenizer, "😊é")
    event = AnswerEvent("0-0", 0, ids, "", [(token, 0.0, [(token, 0.0)]) for token in ids])
    shown = reply._logprobs(0, event)["content"]
    assert bytes(byte for each in shown for byte in each["bytes"]).decode().strip() == "😊é"
    assert [each["top_logprobs"][0]["bytes"] for each in shown] == [each["bytes"] for each in shown]


def test_a_completion_goes_on_where_its_prompt_ends(tokenizer: Any) -> None:
    """Decoders of sentencepiece drop the space that a text begins with."""
    prompt, answer = ids_of(tokenizer, "the the"), encode_text(tokenizer, " the", after="the")
    eos, texts = tokenizer.eos_token_id, TokenTexts(tokenizer)
    for before, expected in ((prompt, " the"), ([eos], answer_text(tokenizer, answer))):
        generation: Any = SimpleNamespace(prompts=[before], num_samples=2)
        body = CompletionRequest(prompt="a", logprobs=0)
        for parts in ([answer], [[token] for token in answer]):
            reply = CompletionReply(body, generation, Shown("tiny", texts))
            text, offsets = "", list[int]()
            for ids in parts:
                detokenized = answer_text(tokenizer, answer) if ids == answer else answer_text(tokenizer, ids)
                event = AnswerEvent("0-0", 1, ids, detokenized, [(token, 0.0, []) for token in ids])
                [choice] = reply.deltas(1, event, is_first=ids == parts[0])
                text, offsets = text + choice["text"], offsets + choice["logprobs"]["text_offset"]
            assert text == expected
            if before == prompt:
                lengths = [len(texts.text(token)) for token in answer]
                assert offsets == [sum(lengths[:number]) for number in range(len(answer))]


def test_bytes_of_a_chat_are_those_of_its_text(tokenizer: Any) -> None:
    ids = tokenizer.encode(" the the", add_special_tokens=False)
    event = AnswerEvent("0-0", 0, ids, "", [(token, 0.0, [(token, 0.0)]) for token in ids])
    generation: Any = SimpleNamespace(prompts=[[1]], num_samples=1)
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "logprobs": True})
    reply: Any = ChatReply(body, generation, Shown("tiny", TokenTexts(tokenizer)))
    shown = reply._logprobs(0, event)["content"]
    assert bytes(byte for each in shown for byte in each["bytes"]).decode() == answer_text(tokenizer, ids)
    assert [each["top_logprobs"][0] for each in shown] == [
        {key: each[key] for key in ("token", "logprob", "bytes")} for each in shown
    ]


def test_a_small_directory_without_a_decoder_loads(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_byte_level(tmp_path))
    tokenizer.backend_tokenizer.decoder = None
    assert TokenBytes(tokenizer)(tokenizer.encode("a")[0]) == b"a"


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


@pytest.mark.parametrize(
    "name", ["DreamTokenizer", "SomeTokenizer", "SomeTokenizerFast", "MistralCommonBackend", None]
)
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
    refused(r"IDLM-0203.*SomeTokenizer is code .* no tokenizer\.json", load_tokenizer, tmp_path)
