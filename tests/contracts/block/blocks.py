"""Tiny block-causal checkpoints, mixed requests, and the slow decoder's answers to them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Completion, SamplingParams
from idlm.semantics import Semantics
from tests.block_reference import Rules, Sampling, SlowBlocks
from tests.contracts.engines import MASK_ID, prompts_of
from tests.toy import write_toy_checkpoint

LENGTHS = (1, 3, 4, 5, 8, 11, 16, 30)
PROMPTS = prompts_of(LENGTHS, vocab_size=MASK_ID)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 12},
    {"temperature": 1.0, "max_tokens": 10},
    {"temperature": 0.8, "top_k": 5, "max_tokens": 13},
    {"temperature": 1.2, "top_p": 0.8, "max_tokens": 1},
    {"temperature": 0.0, "max_tokens": 9},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "max_tokens": 14},
    {"temperature": 1.0, "max_tokens": 12},
    {"temperature": 0.0, "max_tokens": 11},
)
"""One per prompt: three blocks of four, most of them."""


def params_of(*, scored: bool = False) -> list[SamplingParams]:
    """Of each prompt; `scored`: most ask for log-probabilities, beside requests without any."""
    return [
        SamplingParams(
            seed=seed, ignore_eos=True, logprobs=(3, None, 20, 0)[seed % 4] if scored else None, **setting
        )
        for seed, setting in enumerate(SETTINGS)
    ]


def write_block_toy(directory: Path, *, shifted: bool, size: int = 4) -> Path:
    write_toy_checkpoint(directory, architecture="Qwen2" if shifted else "Qwen3", sharpness=6.0)
    meaning = Semantics(causality="block", logit_shift=shifted, block_size=size, mask_token_id=MASK_ID)
    meaning.save(directory)
    return directory


def rules_of(size: int, options: dict[str, Any], *, shifted: bool = False) -> Rules:
    """What the decoder's options are in the slow decoder."""
    modes: dict[str | None, tuple[float, float | None]] = {"quality": (0.7, 0.5), "speed": (0.5, 0.0)}
    threshold, edit = modes.get(options.get("mode"), (0.9, None))
    edit = options.get("edit_threshold", edit)
    return Rules(
        size=size,
        mask=MASK_ID,
        shifted=shifted,
        strategy=options.get("strategy", "low_confidence_dynamic"),
        steps=options.get("steps"),
        threshold=options.get("threshold", threshold),
        entropy_bound=options.get("entropy_bound", 0.35),
        part=options.get("sub_block_size"),
        edit=None if edit == 1.0 else edit,
        edit_passes=options.get("max_edit_passes", 16),
        reuses=options.get("dual_cache", False),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tokens and their log-probabilities, the passes that they took and the rows of these."""

    token_ids: list[int]
    logprobs: list[float]
    num_passes: int
    num_rows: int


class Slow:
    """Answers of the slow decoder, each computed once."""

    def __init__(self, toys: dict[bool, Path], size: int) -> None:
        self.size = size
        self._slow = functools.cache(lambda shifted: SlowBlocks(toys[shifted], rules_of(size, {})))
        self._known: dict[str, Answer] = {}

    def answer(
        self, options: dict[str, Any], prompt: list[int], sampling: Sampling, *, shifted: bool = False
    ) -> Answer:
        rules = rules_of(self.size, options, shifted=shifted)
        key = f"{rules} {prompt} {sampling}"
        if key not in self._known:
            slow = self._slow(shifted)
            slow.rules, slow.num_rows = rules, 0
            token_ids, num_passes = slow.answer(prompt, sampling)
            self._known[key] = Answer(
                token_ids=token_ids,
                logprobs=[slow.logprobs[len(prompt) + index] for index in range(len(token_ids))],
                num_passes=num_passes,
                num_rows=slow.num_rows,
            )
        return self._known[key]

    def answers(self, options: dict[str, Any], *, shifted: bool = False) -> list[Answer]:
        """To all `PROMPTS`."""
        return [
            self.answer(options, prompt, Sampling(seed=seed, **SETTINGS[seed]), shifted=shifted)
            for seed, prompt in enumerate(PROMPTS)
        ]


def assert_answers(found: Sequence[Completion], expected: Sequence[Answer]) -> None:
    """The same tokens, and the log-probabilities of the passes that decided them."""
    assert [list(done.token_ids) for done in found] == [answer.token_ids for answer in expected]
    for done, answer in zip(found, expected, strict=True):
        if done.logprobs is not None:
            assert [token.token_id for token in done.logprobs] == answer.token_ids
            assert [token.logprob for token in done.logprobs] == pytest.approx(answer.logprobs, abs=1e-4)
        for token in done.logprobs or ():
            assert MASK_ID not in token.top
            assert [*token.top.values()] == sorted(token.top.values(), reverse=True)
            assert token.top.get(token.token_id, token.logprob) == pytest.approx(token.logprob)
