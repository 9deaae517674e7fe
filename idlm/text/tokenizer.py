"""Text to token ids and back: tokenizer files, special and stop ids, prompts through the chat template, and
the text of an answer, whole or piece by piece.

This is the only module that loads transformers' tokenizers; it does so lazily, offline and without remote
code. A checkpoint without tokenizer files is valid everywhere: its tokenizer is None and callers use token
ids."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from idlm.errors import UserError
from idlm.text.split_tokens import SplitTokens, restored, written_marks
from idlm.text.templates import TEMPLATE_FILES, Message, all_template_text, render, unusable_files

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
_GENERIC_CLASSES = ("", "PreTrainedTokenizer", "TokenizersBackend")
_EQUAL_CLASSES = {"DreamTokenizer": "Qwen2Tokenizer"}
"""Classes that checkpoints bring as code, and those of transformers that have their rules."""
MAX_CHARS_PER_TOKEN = 256
"""Largest average number of characters per token of a prompt, unless the vocabulary has longer tokens."""
USUAL_CHARS_PER_TOKEN, PIECE_CHARS = 16, 1 << 14
"""Texts with more characters per allowed token are encoded in pieces first, of so many characters."""

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tags in an answer that its readers look for."""
_LINE = "\n"
REPLACEMENT = "\ufffd"
MAX_BYTES = 4
"""Largest number of bytes of a character, and so of tokens that it is split over."""
CHUNK = 64


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
    try:
        if unusable := unusable_files(directory, TOKENIZER_FILES):
            raise ValueError("; ".join(unusable))
        tokenizer = _tokenizer_class(directory).from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
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


@functools.lru_cache(maxsize=16)
def hidden_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of special tokens that an answer's text leaves out: all but the tags of reasoning and of
    calls, which are read in the text and are special in some tokenizers only."""
    tags = {idx for idx, token in tokenizer.added_tokens_decoder.items() if token.content in TAGS}
    return special_token_ids(tokenizer) - tags


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
def _has_common_decode(kind: type) -> bool:
    """Whether `decode` is transformers' own, which takes three times as long as `_decode`."""
    from transformers import PreTrainedTokenizerBase

    return getattr(kind, "decode", None) is PreTrainedTokenizerBase.decode


def plain_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of the ids, special tokens included, with spaces unchanged."""
    decode = tokenizer._decode if _has_common_decode(tokenizer.__class__) else tokenizer.decode
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
    """Return the ids of `prompt`. `template`: "auto" renders it as one user message of the chat template, if
    there is one; "none" encodes the bare text with the special tokens that the tokenizer adds. UserError
    IDLM-0218 for an empty prompt and IDLM-0412 for one that cannot fit into `max_tokens`."""
    return encode_prompts(tokenizer, [prompt], template=template, max_tokens=max_tokens)[0]


def encode_prompts(
    tokenizer: Any, prompts: Sequence[str], *, template: Literal["auto", "none"], max_tokens: int | None
) -> list[list[int]]:
    """Return the ids of each prompt, as `encode_prompt` does; the tokenizer's threads share many of them."""
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
    enable_thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    split_special_tokens: bool = False,
) -> list[int]:
    """Return the ids of a conversation that the assistant is to continue. With `split_special_tokens` only
    the template's own special tokens and marks of turns are tokens; those that messages, tools and
    `template_kwargs` spell are text. Errors are those of `render`, and UserError IDLM-0240; `max_tokens` as
    in `encode_prompt`."""

    def rendered(given: Any) -> str:
        messages, tools, extra = given
        options: Any = {"enable_thinking": enable_thinking, "tools": tools, "template_kwargs": extra}
        return render(tokenizer, messages, open_turn=True, **options)

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
    return SplitTokens(tokenizer, special_token_ids(tokenizer) | marks, hidden_token_ids(tokenizer) | marks)


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


def _has_more_tokens(tokenizer: Any, text: str, most: int) -> bool:
    """Return whether the pieces of a text have more tokens; reads no further than that."""
    for start in range(0, len(text), PIECE_CHARS):
        most -= len(_encode_each(tokenizer, [text[start : start + PIECE_CHARS]])[0]) - 2
        if most < 0:
            return True
    return False


def encode_text(tokenizer: Any, text: str, *, after: str = "") -> list[int]:
    """Return the ids of a text that goes on the text `after`: there, a tokenizer that begins each text with a
    space (sentencepiece) adds none, except behind a special token."""
    if after and text and _adds_space(tokenizer):
        ends = tokenizer.convert_ids_to_tokens(sorted(special_token_ids(tokenizer)))
        end = max((end for end in ends if after.endswith(end)), key=len, default=_LINE)
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
    """Return the ids of each text, with what the tokenizer puts in front, such as bos, and nothing behind."""
    prefix = added_prefix(tokenizer)
    return [prefix + ids for ids in _encode_each(tokenizer, texts)]


def _encode_each(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    return [list(ids) for ids in encoded["input_ids"]]


class Detokenizer:
    """Turns a stream of token ids into pieces of text; the cuts between calls make no difference.

    If no character is broken, the text is what transformers decodes without special tokens, with spaces
    unchanged. A character split over several tokens is held back until it is complete or can no longer become
    so: each byte token that belongs to no character becomes one U+FFFD, where transformers replaces a whole
    run of them, with characters before it that a stream could not take back. Ids without a token are dropped,
    and hidden tokens unless `keeps_hidden`. A stream of n ids takes time in the order of n."""

    def __init__(self, tokenizer: Any, *, keeps_hidden: bool = False) -> None:
        self._tokenizer = tokenizer
        self._dropped = frozenset() if keeps_hidden else hidden_token_ids(tokenizer)
        # Decoding starts one settled group early, because some decoders strip the first token's space.
        self._context: list[int] = []
        self._before = ""
        self._pending: list[int] = []
        self._num_emitted = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next ids and return the text that is settled by them (often empty, never wrong)."""
        kept = self.kept(token_ids)
        return "".join(self._push_chunk(kept[start : start + CHUNK]) for start in range(0, len(kept), CHUNK))

    def flush(self) -> str:
        """Return the text still held back; an incomplete character becomes U+FFFD."""
        return self._settle(self._text(self._pending), len(self._pending)) if self._pending else ""

    def kept(self, token_ids: Iterable[int]) -> list[int]:
        """Return those of the ids that are text."""
        given = list(token_ids)
        # Look up each id once: a long answer has few different ids, and the look-up costs more than decoding.
        ids = list(set(given) - self._dropped)
        names = self._tokenizer.convert_ids_to_tokens(ids)
        text_ids = {token_id for token_id, name in zip(ids, names, strict=True) if name is not None}
        return [token_id for token_id in given if token_id in text_ids]

    def _push_chunk(self, token_ids: list[int]) -> str:
        """Decode many ids at once if no character is broken: the same result, and much faster."""
        if len(token_ids) > 1 and self._before:
            together = self._pending + token_ids
            text = self._text(together)
            if REPLACEMENT not in text:
                self._pending = together
                return self._settle(text, len(together))
        return "".join(map(self._push_one, token_ids))

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._text(self._pending)
        settled = text.rstrip(REPLACEMENT)
        if len(settled) == len(text):
            return self._settle(text, len(self._pending))
        if len(settled) > self._num_emitted:
            return self._emit_beginning(text, settled)
        num_broken = self._num_broken()
        if not num_broken:
            return ""
        delta = self._settle(self._text(self._pending[:num_broken]), num_broken)
        rest = self._text(self._pending)
        return delta if rest.endswith(REPLACEMENT) else delta + self._settle(rest, len(self._pending))

    def _emit_beginning(self, text: str, settled: str) -> str:
        """Return the newly `settled` start of the pending `text`, whose end is a broken character."""
        delta = settled[self._num_emitted :]
        # Only the last token is broken: the others need not be decoded again.
        self._pending = self._pending[-1:]
        self._num_emitted = len(self._text(self._pending)) - (len(text) - len(settled))
        return delta

    def _num_broken(self) -> int:
        """Return how many of the pending ids, which end in a broken character, no later id can complete."""
        cuts = range(1, len(self._pending))
        for cut in cuts:
            if not self._text(self._pending[cut:]).endswith(REPLACEMENT):
                return cut
        if len(self._pending) < MAX_BYTES:
            return 0
        # Every cut through a character breaks it once more.
        halves = [self._text(self._pending[:cut]) + self._text(self._pending[cut:]) for cut in cuts]
        return min(cuts, key=lambda cut: len(halves[cut - 1]))

    def _settle(self, text: str, num_ids: int) -> str:
        """Return the rest of the `text` of the first `num_ids` pending ids and remove them."""
        delta = text[self._num_emitted :]
        done, self._pending = self._pending[:num_ids], self._pending[num_ids:]
        before = plain_text(self._tokenizer, done)
        # A context must have text without a broken character at its end, to show whether later ids change it.
        if not before.endswith(REPLACEMENT) and (before or not self._context):
            self._context, self._before = done, before
        self._num_emitted = max(self._num_emitted - len(text), 0)
        return delta

    def _text(self, token_ids: list[int]) -> str:
        """Return the text of ids after the context, or alone if they break a run of bytes at its end."""
        text = plain_text(self._tokenizer, self._context + token_ids)
        if self._context and not text.startswith(self._before):
            return plain_text(self._tokenizer, token_ids)
        return text[len(self._before) :]


def answer_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text that a stream of these ids gives, decoded in one call if no character is broken."""
    detokenizer = Detokenizer(tokenizer)
    kept = detokenizer.kept(token_ids)
    text = plain_text(tokenizer, kept)
    return text if REPLACEMENT not in text else detokenizer.push(kept) + detokenizer.flush()
