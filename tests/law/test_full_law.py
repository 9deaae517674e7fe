"""The law of whole answers of decoder `full`, against enumeration of every pass: which tokens are drawn and
which of them are kept depend on each other.

The toy has 5 tokens, one of them the mask; an answer has three. The oracle takes logits from transformers and
walks all canvases that a pass can leave."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.semantics import Semantics
from tests.law.harness import MASK_ID, PROMPT, VOCAB, build_engine, fit, sample

NUM_TOKENS, NUM_DRAWS = 3, 6_000
TOKENS = tuple(token for token in range(VOCAB) if token != MASK_ID)
NEUTRAL = SamplingParams(max_tokens=NUM_TOKENS, seed=0)
CASES: list[tuple[dict[str, Any], float]] = [
    ({"order": "low_confidence"}, 1.0),
    ({"order": "maskgit_plus", "steps": 2}, 0.7),
    ({"order": "entropy", "steps": 2}, 1.3),
    ({"order": "random"}, 1.0),
    ({"order": "origin", "steps": 2}, 1.0),
    ({"order": "low_confidence", "threshold": 0.4}, 1.0),
    ({"order": "low_confidence", "guidance": 1.5}, 1.0),
    ({"order": "maskgit_plus", "steps": 2, "guidance": 0.5}, 0.7),
]
LEVEL = 1e-6 / len(CASES)
Canvas = tuple[int, ...]


@pytest.fixture(scope="module")
def toy(law_toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("full")
    for path in law_toy.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    Semantics(causality="full", logit_shift=False, mask_token_id=MASK_ID).save(directory)
    return directory


class Oracle:
    """The law of one order, by canvas: {canvas: probability} after every pass."""

    def __init__(self, directory: Path, options: dict[str, Any], temperature: float) -> None:
        import transformers

        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.options, self.temperature = options, temperature
        self.probs = functools.cache(self._probs)

    def law(self) -> torch.Tensor:
        """[V^3] over answers."""
        states: dict[Canvas, float] = {(MASK_ID,) * NUM_TOKENS: 1.0}
        step = 0
        while any(MASK_ID in canvas for canvas in states):
            after: dict[Canvas, float] = defaultdict(float)
            for canvas, chance in states.items():
                for left, share in self._pass(canvas, step):
                    if share:
                        after[left] += chance * share
            states, step = dict(after), step + 1
        law_C = torch.zeros(VOCAB**NUM_TOKENS, dtype=torch.float64)
        for canvas, chance in states.items():
            law_C[cell(torch.tensor([canvas]))] += chance
        return law_C

    @torch.no_grad()
    def _probs(self, canvas: Canvas) -> tuple[torch.Tensor, torch.Tensor]:
        """The request's distributions [3, V], and the model's own."""
        guidance = self.options.get("guidance", 0.0)
        logits = self._logits([*PROMPT, *canvas])
        if guidance:
            other = self._logits([*[MASK_ID] * len(PROMPT), *canvas])
            logits = other + (guidance + 1) * (logits - other)
        logits[:, MASK_ID] = -torch.inf
        return (logits / self.temperature).softmax(-1), logits.softmax(-1)

    def _logits(self, token_ids: list[int]) -> torch.Tensor:
        """Of the answer's positions [3, V]; every position sees all others."""
        everything = torch.zeros(1, 1, len(token_ids), len(token_ids))
        found = self.model(input_ids=torch.tensor([token_ids]), attention_mask=everything)
        return torch.as_tensor(found.logits[0, len(PROMPT) :].double())

    def _pass(self, canvas: Canvas, step: int) -> Iterator[tuple[Canvas, float]]:
        """Every canvas that a pass can leave, with its chance."""
        if MASK_ID not in canvas:
            yield canvas, 1.0
            return
        law, own = self.probs(canvas)
        masks = [index for index in range(NUM_TOKENS) if canvas[index] == MASK_ID]
        for drawn in itertools.product(TOKENS, repeat=len(masks)):
            chance = 1.0
            for index, token in zip(masks, drawn, strict=True):
                chance *= float(law[index, token])
            tokens = dict(zip(masks, drawn, strict=True))
            for kept, share in self._kept(masks, tokens, law, own, step):
                left = [tokens[index] if index in kept else canvas[index] for index in range(NUM_TOKENS)]
                yield tuple(left), chance * share

    def _kept(
        self,
        masks: list[int],
        tokens: dict[int, int],
        law: torch.Tensor,
        own: torch.Tensor,
        step: int,
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """Sets of positions that the pass decides, with their chances."""
        order, steps = self.options["order"], self.options.get("steps", NUM_TOKENS)
        now, then = (1 - (1 - 1e-3) * (step + late) / steps for late in (0, 1))
        flip = 1.0 if step == steps - 1 else 1 - then / now
        if order == "origin":
            for size in range(len(masks) + 1):
                for kept in itertools.combinations(masks, size):
                    yield kept, flip**size * (1 - flip) ** (len(masks) - size)
            return
        if order == "random":
            found = list(itertools.combinations(masks, 1))
            yield from ((kept, 1 / len(found)) for kept in found)
            return
        judged = own if order == "low_confidence" else law
        scores = {index: float(judged[index, tokens[index]]) for index in masks}
        if order == "entropy":
            scores = {index: -float(torch.special.entr(law[index]).sum()) for index in masks}
        quota = 1 if order == "low_confidence" else int(len(masks) * flip)
        ranked = sorted(masks, key=lambda index: -scores[index])
        above = tuple(index for index in masks if scores[index] > self.options.get("threshold", 2.0))
        yield above or tuple(ranked[:quota]), 1.0


def cell(draws_BT: torch.Tensor) -> torch.Tensor:
    """Cell numbers [B] of answers."""
    powers = VOCAB ** torch.arange(NUM_TOKENS - 1, -1, -1)
    return (draws_BT * powers).sum(1)


@pytest.mark.sweep_but(options={"order": "origin", "steps": 2})
@pytest.mark.sweep_but(options={"order": "maskgit_plus", "steps": 2, "guidance": 0.5})
@pytest.mark.parametrize(("options", "temperature"), CASES, ids=str)
def test_answers_have_the_law_of_their_passes(toy: Path, options: dict[str, Any], temperature: float) -> None:
    law_C = Oracle(toy, options, temperature).law()
    assert abs(float(law_C.sum()) - 1) < 1e-9
    setting = (PROMPT, replace(NEUTRAL, temperature=temperature))
    engine = build_engine(toy, "full", **options)
    draws_BT = sample(engine, [setting], NUM_DRAWS).draws[setting]
    found = fit(cell(draws_BT), law_C)
    assert found.holds(LEVEL), found


def test_another_order_has_another_law(toy: Path) -> None:
    """Else the test above would prove nothing."""
    setting = (PROMPT, replace(NEUTRAL, temperature=1.0))
    engine = build_engine(toy, "full", order="random")
    draws_BT = sample(engine, [setting], NUM_DRAWS).draws[setting]
    assert not fit(cell(draws_BT), Oracle(toy, {"order": "low_confidence"}, 1.0).law()).holds(LEVEL)
