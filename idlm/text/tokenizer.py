"""Text to token ids: tokenizer files, special and stop ids, and prompts through the chat template.

This is the only module that loads transformers' tokenizers; it does so lazily, offline and without remote
code. A checkpoint without tokenizer files is valid everywhere: its tokenizer is None and callers use token
ids."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from idlm.errors import UserError
from idlm.files.paths import refuse_pointer
from idlm.text import calls
from idlm.text.split_tokens import SplitTokens, restored, written_marks
from idlm.text.templates import (
    TEMPLATE_FILES,
    TEMPLATE_FOLDER,
    Message,
    all_template_text,
    render,
    unusable_files,
)

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
TOKENIZER_FILES = (
    *_TOKENIZER_FILES,
    *("merges.txt", "sentencepiece.bpe.model", "added_tokens.json", "special_tokens_map.json"),
    *TEMPLATE_FILES,
)
"""All files of a tokenizer and its template; one of the shorter list above must exist."""
_GENERIC_CLASSES = ("", "PreTrainedTokenizer", "TokenizersBackend", "MistralCommonBackend")
_EQUAL_CLASSES = {"DreamTokenizer": "Qwen2Tokenizer"}
"""Classes that checkpoints bring as code, and those of transformers that have their rules."""
MAX_CHARS_PER_TOKEN = 256
"""Largest average number of characters per token of a prompt, unless the vocabulary has longer tokens."""
USUAL_CHARS_PER_TOKEN, PIECE_CHARS = 16, 1 << 14
"""Texts with more characters per allowed token are encoded in pieces first, of so many characters."""

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tags that a text may spell although they are special in some tokenizers."""
_LINE = "\n"


def load_tokenizer(path: Path | str) -> Any:
    """Return the tokenizer of a local directory, or None when it has no tokenizer files. UserError IDLM-0203
    when there is no such directory or its files cannot be loaded."""
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(
            "IDLM-0203",
            f"{directory} is not a directory",
            fix="give the path of a local checkpoint directory; hub names are not downloaded",
        )
    present = [name for name in _TOKENIZER_FILES if (directory / name).exists()]
    if not present:
        return None
    for name in present:
        refuse_pointer("IDLM-0203", directory / name)
    try:
        if unusable := unusable_files(directory, TOKENIZER_FILES):
            raise ValueError("; ".join(unusable))
        tokenizer = _tokenizer_class(directory).from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        _take_steps(tokenizer, directory / "tokenizer.json")
        words = set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder)
        if not tokenizer.is_fast or not words:
            raise ValueError("the tokenizer has no vocabulary or no fast implementation")
    # Broken files surface as OSError, KeyError, JSONDecodeError or a bare Exception from the Rust side.
    except Exception as error:
        raise UserError(
            "IDLM-0203",
            f"the tokenizer files in {directory} ({', '.join(present)}) cannot be loaded: {error}",
            fix="copy the original checkpoint's tokenizer files again, or remove them to work with token ids",
        ) from error
    return tokenizer


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the content of the files of a tokenizer and its templates, by their paths in `directory`."""
    paths = [directory / name for name in TOKENIZER_FILES] + sorted(
        directory.glob(f"{TEMPLATE_FOLDER}/*.jinja")
    )
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths if path.is_file()}


def _take_steps(tokenizer: Any, file: Path) -> None:
    """Give a tokenizer the steps of its file, if there is one, as transformers 4 does. Named classes of
    transformers 5 put their own in their place, by which a text may get other ids than in training."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if type(tokenizer) is PreTrainedTokenizerFast or not file.exists():
        return
    steps = Tokenizer.from_file(str(file))
    for name in ("normalizer", "pre_tokenizer", "model", "decoder"):
        setattr(tokenizer.backend_tokenizer, name, getattr(steps, name))


def _tokenizer_class(directory: Path) -> Any:
    """Return what loads the tokenizer. Raises ValueError for a class whose rules nothing here has.
    `tokenizer.json` is complete unless transformers has the class that is named. AutoTokenizer would use the
    class of config.json's `model_type` and its rules, not those of the file."""
    import transformers
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    config_path = directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
    code = [path for path in (config.get("auto_map") or {}).get("AutoTokenizer") or () if path]
    named = config.get("tokenizer_class") or "".join(code[:1]).rpartition(".")[2]
    name = named.removesuffix("Fast")
    is_known = name not in _GENERIC_CLASSES and any(map(tokenizer_class_from_name, {name, named}))
    if (directory / "tokenizer.json").exists() and not is_known:
        return transformers.PreTrainedTokenizerFast
    if name in _EQUAL_CLASSES:
        return getattr(transformers, _EQUAL_CLASSES[name])
    if name and not is_known:
        raise ValueError(f"its class {named} is code of the checkpoint, and there is no tokenizer.json")
    return transformers.AutoTokenizer


def num_token_ids(tokenizer: Any) -> int:
    """Return the largest id of the tokenizer plus one; more than `len(tokenizer)` where ids have gaps."""
    return 1 + max((*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder), default=-1)


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    flagged = (idx for idx, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset((*tokenizer.all_special_ids, *flagged))


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    return tuple(tokenizer.convert_ids_to_tokens(sorted(special_token_ids(tokenizer))))


def without_ends(text: str, ends: tuple[str, ...]) -> str:
    """Return a text without those of `ends` that it ends in, and the white space after them."""
    while (rest := text.rstrip()).endswith(ends):
        text = rest[: -max(len(end) for end in ends if rest.endswith(end))]
    return text


@functools.lru_cache(maxsize=16)
def hidden_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of special tokens that an answer's text leaves out: all but the tags of reasoning and of
    calls, which are read in the text."""
    return _special_but(tokenizer, (*TAGS, *calls.TAGS))


def _special_but(tokenizer: Any, shown: Collection[str]) -> frozenset[int]:
    ids = {idx for idx, token in tokenizer.added_tokens_decoder.items() if token.content in shown}
    return special_token_ids(tokenizer) - ids


def check_vocabulary(tokenizer: Any, num_rows: int) -> None:
    """Raise `UserError` IDLM-0213 when the tokenizer can emit an id that the embedding has no row for."""
    num_ids = num_token_ids(tokenizer)
    if num_ids > num_rows:
        raise UserError(
            "IDLM-0213",
            f"the tokenizer has {num_ids} ids, but the model's embedding has only {num_rows} rows",
            fix="use the tokenizer that belongs to this checkpoint, or resize the embedding",
        )


@functools.cache
def has_common_decode(kind: type) -> bool:
    """Whether `decode` is transformers' own, which takes three times as long as `_decode`."""
    from transformers import PreTrainedTokenizerBase

    return getattr(kind, "decode", None) is PreTrainedTokenizerBase.decode


def plain_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of the ids, special tokens included, with spaces unchanged."""
    decode = tokenizer._decode if has_common_decode(tokenizer.__class__) else tokenizer.decode
    text: str = decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def stop_token_ids(
    tokenizer: Any, generation_config: Mapping[str, Any] | None, *, source: str = "generation_config.json"
) -> tuple[int, ...]:
    """Return the ids that end a response, sorted: those of `generation_config`, the content of the file
    `source`, and the tokenizer's eos. UserError IDLM-0216 for an `eos_token_id` that is no id and no list."""
    given = (generation_config or {}).get("eos_token_id")
    listed = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    wrong = [value for value in listed if not isinstance(value, int) or isinstance(value, bool) or value < 0]
    if wrong:
        raise UserError(
            "IDLM-0216",
            f"eos_token_id in {source} is {given!r}, allowed are a token id or a list of them",
            fix=f"correct {source}",
        )
    own = [] if tokenizer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(sorted({*listed, *own}))


def encode_prompt(
    tokenizer: Any, prompt: str, *, template: Literal["auto", "none"] = "auto", max_tokens: int | None = None
) -> list[int]:
    """Return the ids of `prompt`, as `encode_prompts` does."""
    return encode_prompts(tokenizer, [prompt], template=template, max_tokens=max_tokens)[0]


def encode_prompts(
    tokenizer: Any, prompts: Sequence[str], *, template: Literal["auto", "none"], max_tokens: int | None
) -> list[list[int]]:
    """Return the ids of each prompt; the tokenizer's threads share many of them. `template`: "auto" renders
    it as one user message of the chat template, if there is one; "none" encodes the bare text with the
    special tokens that the tokenizer adds. UserError IDLM-0218 for an empty prompt and IDLM-0412 for one that
    cannot fit into `max_tokens`."""
    if not all(prompts):
        raise UserError("IDLM-0218", "the prompt is empty", fix="give at least one character")
    is_bare, texts = template == "none" or not tokenizer.chat_template, list(prompts)
    if not is_bare:
        turns = ([{"role": "user", "content": prompt}] for prompt in prompts)
        texts = [render(tokenizer, turn, open_turn=True) for turn in turns]
    for text in texts:
        check_size(tokenizer, text, max_tokens)
    return encode_bare(tokenizer, texts) if is_bare else _encode_each(tokenizer, texts)


def encode_messages(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    open_turn: bool = True,
    enable_thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    split_special_tokens: bool = False,
) -> list[int]:
    """Return the ids of a conversation, which the assistant is to continue if `open_turn`. With
    `split_special_tokens` only the template's own special tokens and marks of turns are tokens; those that
    messages, tools and `template_kwargs` spell are text. Errors are those of `render`, and UserError
    IDLM-0240; `max_tokens` as in `encode_prompts`."""

    def rendered(given: Any) -> str:
        messages, tools, extra = given
        options: Any = {"enable_thinking": enable_thinking, "tools": tools, "template_kwargs": extra}
        return render(tokenizer, messages, open_turn=open_turn, **options)

    given: Any = [messages, tools, template_kwargs or {}]
    splitter = _splitter(tokenizer, all_template_text(tokenizer)) if split_special_tokens else None
    stand_ins = splitter.stand_ins(given) if splitter else {}
    if splitter and stand_ins:
        given = splitter.replaced(given, stand_ins)
    text = rendered(given)
    check_size(tokenizer, restored(text, stand_ins), max_tokens)
    if splitter:
        splitter.check(given, text, rendered)
    return splitter.encode(text, stand_ins) if splitter and stand_ins else encode_text(tokenizer, text)


@functools.lru_cache(maxsize=4)
def _splitter(tokenizer: Any, template: str) -> SplitTokens:
    rendered = functools.partial(render, tokenizer, open_turn=True)
    marks = written_marks(tokenizer, template, rendered, tags=TAGS)
    hidden = _special_but(tokenizer, TAGS) | marks
    return SplitTokens(tokenizer, special_token_ids(tokenizer) | marks, hidden)


def check_size(tokenizer: Any, text: str, max_tokens: int | None) -> None:
    """Raise UserError IDLM-0412 for a text that `max_tokens` tokens (None: any number) cannot hold, before
    encoding, which takes minutes and gigabytes for 100 MB. No token holds more characters than the longest of
    the vocabulary, but for merged runs of spaces or unknown characters (`MAX_CHARS_PER_TOKEN`). A text with
    more than usual is counted piece by piece, up to twice the tokens: the ends of pieces add few."""
    if max_tokens is None or len(text) <= max_tokens * USUAL_CHARS_PER_TOKEN:
        return
    longest = MAX_CHARS_PER_TOKEN
    if len(text) > max_tokens * longest:
        longest = max(longest, *map(len, tokenizer.get_vocab()))
    if len(text) > max_tokens * longest or _has_more_tokens(tokenizer, text, 2 * max_tokens):
        raise UserError(
            "IDLM-0412",
            f"this model's maximum context length is {max_tokens} tokens, and the prompt has {len(text)} "
            "characters, more than these can hold",
            fix="shorten the prompt so that a token can follow, or raise max_length if the model allows",
        )


def _has_more_tokens(tokenizer: Any, text: str, maximum: int) -> bool:
    """Return whether the pieces of a text have more tokens; reads no further than that."""
    for start in range(0, len(text), PIECE_CHARS):
        maximum -= len(_encode_each(tokenizer, [text[start : start + PIECE_CHARS]])[0]) - 2
        if maximum < 0:
            return True
    return False


def encode_text(tokenizer: Any, text: str, *, after: str = "") -> list[int]:
    """Return the ids of a text that continues the text `after`: there, a tokenizer that begins each text with
    a space (sentencepiece) adds none, except after a special token."""
    if after and text and _adds_space(tokenizer):
        ends = (end for end in special_tokens(tokenizer) if after.endswith(end))
        end = max(ends, key=len, default=_LINE)
        before, both = (encode_text(tokenizer, each) for each in (end, end + text))
        if both[: len(before)] == before:
            return both[len(before) :]
    return list(tokenizer.encode(text, add_special_tokens=False))


@functools.lru_cache(maxsize=16)
def _adds_space(tokenizer: Any) -> bool:
    alone, line, both = (encode_text(tokenizer, text) for text in ("a", _LINE, f"{_LINE}a"))
    return line + alone != both


def added_prefix(tokenizer: Any) -> list[int]:
    """Return the ids that the tokenizer itself puts in front of a text, such as bos."""
    bare, whole = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (False, True))
    ends = range(len(whole) - len(bare) + 1)
    return list(whole[: next((end for end in ends if whole[end : end + len(bare)] == bare), 0)])


def encode_bare(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text with the tokenizer's prefix, such as bos, once where a text spells it (a
    chat that is rendered already), and no suffix."""
    prefix = added_prefix(tokenizer)
    encoded = _encode_each(tokenizer, texts)
    return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in encoded]


def _encode_each(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    return [list(ids) for ids in encoded["input_ids"]]
