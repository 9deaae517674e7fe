"""What an engine is made of, and which requests it takes: their checks, and their samples."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from idlm.contracts import Constraint, SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.base import Decoder, answer_length
from idlm.infer.models.loader import LoadedModel
from idlm.infer.request import Request, token_list
from idlm.infer.runtime.model_runner import PassRunner, StepResult
from idlm.infer.runtime.stride_controller import StrideController
from idlm.infer.scheduler import Scheduler
from idlm.infer.settings import EngineSettings
from idlm.infer.sparse.stack import AcceleratorStack
from idlm.infer.state.batch import Schedule
from idlm.infer.state.page_pool import PagePool
from idlm.infer.state.sequence_state import SequenceState, check_listed
from idlm.infer.structured.grammar import Grammar, GrammarCompiler
from idlm.text.tokenizer import encode_prompts

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """What was done before traffic: of `num_wanted` graphs `num_graphs` were captured."""

    num_graphs: int = 0
    num_wanted: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What `Engine` is made of. Without a `tokenizer` (None), prompts and answers are token ids only.

    `stride_controller` is None if the decoder has one mode only, `stack` without accelerators."""

    settings: EngineSettings
    model: LoadedModel
    tokenizer: Any
    eos_ids: tuple[int, ...]
    decoder: Decoder
    table: SequenceState
    pool: PagePool
    scheduler: Scheduler
    stride_controller: StrideController | None
    runner: PassRunner
    stack: AcceleratorStack | None
    step: Callable[[Schedule], StepResult]
    grammars: Callable[[], GrammarCompiler]
    warm_up: WarmUp = WarmUp()

    @property
    def is_lossy(self) -> bool:
        """Whether answers may follow another distribution than that of the checkpoint and its decoder."""
        is_sparse = self.stack is not None and self.stack.is_lossy
        return self.settings.is_lossy or is_sparse or self.decoder.exactness != "exact"

    @property
    def drops_rows(self) -> bool:
        """Whether passes may drop rows, and so reserve few of them (`PassRows`)."""
        return self.stack is not None and self.stack.rows is not None

    def samples(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None, *, compiles: bool = True
    ) -> list[Request]:
        """The `n` samples of a request. Raises UserError if this engine cannot answer it. `compiles` False:
        its grammar is not compiled, nor checked."""
        params, vocab_size = SamplingParams() if params is None else params, self.model.spec.vocab_size
        if not isinstance(params, SamplingParams):
            raise UserError(
                "IDLM-0454",
                f"request {request_id!r}: params={params!r} is not SamplingParams",
                fix="write SamplingParams(temperature=0, ...), from idlm.contracts",
            )
        if params.max_tokens is None:
            params = replace(params, max_tokens=self.decoder.default_max_tokens)
        _check_vocabulary(request_id, params, vocab_size)
        if params.adapter is not None and params.adapter not in self.settings.adapters:
            raise UserError(
                "IDLM-0490",
                f"request {request_id!r}: adapter={params.adapter!r} is none of {[*self.settings.adapters]}",
                fix="give a name of adapters=, or leave it out for the adapter of model=",
            )
        known = self.encode([prompt])[0] if isinstance(prompt, str) and prompt else prompt
        if isinstance(known, list):
            # Check the length first, because checking millions of ids takes gigabytes.
            self._check_length(request_id, len(known))
        prompt_ids = token_list(request_id, known, vocab_size)
        self.decoder.check(params, prompt_ids)
        params = params if params.seed is not None else params.with_seed(secrets.randbits(62))
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)}
        if params.stop and self.tokenizer is None:
            raise UserError("IDLM-0406", "stop strings need a tokenizer", fix="use stop_token_ids")
        if params.logit_bias or params.min_tokens:
            check_listed(params, stop_ids)
        max_length = self._max_length(request_id, prompt_ids, params)
        constraint = params.constraint
        grammars = None if constraint is None else self._grammars(constraint, params.n, compiles=compiles)
        return [
            Request(
                request_id=request_id,
                index=index,
                prompt_ids=prompt_ids,
                params=params,
                stop_ids=frozenset(stop_ids),
                max_length=max_length,
                num_canvases=self.decoder.num_canvases(params),
                grammar=None if grammars is None else grammars[index],
            )
            for index in range(params.n)
        ]

    def _grammars(self, constraint: Constraint, num_samples: int, *, compiles: bool) -> list[Grammar | None]:
        """One grammar for each sample; None if they are not compiled here."""
        if self.settings.tensor_parallel > 1:
            raise UserError(
                "IDLM-0477",
                "constraint: the ranks of tensor_parallel do not share a grammar",
                fix="use tensor_parallel=1 for answers with a constraint",
            )
        return [self.grammars().grammar(constraint) if compiles else None for _ in range(num_samples)]

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of text prompts, through the chat template if the tokenizer has one.

        Raises UserError IDLM-0414 without a tokenizer, and what `encode_prompts` raises."""
        if self.tokenizer is None:
            raise UserError(
                "IDLM-0414", "the checkpoint has no tokenizer files", fix="give prompts as token ids"
            )
        template, max_tokens = self.settings.chat_template, self.settings.max_length
        return encode_prompts(self.tokenizer, prompts, template=template, max_tokens=max_tokens)

    def _max_length(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> int:
        """Longest prompt and answer together. Raises UserError IDLM-0413 if the KV pool cannot hold it."""
        context, page_size = self._check_length(request_id, len(prompt_ids)), self.pool.page_size
        num_new, num_canvases = max(1, answer_length(params)), self.decoder.num_canvases(params)
        longest, num_slots = min(context, len(prompt_ids) + num_new), self.pool.num_pages * page_size
        self.runner.check_canvas(longest, longest - len(prompt_ids), num_canvases)
        needed = self.scheduler.slots_needed(longest, longest, num_canvases)
        if needed > num_slots:
            raise UserError(
                "IDLM-0413",
                f"request {request_id!r} may need {needed} KV slots; the pool has {num_slots}",
                fix=f"lower max_tokens, or raise num_pages to {math.ceil(needed / page_size)} or more",
            )
        return longest

    def _check_length(self, request_id: str, num_tokens: int) -> int:
        """The context length. Raises UserError IDLM-0412 if no answer fits after the prompt."""
        context = self.table.max_length
        if num_tokens >= context:
            raise UserError(
                "IDLM-0412",
                f"request {request_id!r}: this model's maximum context length is {context} tokens, and the "
                f"prompt has {num_tokens}",
                fix="shorten the prompt so that a token can follow, or raise max_length if the model allows",
            )
        return context


def _check_vocabulary(request_id: str, params: SamplingParams, num_rows: int) -> None:
    """Raise UserError IDLM-0411 for ids, or numbers of logprobs, beyond the vocabulary."""
    for name, token_ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        outside = [token for token in token_ids if token >= num_rows]
        if outside:
            raise UserError(
                "IDLM-0411",
                f"request {request_id!r}: {name} {outside[:5]} are not in the vocabulary [0, {num_rows})",
                fix="give ids of the checkpoint's own tokenizer",
            )
    for name, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if number is not None and number > num_rows:
            raise UserError(
                "IDLM-0411",
                f"request {request_id!r}: {name}={number}, but the vocabulary has {num_rows} tokens",
                fix=f"give {name} <= {num_rows}",
            )


MIN_CONSECUTIVE_OOM = 2
"""Steps in a row that run out of memory before a request fails."""


def out_of_memory(
    request_id: str, num_consecutive: int, message: str, *, max_num_batched_tokens: int
) -> UserError:
    budget = max(1, max_num_batched_tokens // 2)
    return UserError(
        "IDLM-0448",
        f"request {request_id!r} failed: {num_consecutive} steps in a row ran out of memory ({message})",
        fix=f"lower max_num_batched_tokens to {budget}, max_num_seqs, or num_pages, which leaves more memory "
        "outside the KV cache",
    )


def decoded_otherwise(request_id: str, num_tokens: int) -> UserError:
    return UserError(
        "IDLM-0473",
        f"request {request_id!r} failed: it was preempted, and decoding its {num_tokens} tokens again gave "
        "other ones, because passes of other sizes round otherwise",
        fix="use accelerators.focus.commit=clean, fewer sequences (max_num_seqs) or more num_pages, so that "
        "none is preempted, or dtype=float32",
    )


def grammar_failed(request_id: str, num_tokens: int, problem: str) -> UserError:
    return UserError(
        "IDLM-0478",
        f"request {request_id!r} failed: after {num_tokens} tokens its constraint cannot be followed: "
        f"{problem}",
        fix="simplify the constraint, and write it so that tokens of this checkpoint can spell every answer",
    )


def nonfinite_logits(request_id: str, num_tokens: int, *, dtype: torch.dtype) -> UserError:
    advice = "use dtype=bfloat16 or float32, which hold larger numbers, or " * (dtype == torch.float16)
    return UserError(
        "IDLM-0457",
        f"request {request_id!r} failed: after {num_tokens} tokens of its answer the model's logits are not "
        "finite, so no token can be sampled",
        fix=f"{advice}look for what overflows: an adapter that diverged, a damaged checkpoint",
    )
