"""Text to token ids: tokenizer files, special ids, the mask token and stop ids. Prompts and chats are in
chat.py.

This is the only module that loads transformers' tokenizers; it does so lazily, offline and without remote
code. A checkpoint without tokenizer files is valid everywhere: its tokenizer is None and callers use token
ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from idlm.errors import UserError

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
"""All files of a tokenizer and its template; one of the shorter list above must exist."""
_GENERIC_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")


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
    """Return whether `tokenizer.json` is complete, because no model-specific tokenizer class is named.

    AutoTokenizer would then use the class of config.json's `model_type` and its rules, not those of the file.
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
    """Return the ids of all special tokens, which are not text."""
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
            fix="give the id of an unused special token or of a row after the tokenizer's last id",
        )


def plain_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of the ids, special tokens included, with spaces unchanged."""
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
