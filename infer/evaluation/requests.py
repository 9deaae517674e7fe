"""Requests of an evaluation harness to a language model, answered by an engine: texts up to a stop string,
and log-likelihoods of continuations. `lm_eval_model.py` is the adapter of lm-eval."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from idlm.contracts import Completion, SamplingParams
from idlm.infer.cli.batch import AnswerRun, check_lines
from idlm.infer.cli.prompts import PromptLine
from idlm.infer.engine import Engine
from idlm.infer.evaluation.extraction import strip_thinking
from idlm.text.templates import render
from idlm.text.tokenizer import encode_bare, encode_text

DEFAULT_MAX_TOKENS = 256
"""Of an answer, where neither the task nor the caller sets it (lm-eval's default)."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of it in tasks."""
SCORE = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)


class EngineRequests:
    """`params` are the settings of every answer but its stop strings, which the task adds to, and its length,
    which the task sets unless `params` does. With `is_chat`, texts hold their special tokens already."""

    def __init__(self, engine: Engine, params: SamplingParams, *, is_chat: bool = False) -> None:
        self.engine, self.is_chat, self._params = engine, is_chat, params
        self.completions: list[Completion] = []

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of a text, with the tokenizer's special tokens unless the chat template wrote them."""
        tokenizer = self.engine.tokenizer
        wanted = not self.is_chat if add_special_tokens is None else add_special_tokens
        return encode_bare(tokenizer, [text])[0] if wanted else encode_text(tokenizer, text)

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, open_turn: bool) -> str:
        plain = [dict(message) for message in messages]
        return render(self.engine.tokenizer, plain, open_turn=open_turn)

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Answer each (context, settings of the task), of which `until` and the length count; the thinking is
        removed (arXiv 2604.11035, H.4). An answer that fails is empty. A context with which an answer
        of this length does not fit loses its beginning, with a warning."""
        params = [self._settings(number, given) for number, (_, given) in enumerate(requests)]
        limits = [self.engine.table.max_length - (each.max_tokens or 0) for each in params]
        contexts = [self.encode(context) for context, _ in requests]
        # An answer that may be as long as everything gets what its context leaves.
        longest = [limit if limit > 0 else len(ids) for limit, ids in zip(limits, contexts, strict=True)]
        contexts = self._cut(contexts, longest)
        lines = [self._line(number, *each) for number, each in enumerate(zip(contexts, params, strict=True))]
        done = list(self._run(lines))
        self.completions += done
        return ["" if each.error else strip_thinking(each.text) for each in done]

    def loglikelihood(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """The log-likelihood in nats of each continuation after its context, under the model's own
        distribution, and whether greedy decoding writes it. A context that is too long loses its beginning,
        with a warning."""
        texts = [((*context, *continuation), len(continuation)) for context, continuation in pairs]
        # Equal texts are scored once: rounding, which differs from pass to pass, must not order them.
        wanted = dict.fromkeys(texts)
        longest = self.engine.table.max_length - 1
        tokens = self._cut([list(ids) for ids, _ in wanted], [longest] * len(wanted))
        lines = [self._line(number, ids, SCORE) for number, ids in enumerate(tokens)]
        scores = {
            text: _likelihood(done, text[1]) for text, done in zip(wanted, self._run(lines), strict=True)
        }
        return [scores[text] for text in texts]

    def _cut(self, texts: list[list[int]], longest: list[int]) -> list[list[int]]:
        """The texts, with a beginning that does not fit cut off, which is logged as a warning."""
        num_cut = sum(len(ids) > num for ids, num in zip(texts, longest, strict=True))
        if num_cut:
            note = f"{num_cut} of {len(texts)} contexts lose their beginning: max_length="
            warnings.warn(f"{note}{self.engine.table.max_length} is too short for them", stacklevel=3)
        return [ids[max(0, len(ids) - num) :] for ids, num in zip(texts, longest, strict=True)]

    def _settings(self, number: int, given: Mapping[str, Any]) -> SamplingParams:
        until, params = given.get("until") or (), self._params
        stop = (*params.stop, *((until,) if isinstance(until, str) else until))
        lengths = (params.max_tokens, *map(given.get, LENGTHS), DEFAULT_MAX_TOKENS)
        length = next(filter(None, lengths))
        seed = None if params.seed is None else (params.seed + number) % 2**63
        stop = tuple(dict.fromkeys(filter(None, stop)))
        return dataclasses.replace(params, n=1, stop=stop, max_tokens=length, seed=seed)

    def _line(self, number: int, ids: list[int], params: SamplingParams) -> PromptLine:
        return PromptLine(location=f"request {number + 1}", request_id=str(number), prompt=ids, params=params)

    def _run(self, lines: list[PromptLine]) -> Iterator[Completion]:
        check_lines(self.engine, lines)
        return (done for _, done in AnswerRun(self.engine, iter(lines)))


def _likelihood(done: Completion, num_tokens: int) -> tuple[float, bool]:
    if done.error or done.prompt_logprobs is None:
        return float("-inf"), False
    if num_tokens == 0:
        return 0.0, True
    scored = [each for each in done.prompt_logprobs[-num_tokens:] if each is not None]
    is_greedy = all(next(iter(each.top)) == each.token_id for each in scored)
    return sum(each.logprob for each in scored), is_greedy
