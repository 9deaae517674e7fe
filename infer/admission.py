"""Checks requests before they are queued, and makes their samples."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.build import EngineParts
from idlm.infer.request import Request, token_list

Prompt = str | Sequence[int]


class Admission:
    """The checks of one engine; they do not change it."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def samples(self, request_id: str, prompt: Prompt, params: SamplingParams | None) -> list[Request]:
        """The `n` samples of a request. Raises UserError if this engine cannot answer it."""
        parts, params = self._parts, SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UserError(
                "IDLM-0454",
                f"request {request_id!r}: params={params!r} is not SamplingParams",
                fix="write SamplingParams(temperature=0, ...), from idlm.contracts",
            )
        _check_vocabulary(request_id, params, parts.model.spec.vocab_size)
        known = parts.encode(prompt) if isinstance(prompt, str) else prompt
        if isinstance(known, list):
            # Check the length first, because checking millions of ids takes gigabytes.
            self._check_length(request_id, len(known))
        prompt_ids = token_list(request_id, known, parts.model.spec.vocab_size)
        parts.decoder.check(params, prompt_ids)
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
        """Longest prompt and answer together. Raises UserError IDLM-0413 if the KV pool cannot hold it."""
        context, page_size = self._check_length(request_id, len(prompt_ids)), self._parts.pool.page_size
        longest = min(context, len(prompt_ids) + params.max_tokens)
        needed, pool = (
            self._parts.scheduler.slots_needed(longest, longest),
            self._parts.pool.num_pages * page_size,
        )
        if needed > pool:
            raise UserError(
                "IDLM-0413",
                f"request {request_id!r} may need {needed} KV slots; the pool has {pool}",
                fix=f"lower max_tokens, or raise num_pages to {math.ceil(needed / page_size)} or more",
            )
        return longest

    def _check_length(self, request_id: str, num_tokens: int) -> int:
        """The context length. Raises UserError IDLM-0412 if the prompt leaves no room for an answer."""
        context = self._parts.settings.max_length
        assert context is not None
        if num_tokens >= context:
            raise UserError(
                "IDLM-0412",
                f"request {request_id!r}: the prompt has {num_tokens} tokens and the context {context}",
                fix="shorten the prompt so that a token can follow, or raise max_length if the model allows",
            )
        return context


def _check_vocabulary(request_id: str, params: SamplingParams, num_rows: int) -> None:
    """Raise UserError IDLM-0411 for stop ids, or numbers of logprobs, beyond the vocabulary."""
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
            f"request {request_id!r}: logprobs={params.logprobs}, but the vocabulary has {num_rows} tokens",
            fix=f"give logprobs <= {num_rows}",
        )
