"""Text to token ids: tokenizer files, mask token, prompts, conversations, stop ids.

The only module that loads transformers' tokenizers, and it does so lazily, offline and without remote code.
A checkpoint without tokenizer files is legal everywhere: its tokenizer is None and it speaks token ids.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from idlm.errors import UserError

Message = Mapping[str, str]

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
    *("chat_template.jinja", "chat_template.json"),
)
"""All that a tokenizer and its template are read from; those of the shorter list say that there is one."""
MAX_CHARS_PER_TOKEN = 256
"""Most characters that a token of a prompt stands for on average, unless the vocabulary has longer tokens."""
_GENERIC_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def load_tokenizer(path: Path | str) -> Any:
    """Return the tokenizer of a local directory, or None when the directory has no tokenizer files.

    Raises `UserError` IDLM-0203 when the directory does not exist or its files cannot be loaded.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(
            "IDLM-0203", f"{directory} is not a directory", fix="give the path of a checkpoint directory"
        )
    present = [name for name in _TOKENIZER_FILES if (directory / name).exists()]
    if not present:
        return None

    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        loader = PreTrainedTokenizerFast if _is_self_contained(directory) else AutoTokenizer
        tokenizer = loader.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
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


def _is_self_contained(directory: Path) -> bool:
    """Tell whether `tokenizer.json` says everything, because no model-specific tokenizer class is asked for.

    AutoTokenizer would then take the class of config.json's `model_type` and its rules instead of the file's.
    """
    if not (directory / "tokenizer.json").exists():
        return False
    config_path = directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
    return config.get("tokenizer_class") in _GENERIC_CLASSES


def num_token_ids(tokenizer: Any) -> int:
    """Return the largest id of the tokenizer plus one; more than `len(tokenizer)` where ids have gaps."""
    return 1 + max((*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder), default=-1)


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all tokens that never stand for text."""
    flagged = (idx for idx, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset((*tokenizer.all_special_ids, *flagged))


def check_vocabulary(tokenizer: Any, num_rows: int) -> None:
    """Raise `UserError` IDLM-0213 when the tokenizer can emit an id that the embedding has no row for."""
    num_ids = num_token_ids(tokenizer)
    if num_ids > num_rows:
        raise UserError(
            "IDLM-0213",
            f"the tokenizer has {num_ids} ids, but the model's embedding has only {num_rows} rows",
            fix="use the tokenizer that belongs to this checkpoint, or resize the embedding",
        )


def resolve_mask_token_id(tokenizer: Any, num_rows: int, explicit: int | None) -> int:
    """Return the mask token's id: `explicit`, else the tokenizer's own, else the first spare embedding row.

    `num_rows` is the number of embedding rows; `tokenizer` may be None, then the id must be explicit. Raises
    `UserError` IDLM-0210 (nothing to use), IDLM-0211 (id outside the embedding) or IDLM-0212 (id of a token
    that text contains).
    """
    if explicit is not None:
        _check_mask_token_id(tokenizer, num_rows, explicit, source="the given mask_token_id")
        return explicit
    if tokenizer is None:
        raise UserError(
            "IDLM-0210",
            "the checkpoint has no tokenizer files, so its mask token is unknown",
            fix=f"give mask_token_id, an unused id from 0 to {num_rows - 1}",
        )
    if tokenizer.mask_token_id is not None:
        _check_mask_token_id(
            tokenizer, num_rows, tokenizer.mask_token_id, source="the tokenizer's mask token"
        )
        return int(tokenizer.mask_token_id)
    num_ids = num_token_ids(tokenizer)
    if num_ids >= num_rows:
        raise UserError(
            "IDLM-0210",
            f"there is no mask token: the tokenizer has none and its {num_ids} ids leave no spare row in the "
            f"embedding of {num_rows}",
            fix="add a row to the embedding, or give the mask_token_id of an unused special token",
        )
    return num_ids


def _check_mask_token_id(tokenizer: Any, num_rows: int, mask_token_id: int, *, source: str) -> None:
    if not 0 <= mask_token_id < num_rows:
        raise UserError(
            "IDLM-0211",
            f"{source} is {mask_token_id}, but the embedding has rows 0 to {num_rows - 1}",
            fix="give an id inside this range",
        )
    token = None if tokenizer is None else tokenizer.convert_ids_to_tokens(mask_token_id)
    if token is None:
        return
    is_boundary = mask_token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    if is_boundary or mask_token_id not in special_token_ids(tokenizer):
        what = "begins or ends every text" if is_boundary else "is an ordinary token"
        raise UserError(
            "IDLM-0212",
            f"{source} is {mask_token_id}, the id of {token!r}, which {what}",
            fix="give the id of an unused special token or of a row behind the tokenizer's last id",
        )


def encode_prompt(
    tokenizer: Any,
    prompt: str,
    *,
    template: Literal["auto", "none"] = "auto",
    enable_thinking: bool | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Return the ids a model is fed for `prompt`.

    `auto` makes it one user message of the chat template, if the tokenizer has one; `none` encodes the bare
    text with the specials the tokenizer adds by itself. `enable_thinking` reaches the template only when it
    is not None. A text that can never fit into `max_tokens` is refused, see `check_size`.
    """
    if not prompt:
        raise UserError("IDLM-0218", "the prompt is empty", fix="give at least one character")
    if template == "auto" and tokenizer.chat_template:
        return encode_messages(
            tokenizer,
            [{"role": "user", "content": prompt}],
            enable_thinking=enable_thinking,
            max_tokens=max_tokens,
        )
    check_size(tokenizer, prompt, max_tokens)
    return _plain_ids(tokenizer, prompt, add_special_tokens=True)


def encode_messages(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    enable_thinking: bool | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Return the ids of a conversation for the assistant to continue; errors as in `render_conversation`.

    `max_tokens`: as in `encode_prompt`.
    """
    text = _render(tokenizer, messages, open_turn=True, enable_thinking=enable_thinking)
    check_size(tokenizer, text, max_tokens)
    return _plain_ids(tokenizer, text, add_special_tokens=False)


def check_size(tokenizer: Any, text: str, max_tokens: int | None) -> None:
    """Refuse, before it is encoded, a text that `max_tokens` tokens cannot stand for; None allows any text.

    Encoding takes minutes and gigabytes for a text of 100 MB. No token stands for more characters than the
    vocabulary's longest, except where a tokenizer merges a run of unknown characters or of spaces into one
    token: such runs may have `MAX_CHARS_PER_TOKEN` on average. UserError IDLM-0412.
    """
    if max_tokens is None or len(text) <= max_tokens * MAX_CHARS_PER_TOKEN:
        return
    longest = max(MAX_CHARS_PER_TOKEN, *map(len, tokenizer.get_vocab()))
    if len(text) > max_tokens * longest:
        raise UserError(
            "IDLM-0412",
            f"the prompt has {len(text)} characters, more than {max_tokens} tokens can stand for",
            fix="shorten the prompt so that a token can follow, or raise max_length if the model allows",
        )


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    enable_thinking: bool | None = None,
    turns: Literal["all", "last"] = "all",
) -> tuple[list[int], list[bool]]:
    """Return (ids, supervised): a whole conversation, and which of its tokens the assistant has to produce.

    All assistant turns, or only the last one. A turn's own end-of-turn token is supervised, whitespace that
    the template puts behind it is not. A template with `{% generation %}` blocks says itself which tokens are
    the assistant's. For any other one, what comes before a supervised turn must be rendered and tokenised
    exactly as `encode_messages` does it at inference; the ids then differ from those of the whole text only
    where a token would reach across that border. Raises `UserError` IDLM-0214 when the template renders a
    shorter conversation differently from the start of a longer one, IDLM-0215 without a chat template,
    IDLM-0217 when the template refuses the messages.
    """
    if tokenizer.chat_template and _GENERATION_BLOCK.search(tokenizer.chat_template):
        return _marked_conversation(tokenizer, messages, enable_thinking=enable_thinking, turns=turns)
    whole = _render(tokenizer, messages, open_turn=False, enable_thinking=enable_thinking)
    targets = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    ids: list[int] = []
    supervised: list[bool] = []
    prompts: list[tuple[int, str, int]] = []
    done = ""
    for turn in targets[-1:] if turns == "last" else targets:
        before = _render(tokenizer, messages[:turn], open_turn=True, enable_thinking=enable_thinking)
        after = _render(tokenizer, messages[: turn + 1], open_turn=False, enable_thinking=enable_thinking)
        _require_prefix(done, before, turn)
        _require_prefix(before, after, turn)
        _require_prefix(after, whole, turn)
        context = _plain_ids(tokenizer, before[len(done) :], add_special_tokens=False)
        if done:
            prompts.append((turn, before, len(ids) + len(context)))
        answer = _plain_ids(tokenizer, after[len(before) :], add_special_tokens=False)
        num_tail = _num_tail_tokens(tokenizer, answer)
        ids += context + answer
        supervised += [False] * len(context) + [True] * (len(answer) - num_tail) + [False] * num_tail
        done = after
    rest = _plain_ids(tokenizer, whole[len(done) :], add_special_tokens=False)
    ids, supervised = ids + rest, supervised + [False] * len(rest)
    # Where the parts give the ids of the whole, so do all beginnings: encoding each again would be quadratic.
    if prompts and ids != _plain_ids(tokenizer, whole, add_special_tokens=False):
        for turn, before, num_ids in prompts:
            if ids[:num_ids] != _plain_ids(tokenizer, before, add_special_tokens=False):
                raise _disagreement(
                    turn, "tokenises the turns before it differently when the conversation goes on"
                )
    return ids, supervised


def _marked_conversation(
    tokenizer: Any, messages: Sequence[Message], *, enable_thinking: bool | None, turns: str
) -> tuple[list[int], list[bool]]:
    """The conversation as a template with `{% generation %}` blocks marks it.

    An end-of-turn token that stands behind a block belongs to it: without it the model would never stop.
    """
    whole = _render(tokenizer, messages, open_turn=False, enable_thinking=enable_thinking)
    opened = _render(tokenizer, messages, open_turn=True, enable_thinking=enable_thinking)
    opener = _plain_ids(tokenizer, opened[len(whole) :], add_special_tokens=False)[:1]
    extra = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    marked = tokenizer.apply_chat_template(
        [dict(message) for message in messages], return_dict=True, return_assistant_tokens_mask=True, **extra
    )
    ids, flags = list(marked["input_ids"]), [bool(flag) for flag in marked["assistant_masks"]]
    special = special_token_ids(tokenizer)
    supervised = [False] * len(ids)
    runs = [(key, list(group)) for key, group in itertools.groupby(range(len(ids)), key=flags.__getitem__)]
    for run in [group for key, group in runs if key][-1 if turns == "last" else 0 :]:
        end = run[-1] + 1
        behind = ids[end : end + 1]
        is_closed = any(ids[place] in special for place in run)
        if not is_closed and behind and behind[0] in special and behind != opener:
            end += 1
        end -= _num_tail_tokens(tokenizer, ids[run[0] : end])
        supervised[run[0] : end] = [True] * (end - run[0])
    return ids, supervised


def _num_tail_tokens(tokenizer: Any, answer: Sequence[int]) -> int:
    """Count the whitespace tokens behind the special token that closes a turn; 0 when none closes it."""
    special = special_token_ids(tokenizer)
    last = max((idx for idx, token_id in enumerate(answer) if token_id in special), default=None)
    if last is None or plain_text(tokenizer, answer[last + 1 :]).strip():
        return 0
    return len(answer) - last - 1


def _require_prefix(shorter: str, longer: str, turn: int) -> None:
    if not longer.startswith(shorter):
        raise _disagreement(turn, f"renders {shorter[-40:]!r} differently in the longer conversation")


def _disagreement(turn: int, what: str) -> UserError:
    return UserError(
        "IDLM-0214",
        f"assistant turn at message {turn}: the chat template {what}, so its tokens cannot be told apart",
        fix="make one sample per assistant turn (data.turns=each), or supervise only the last one "
        "(data.turns=last)",
    )


def _render(
    tokenizer: Any, messages: Sequence[Message], *, open_turn: bool, enable_thinking: bool | None
) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            "IDLM-0215",
            "the tokenizer has no chat template, so messages cannot be rendered",
            fix="give plain text, or add chat_template to tokenizer_config.json",
        )
    if not messages:
        return ""
    extra = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=open_turn, **extra
        )
    # Templates are user data: they raise jinja2's errors, and others for messages they do not expect.
    except Exception as error:
        raise UserError(
            "IDLM-0217",
            f"the chat template refuses {[message.get('role') for message in messages]}: {error}",
            fix="give messages with the roles and fields that this model's template knows",
        ) from error
    return text


def _plain_ids(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def plain_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return what the ids stand for, specials included, spaces as they are."""
    text: str = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def stop_token_ids(
    tokenizer: Any, generation_config: Mapping[str, Any] | None, *, source: str = "generation_config.json"
) -> tuple[int, ...]:
    """Return the ids that end a response, sorted: those of `generation_config` and the tokenizer's eos.

    Either argument may be None; `generation_config` is the content of the file `source`. Raises `UserError`
    IDLM-0216 when `eos_token_id` is neither an id nor a list.
    """
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
