"""What an engine can answer: every check of a request that needs no forward pass, and its samples."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence, Set
from numbers import Number
from typing import Any

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.build import EngineParts
from idlm.infer.request import Request, token_list

Prompt = str | Sequence[int]


class Admission:
    """The checks of one engine. Changes nothing in it."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def samples(self, request_id: str, prompt: Prompt, params: SamplingParams | None) -> list[Request]:
        """The `n` samples of a request; UserError for whatever this engine cannot answer."""
        parts, params = self._parts, _checked(request_id, params)
        parts.decoder.kv_policy.check(params)
        parts.decoder.configure(params.decoder_options)
        _check_vocabulary(request_id, params, parts.model.spec.vocab_size)
        known = parts.encode(prompt) if isinstance(prompt, str) else prompt
        if isinstance(known, list):
            # Before the ids are looked at: a list of millions takes gigabytes to check.
            self._check_length(request_id, len(known))
        prompt_ids = token_list(request_id, known, parts.model.spec.vocab_size)
        params = params if params.seed is not None else params.with_seed(secrets.randbits(62))
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(parts.eos_ids))
        if params.stop and parts.tokenizer is None:
            raise UserError("IDLM-0406", "stop strings need a tokenizer", fix="use stop_token_ids")
        max_length = self._max_length(request_id, prompt_ids, params)
        return [
            Request(
                request_id=request_id,
                index=index,
                prompt_ids=prompt_ids,
                params=params,
                stop_ids=frozenset(stop_ids),
                max_length=max_length,
            )
            for index in range(params.n)
        ]

    def _max_length(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> int:
        """Longest prompt plus answer that context and pool allow."""
        context, page_size = self._check_length(request_id, len(prompt_ids)), self._parts.pool.page_size
        longest = min(context, len(prompt_ids) + params.max_tokens)
        needed, pool = self._parts.scheduler.slots_needed(longest, longest), self._parts.pool.num_pages * page_size
        if needed > pool:
            raise UserError(
                "IDLM-0413",
                f"request {request_id!r} may need {needed} KV slots; the pool has {pool}",
                fix=f"lower max_tokens, or raise num_pages to {math.ceil(needed / page_size)} or more",
            )
        return longest

    def _check_length(self, request_id: str, num_tokens: int) -> int:
        """Return the context; UserError IDLM-0412 for a prompt that leaves no room for an answer."""
        context = self._parts.settings.max_length
        assert context is not None
        if num_tokens >= context:
            raise UserError(
                "IDLM-0412",
                f"request {request_id!r}: the prompt has {num_tokens} tokens, the context {context}",
                fix="shorten the prompt so that a token can follow, or raise max_length if the model allows",
            )
        return context


def _check_vocabulary(request_id: str, params: SamplingParams, num_rows: int) -> None:
    """UserError IDLM-0411 for settings that speak of more tokens than the model has."""
    outside = [token for token in params.stop_token_ids if token >= num_rows]
    if outside:
        raise UserError(
            "IDLM-0411",
            f"request {request_id!r}: stop_token_ids {outside[:5]} are not in the vocabulary [0, {num_rows})",
            fix="give ids of the checkpoint's own tokenizer",
        )
    if params.logprobs is not None and params.logprobs > num_rows:
        raise UserError(
            "IDLM-0411",
            f"request {request_id!r}: logprobs={params.logprobs}, and the vocabulary has {num_rows} tokens",
            fix=f"give logprobs <= {num_rows}",
        )


def _checked(request_id: str, params: Any) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise UserError(
            "IDLM-0454",
            f"request {request_id!r}: params are {params!r}, not SamplingParams",
            fix="write SamplingParams(temperature=0, ...), from idlm.contracts",
        )
    return params


def check_list(prompts: Any) -> None:
    """UserError IDLM-0407 for anything but several prompts, in order."""
    items = _items(prompts)
    if isinstance(prompts, str) or any(map(_is_number, items or ())):
        raise UserError(
            "IDLM-0407",
            "prompts is a single prompt (a string or token ids), a list of prompts is wanted",
            fix="give a list: generate([prompt], ...)",
        )
    if items is None:
        raise UserError(
            "IDLM-0407",
            f"prompts is {prompts!r}, a list of prompts is wanted",
            fix="give a list: generate([prompt], ...)",
        )


def check_one(prompt: Any) -> None:
    """UserError IDLM-0407 for a list of prompts where one is wanted."""
    if not isinstance(prompt, str) and any(map(_is_prompt, _items(prompt) or ())):
        raise UserError(
            "IDLM-0407",
            "stream takes one prompt (a string or token ids), not a list of prompts",
            fix="write stream(prompt, ...), or generate([prompt, ...], ...) for several",
        )


def _items(prompts: Any) -> list[Any] | None:
    """What stands in a list, an array or a tensor; None for what has no order, and for an iterator, which a
    look would use up.
    """
    if not hasattr(prompts, "__len__") or isinstance(prompts, Mapping | Set):
        return None
    try:
        # Not by the look of it: an array without dimensions has __len__ too.
        return list(prompts)
    except TypeError:
        return None


def _is_number(item: Any) -> bool:
    """Anybody's number, hence no prompt; numpy's texts have no dimensions either."""
    return isinstance(item, Number) or (not isinstance(item, str) and getattr(item, "ndim", None) == 0)


def _is_prompt(item: Any) -> bool:
    """Text or a row of token ids, hence no token id."""
    return isinstance(item, str | list | tuple) or getattr(item, "ndim", 0) > 0
