"""The id of the mask token of a checkpoint that is converted."""

from __future__ import annotations

import re
from typing import Any

from idlm.errors import UserError
from idlm.text.tokenizer import num_token_ids, special_token_ids

RESERVED = re.compile(
    r"reserved|unused|placeholder|place.holder|dummy|extra_?(id)?_?\d|control_\d|special_\d|reg\d",
    re.IGNORECASE,
)
"""Names of tokens for later use: of Llama 3, Gemma, Phi 3, Mistral, Falcon, Qwen 1."""
CODE_FILE_TOKENS = (
    *("<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>"),
    *("<issue_start>", "<issue_comment>", "<issue_closed>"),
    *("<commit_before>", "<commit_msg>", "<commit_after>"),
    *("<jupyter_start>", "<jupyter_text>", "<jupyter_code>", "<jupyter_output>", "<jupyter_script>"),
    "<empty_output>",
)
"""Tokens of pretraining on code, which chats do not contain: StarCoder, SmolLM, Granite."""


def resolve_mask_token_id(tokenizer: Any, num_rows: int, explicit: int | None) -> int:
    """Return the mask token's id: `explicit`, else the tokenizer's own, else the first spare embedding row,
    else the first of `unused_token_ids`.

    `num_rows` is the number of embedding rows; `tokenizer` may be None, then the id must be explicit. Raises
    `UserError` IDLM-0210 (nothing to use), IDLM-0211 (id outside the embedding) or IDLM-0212 (id of a token
    that text contains)."""
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
    if num_ids < num_rows:
        return num_ids
    unused = [token_id for token_id in unused_token_ids(tokenizer) if token_id < num_rows]
    if not unused:
        raise UserError(
            "IDLM-0210",
            f"there is no mask token: the tokenizer has none, its {num_ids} ids leave no spare row in the "
            f"embedding of {num_rows}, and no special token is known to be unused",
            fix="add a row to the embedding, or give the mask_token_id of an unused special token",
        )
    return unused[0]


def unused_token_ids(tokenizer: Any) -> list[int]:
    """Return the ids of added tokens that are reserved or of code files by their name, in this order; without
    those that begin, end, pad or separate texts, or that occur in a chat template."""
    named = {getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk", "sep", "cls")}
    templates = str(getattr(tokenizer, "chat_template", None) or "")
    texts = {
        str(token): token_id
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token_id not in named and str(token) not in templates
    }
    reserved = [token_id for text, token_id in texts.items() if RESERVED.search(text)]
    return reserved + [texts[text] for text in CODE_FILE_TOKENS if text in texts]


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
    is_text = mask_token_id not in (*special_token_ids(tokenizer), *unused_token_ids(tokenizer))
    if is_boundary or is_text:
        what = "begins or ends every text" if is_boundary else "is an ordinary token"
        raise UserError(
            "IDLM-0212",
            f"{source} is {mask_token_id}, the id of {token!r}, which {what}",
            fix="give the id of an unused special token or of a row after the tokenizer's last id",
        )
