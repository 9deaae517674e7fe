"""Tokens: nothing is lost between text and ids, the mask token is never a word, and conversations are cut
right."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from idlm.errors import UserError
from idlm.tasks import TASKS
from idlm.tasks.tokenizer import CHAT_TEMPLATE, save_tokenizer, vocabulary
from idlm.text import tokenizer as tokens
from idlm.train.model.checks import mask_token
from tests.errors import refused
from tests.small_tokenizers import save_byte_fallback, save_byte_level
from tests.unit.conversations import render_conversation
from tests.unit.task_encoder import TaskEncoder, num_embedding_rows

ROOT = Path(__file__).parents[3]
QWEN3 = ROOT.parent / "shared" / "data" / "tokenizers" / "qwen3"


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task_tokenizer")
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def task_tokenizer(task_dir):
    return tokens.load_tokenizer(task_dir)


@pytest.fixture(scope="module")
def byte_level_dir(tmp_path_factory):
    return save_byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_level(byte_level_dir):
    return tokens.load_tokenizer(byte_level_dir)


LEVELS = {"ledger": ("tiny", "p4", "multi"), "recall": ("tiny",)}


@pytest.mark.sweep_but(model_type="qwen2")
@pytest.mark.parametrize(
    ("model_type", "task"),
    [(None, "ledger"), ("qwen3", "ledger"), ("qwen2", "ledger"), ("llama", "ledger"), (None, "recall")],
)
def test_task_texts_survive_whatever_the_model_is_called(tmp_path, model_type, task):
    """For some model types transformers replaces a generic tokenizer by a class with its own rules."""
    save_tokenizer(tmp_path, task)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = tokens.load_tokenizer(tmp_path)
    encoder = TaskEncoder(tokenizer.get_vocab())
    for level in LEVELS[task]:
        made = TASKS.get(task)(level=level)
        for index in range(600 if model_type is None else 20):
            sample = made.sample(index, "train")
            for text in (sample.prompt, sample.response):
                token_ids = tokenizer.encode(text, add_special_tokens=False)
                assert tokenizer.unk_token_id not in token_ids
                assert tokenizer.decode(token_ids) == text
                assert encoder.encode(text) == token_ids
            if index >= 20:
                continue
            prompt_ids, response_ids = encoder.encode_sample(sample)
            assert tokens.encode_prompt(tokenizer, sample.prompt) == prompt_ids
            turns = [
                {"role": "user", "content": sample.prompt},
                {"role": "assistant", "content": sample.response},
            ]
            token_ids, supervised = render_conversation(tokenizer, turns)
            assert token_ids == prompt_ids + response_ids
            assert supervised == [False] * len(prompt_ids) + [True] * len(response_ids)


def test_task_vocabulary_covers_what_is_never_drawn_often(task_tokenizer, tmp_path):
    assert 80 <= len(vocabulary()) <= 250 and len(vocabulary("recall")) <= 1400
    for name in TASKS.names():
        save_tokenizer(tmp_path, name)
        tokenizer = tokens.load_tokenizer(tmp_path)
        for text in TASKS.get(name).surface_texts():
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert task_tokenizer.unk_token_id in task_tokenizer.encode("Lea yodels")
    bundled = json.loads((ROOT / "recipes/assets/tiny_ar/tokenizer.json").read_text())
    assert bundled["model"]["vocab"] == vocabulary(), "new small models have the ids of the bundled ones"


def test_mask_token_order_of_preference(task_tokenizer, byte_level_dir):
    num_rows = num_embedding_rows(len(task_tokenizer))
    assert mask_token(task_tokenizer, num_rows, None)[0] == len(task_tokenizer) < num_rows
    assert task_tokenizer.convert_ids_to_tokens(len(task_tokenizer)) is None
    assert [num_embedding_rows(num) for num in (31, 32, 33)] == [32, 64, 64]
    if QWEN3.is_dir():
        assert mask_token(tokens.load_tokenizer(QWEN3), 151_936, None)[0] == 151_669
    tokenizer = tokens.load_tokenizer(byte_level_dir)
    spare = len(tokenizer)
    tokenizer.mask_token = "<|endoftext|>"
    assert mask_token(tokenizer, spare + 5, None)[0] == tokenizer.mask_token_id < spare
    assert mask_token(tokenizer, spare + 5, spare + 2)[0] == spare + 2


@pytest.mark.parametrize(
    ("added", "chosen"),
    [
        # Full vocabularies as those of SmolLM2, Llama 3, Gemma, Phi 3, Mistral and Falcon have.
        (["<|im_start|>", "<repo_name>", "<file_sep>"], "<repo_name>"),
        (["<|eot_id|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"], 1),
        (["<start_of_turn>", "<unused0>", "<unused1>"], 1),
        (["<|assistant|>", "<|placeholder1|>"], 1),
        (["[INST]", "[control_8]"], 1),
        ([">>TITLE<<", ">>UNUSED_119<<"], 1),
        # In use by the template, or with a meaning in text.
        (["<|im_start|>", "<|vision_pad|>", "<think>", "<|fim_prefix|>"], None),
        (["<|im_start|>", "<unused_in_name_only>"], None),
    ],
)
def test_a_full_vocabulary_lends_an_unused_special_token(byte_level_dir, added, chosen):
    tokenizer = tokens.load_tokenizer(byte_level_dir)
    # Gemma's unused tokens are added tokens that are not special.
    tokenizer.add_tokens(added, special_tokens="<unused0>" not in added)
    tokenizer.chat_template = "<|im_start|>{{ messages[0]['content'] }}<unused_in_name_only>"
    if chosen is None:
        assert mask_token(tokenizer, len(tokenizer), None)[:2] == (len(tokenizer), False)
        return
    chosen = tokenizer.convert_tokens_to_ids(added[chosen] if isinstance(chosen, int) else chosen)
    assert mask_token(tokenizer, len(tokenizer), None)[0] == chosen
    assert mask_token(tokenizer, len(tokenizer), chosen)[0] == chosen
    assert mask_token(tokenizer, len(tokenizer) + 1, None)[0] == len(tokenizer)


@pytest.mark.parametrize(
    ("explicit", "code"),
    [
        (10_000, "IDLM-0211"),
        (-1, "IDLM-0211"),
        (40, "IDLM-0212"),
        ("bos", "IDLM-0212"),
        ("eos", "IDLM-0212"),
    ],
)
def test_unusable_mask_tokens_are_refused(task_tokenizer, explicit, code):
    if isinstance(explicit, str):
        explicit = getattr(task_tokenizer, f"{explicit}_token_id")
    refused(code, mask_token, task_tokenizer, len(task_tokenizer) + 5, explicit)


def test_ids_fit_the_embedding(task_tokenizer, tmp_path):
    tokens.check_vocabulary(task_tokenizer, len(task_tokenizer))
    refused("IDLM-0213", tokens.check_vocabulary, task_tokenizer, len(task_tokenizer) - 1)
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokens.load_tokenizer(tmp_path)
    assert len(tokenizer) < tokens.num_token_ids(tokenizer) == 10
    assert mask_token(tokenizer, 12, None)[0] == 10


def test_directory_without_tokenizer_is_none_and_one_without_vocabulary_is_named(tmp_path):
    assert tokens.load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    for directory in (tmp_path, tmp_path / "missing"):
        refused("IDLM-0203", tokens.load_tokenizer, directory)


def save_split(directory):
    """Each character is encoded alone, as digits are by many tokenizers."""
    path = save_byte_level(directory) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    each, as_bytes = Split(Regex("."), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([each, as_bytes])
    tokenizer.save(str(path))
    return directory


@pytest.mark.parametrize(
    ("save", "name"),
    [
        (save_split, "GPT2Tokenizer"),
        (save_split, "GemmaTokenizer"),
        (save_byte_fallback, "LlamaTokenizerFast"),
    ],
)
def test_a_named_class_keeps_the_steps_of_the_file(tmp_path, save, name):
    """OLMo 2 and Granite name GPT-2's class, which splits digits otherwise than their files."""
    config_path = save(tmp_path) / "tokenizer_config.json"
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | {"tokenizer_class": name}))
    tokenizer, stored = tokens.load_tokenizer(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert type(tokenizer).__name__ == name.removesuffix("Fast")
    for text in ("Plain words, 12", " two  spaces\n", "日本"):
        token_ids = stored.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids
        assert tokens.plain_text(tokenizer, token_ids) == stored.decode(token_ids)


def test_prompt_encoding_follows_the_template(byte_level, task_tokenizer):
    templated = tokens.encode_prompt(byte_level, "Hi")
    assert byte_level.decode(templated) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert byte_level.decode(tokens.encode_prompt(byte_level, "Hi", template="none")) == "Hi"
    turn = {"role": "user", "content": "Hi"}
    thinking = tokens.encode_messages(byte_level, [turn], enable_thinking=False)
    assert byte_level.decode(thinking).endswith("assistant\n<think></think>")
    bare = tokens.encode_prompt(task_tokenizer, "Lea has 9.", template="none")
    assert task_tokenizer.decode(bare) == "<bos>Lea has 9."
    assert tokens.encode_prompt(task_tokenizer, "<bos>Lea has 9.", template="none") == bare
    refused("IDLM-0218", tokens.encode_prompt, byte_level, "")
    texts = ["Hi", "Lea has 9 shells. " * 20, "é 🙂"]
    for tokenizer, template in itertools.product((byte_level, task_tokenizer), ("auto", "none")):
        together = tokens.encode_prompts(tokenizer, texts, template=template, max_tokens=None)
        assert together == [tokens.encode_prompt(tokenizer, text, template=template) for text in texts]


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1 café"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2 日本\n"},
]


def test_template_that_merges_tokens_across_turns_is_refused(byte_level_dir):
    tokenizer = tokens.load_tokenizer(byte_level_dir)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    merged = next(
        token
        for token in tokenizer.get_vocab()
        if token.isascii() and token.isalpha() and len(token) == 2 and len(tokenizer.encode(token)) == 1
    )
    turns = [("user", "x"), ("assistant", merged[0]), ("user", merged[1]), ("assistant", "y")]
    with pytest.raises(UserError, match="IDLM-0214"):
        render_conversation(tokenizer, [{"role": role, "content": text} for role, text in turns])


def test_missing_and_refusing_templates_are_named(byte_level_dir):
    tokenizer = tokens.load_tokenizer(byte_level_dir)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    error = refused("roles must alternate", tokens.encode_prompt, tokenizer, "Hi")
    assert error.code == "IDLM-0217"
    tokenizer.chat_template = None
    refused("IDLM-0215", render_conversation, tokenizer, TURNS)
    assert tokenizer.decode(tokens.encode_prompt(tokenizer, "Hi")) == "Hi"


def test_stop_token_ids(task_tokenizer):
    eos = task_tokenizer.eos_token_id
    assert tokens.stop_token_ids(task_tokenizer, None) == (eos,)
    assert tokens.stop_token_ids(task_tokenizer, {"eos_token_id": [90, 7, eos]}) == (eos, 7, 90)
    assert tokens.stop_token_ids(None, {"eos_token_id": 5}) == (5,)
    assert tokens.stop_token_ids(None, {"eos_token_id": None}) == tokens.stop_token_ids(None, None) == ()
    for wrong in ("5", [1, "2"], True, 1.5, [-1]):
        refused("IDLM-0216", tokens.stop_token_ids, task_tokenizer, {"eos_token_id": wrong})


def test_template_separator_is_one_token(task_tokenizer):
    assert task_tokenizer.chat_template == CHAT_TEMPLATE
    assert task_tokenizer.decode(tokens.encode_prompt(task_tokenizer, "Lea has 9.")[-1:]) == "\n\n"


def test_a_text_of_too_many_tokens_is_refused_after_a_few_of_its_pieces(monkeypatch):
    """Each character is a token, and the allowed tokens could hold as many characters if they were long."""
    lengths = []

    def tokenizer(texts, **_):
        lengths.extend(map(len, texts))
        return {"input_ids": [[0] * len(text) for text in texts]}

    refused("IDLM-0412", tokens.check_size, tokenizer, "x" * 2_000_000, 8192)
    assert lengths == [tokens.PIECE_CHARS] * 2
    lengths.clear()
    tokens.check_size(tokenizer, "x" * 131_072, 8192)
    assert not lengths, "usual lengths are encoded once"
    monkeypatch.setattr(tokens, "_encode_each", lambda _, texts: [[0] * (len(texts[0]) // 200)])
    tokens.check_size(tokenizer, " " * 1_600_000, 8192)
