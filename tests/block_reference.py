"""Block diffusion as slow as can be, from the facts alone: one request at a time, the whole sequence computed
anew in every pass by transformers with a dense block-causal mask, everything else in plain Python.

Nothing of the engine is imported. What the engine is free to choose is stated here: random numbers are
Philox4x32-10 of (seed, sample, block << 16 | pass, place); ties go to the left; the MASK is never predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NEVER = -1e30


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A request's settings."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 12
    stops: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A checkpoint's meaning and a strategy."""

    size: int
    mask: int
    shifted: bool = False
    strategy: str = "low_confidence_dynamic"
    steps: int | None = None
    threshold: float = 0.9
    entropy_bound: float = 0.35
    part: int | None = None


class SlowBlocks:
    """A model and rules."""

    def __init__(self, directory: Path, rules: Rules) -> None:
        import transformers

        self.rules = rules
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def answer(self, prompt: list[int], sampling: Sampling) -> tuple[list[int], int]:
        """Emitted tokens, cut at a stop or the limit, and the denoising passes that took."""
        size, known, num_passes = self.rules.size, list(prompt), 0
        while True:
            block, used = self._block(known, sampling)
            num_passes += used
            for token in block:
                known.append(token)
                if token in sampling.stops or len(known) - len(prompt) >= sampling.max_tokens:
                    return known[len(prompt) :], num_passes
            assert len(known) % size == 0

    @torch.no_grad()
    def _logits(self, ids: list[int]) -> list[list[float]]:
        block = torch.arange(len(ids)) // self.rules.size
        allowed = block[None, :] <= block[:, None]
        mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]
        logits = self.model(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0]
        logits[:, self.rules.mask] = NEVER
        rows: list[list[float]] = logits.tolist()
        return rows

    def _block(self, known: list[int], sampling: Sampling) -> tuple[list[int], int]:
        """The tokens that complete the block in which `known` ends (or the next one)."""
        rules, size = self.rules, self.rules.size
        number = len(known) // size
        start = number * size
        work: list[int | None] = [*known[start:], *[None] * (start + size - len(known))]
        if rules.shifted and len(known) == start:
            law = law_of(self._logits(known)[-1], sampling)
            work[0] = invert(law, uniform(sampling.seed, 0, number << 16, 0))
        num_passes = 0
        while None in work:
            ids = known[:start] + [rules.mask if token is None else token for token in work]
            rows = self._logits(ids)[start:]
            if rules.shifted:
                rows = [rows[0], *rows[:-1]]
            drawn, confidence, entropy = {}, {}, {}
            for place in (j for j in range(size) if work[j] is None):
                law = law_of(rows[place], sampling)
                step = (number << 16) + 1 + num_passes
                drawn[place] = invert(law, uniform(sampling.seed, 0, step, place))
                own = softmax(rows[place])
                judge = own if sampling.temperature == 0 else law
                confidence[place] = judge[drawn[place]]
                entropy[place] = -sum(p * math.log(p) for p in own if p > 0)
            for place in self._choose(confidence, entropy, num_passes):
                work[place] = drawn[place]
            num_passes += 1
        return [token for token in work[len(known) - start :] if token is not None], num_passes

    def _choose(self, confidence: dict[int, float], entropy: dict[int, float], step: int) -> list[int]:
        rules = self.rules
        places = sorted(confidence)
        if rules.part is not None:
            places = [place for place in places if place // rules.part == places[0] // rules.part]
        steps = rules.steps or rules.size
        quota = min(rules.size // steps + (step < rules.size % steps), len(places))
        by_confidence = sorted(places, key=lambda place: -confidence[place])
        if rules.strategy == "sequential":
            return places[:quota]
        if rules.strategy == "low_confidence_static":
            return by_confidence[:quota]
        if rules.strategy == "low_confidence_dynamic":
            sure = [place for place in places if confidence[place] > rules.threshold]
            return sure if len(sure) >= quota else by_confidence[:quota]
        assert rules.strategy == "entropy_bounded"
        chosen: list[int] = []
        total = 0.0
        for place in sorted(places, key=lambda place: entropy[place]):
            total += entropy[place]
            if chosen and total >= rules.entropy_bound:
                break
            chosen.append(place)
        return chosen


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(value - top) for value in row]
    mass = sum(weights)
    return [weight / mass for weight in weights]


def law_of(row: list[float], sampling: Sampling) -> list[float]:
    """Temperature, top-k, top-p, in this order."""
    if sampling.temperature == 0:
        return [float(i == row.index(max(row))) for i in range(len(row))]
    scaled = [value / sampling.temperature for value in row]
    order = sorted(range(len(row)), key=lambda i: -row[i])
    if sampling.top_k:
        order = order[: sampling.top_k]
    kept = set(order)
    law = softmax([value if i in kept else NEVER for i, value in enumerate(scaled)])
    mass = 0.0
    nucleus: set[int] = set()
    for i in order:
        if mass >= sampling.top_p and nucleus:
            break
        nucleus.add(i)
        mass += law[i]
    total = sum(law[i] for i in nucleus)
    return [law[i] / total if i in nucleus else 0.0 for i in range(len(row))]


def invert(law: list[float], number: float) -> int:
    """The first token whose cumulated probability exceeds the number."""
    total, target = 0.0, number * sum(law)
    for token, probability in enumerate(law):
        total += probability
        if total > target:
            return token
    return max(i for i, p in enumerate(law) if p > 0)


def uniform(seed: int, sample: int, step: int, draw: int) -> float:
    """Philox4x32-10 by Salmon et al. (SC 2011), its first word."""
    word = 0xFFFFFFFF
    c = (draw, step & word, step >> 32, sample)
    k = (seed & word, seed >> 32)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = ((p1 >> 32) ^ c[1] ^ k[0], p1 & word, (p0 >> 32) ^ c[3] ^ k[1], p0 & word)
        k = ((k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word)
    return (c[0] + 0.5) * 2.0**-32
