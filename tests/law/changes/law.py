"""The law of answers whose logits change by the tokens before them, by enumeration; settings and draws.

The oracle shares no code with the engine: it counts the tokens of every continuation of the toy, and takes
logits and the warpers after the changes from transformers. X continuations, V vocabulary, H tokens before."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from tests.law.harness import (
    NEUTRAL,
    NUM_TOKENS,
    VOCAB,
    WINDOW,
    Fit,
    Sampled,
    Setting,
    fit,
    toy_logits,
    warped,
    window_cells,
)

PROMPT = (1, 3, 1)
TEMPERATURES = (0.7, 1.0, 1.3)
PENALTIES: dict[str, Any] = {
    "presence_penalty": 1.2,
    "frequency_penalty": -0.6,
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 3,
}
BIASES: dict[str, Any] = {"logit_bias": {0: 1.5, 3: -1.0}}
CHANGES = (PENALTIES, BIASES, PENALTIES | BIASES)
SETTINGS: tuple[Setting, ...] = tuple(
    (PROMPT, replace(NEUTRAL, temperature=temperature, **changes))
    for changes, temperature in itertools.product(CHANGES, TEMPERATURES)
)
"""Penalties, biases and both at every temperature, which share passes."""


def changed(logits_XV: Tensor, history_XH: Tensor, num_prompt: int, params: SamplingParams) -> Tensor:
    """Logits after the tokens `history_XH`, of which `num_prompt` are the prompt's."""
    one_hot_XHV = torch.nn.functional.one_hot(history_XH, VOCAB)
    is_seen_XV, count_XV = one_hot_XHV.sum(1) > 0, one_hot_XHV[:, num_prompt:].sum(1)
    logits_XV = logits_XV + torch.tensor([params.logit_bias.get(token, 0.0) for token in range(VOCAB)])
    factor_XV = params.repetition_penalty ** -logits_XV.sign()
    logits_XV = torch.where(is_seen_XV, logits_XV * factor_XV, logits_XV)
    logits_XV = logits_XV - params.frequency_penalty * count_XV - params.presence_penalty * (count_XV > 0)
    size = params.no_repeat_ngram_size
    if size and history_XH.shape[1] >= size:
        runs_XWS = history_XH.unfold(1, size, 1)
        last_X1S = history_XH[:, None, history_XH.shape[1] - size + 1 :]
        is_same_XW = (runs_XWS[..., :-1] == last_X1S).all(-1)
        is_banned_XV = (one_hot_XHV[:, size - 1 :] * is_same_XW[..., None]).sum(1) > 0
        logits_XV = logits_XV.masked_fill(is_banned_XV, -torch.inf)
    return logits_XV


@functools.cache
def exact_law(
    directory: Path, prompt: tuple[int, ...], changes: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """As `harness.exact_law`, of the entry `changes` of `CHANGES`."""
    params = replace(NEUTRAL, temperature=temperature, **CHANGES[changes])
    joint = torch.ones(1, dtype=torch.float64)
    for depth, logits_XV in enumerate(toy_logits(directory, prompt)):
        rows = torch.tensor(list(itertools.product(range(VOCAB), repeat=depth)), dtype=torch.int64)
        history_XH = torch.cat(
            [torch.tensor(prompt).expand(len(rows), -1), rows.view(len(rows), depth)], dim=1
        )
        probs_XV = warped(changed(logits_XV, history_XH, len(prompt), params), params)
        # Of a continuation that cannot come, all tokens may be banned.
        joint = (joint[:, None] * probs_XV.nan_to_num(0.0)).flatten()
    assert len(joint) == VOCAB**NUM_TOKENS and abs(float(joint.sum()) - 1) < 1e-9
    joint = joint.view(VOCAB**WINDOW, -1)
    return joint.sum(1), joint.sum(0)


def fits(directory: Path, sampled: Sampled) -> Mapping[str, Fit]:
    """Fit of every setting's start and middle, labelled."""
    named = {}
    for (prompt, params), draws_BT in sampled.draws.items():
        laws = exact_law(directory, prompt, _number(params), params.temperature)
        for window, cells_B, law_C in zip(("start", "middle"), window_cells(draws_BT), laws, strict=True):
            named[f"T={params.temperature} {_number(params)} {window}"] = fit(cells_B, law_C)
    return named


def _number(params: SamplingParams) -> int:
    """The entry of `CHANGES` that the setting has."""
    settings = [params for _, params in SETTINGS]
    return settings.index(params) // len(TEMPERATURES)
