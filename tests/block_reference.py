"""Block diffusion as slow as can be, from the facts alone: one request at a time, the whole sequence computed
anew in every pass by transformers with a dense block-causal mask, everything else in plain Python.

Nothing of the engine is imported. What the engine is free to choose is stated here: random numbers are
Philox4x32-10 of (seed, sample, block << 16 | pass, position); ties go to the left; the MASK is never
predicted. Rounding decides a near tie, so one raises `tests.margins.NearTie`: no test compares across it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.margins import DRAW_MARGIN, assert_apart, assert_gap, clear_choice

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
    edit: float | None = None
    edit_passes: int = 16
    reuses: bool = False


class SlowBlocks:
    """A model and rules. Counts edits, and rows of blocks that are not clean yet."""

    num_edits = 0
    num_rows = 0
    logprobs: dict[int, float]
    """By position, of the last token decided there in the last answer."""

    def __init__(self, directory: Path, rules: Rules) -> None:
        import transformers

        self.rules = rules
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def answer(self, prompt: list[int], sampling: Sampling) -> tuple[list[int], int]:
        """Emitted tokens, cut at a stop or the limit, and the denoising passes that took."""
        known, num_passes = list(prompt), 0
        self.logprobs = {}
        while True:
            block, used = self._block(known, sampling)
            num_passes += used
            for token in block:
                known.append(token)
                if token in sampling.stops or len(known) - len(prompt) >= sampling.max_tokens:
                    return known[len(prompt) :], num_passes
            assert len(known) % self.rules.size == 0

    @torch.no_grad()
    def _logits(self, ids: list[int]) -> list[list[float]]:
        block = torch.arange(len(ids)) // self.rules.size
        allowed = block[None, :] <= block[:, None]
        mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]
        output = self.model(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=self.rules.reuses)
        if self.rules.reuses:
            self.held = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
        return self._as_rows(output.logits[0])

    @torch.no_grad()
    def _part_logits(self, ids: list[int], first: int) -> list[list[float]]:
        """Of `ids` at `first`, beside the keys and values that the last whole pass left of other
        positions."""
        import transformers

        cache, length = transformers.DynamicCache(), self.held[0][0].shape[2]
        indices = torch.arange(first, first + len(ids))
        others = [index for index in range(length) if index not in indices]
        for number, (keys, values) in enumerate(self.held):
            cache.update(keys[:, :, others], values[:, :, others], number)
        output = self.model(
            input_ids=torch.tensor([ids]),
            position_ids=indices[None],
            attention_mask=torch.zeros(1, 1, len(ids), length),
            past_key_values=cache,
            use_cache=True,
        )
        return self._as_rows(output.logits[0])

    def _as_rows(self, logits: torch.Tensor) -> list[list[float]]:
        logits[:, self.rules.mask] = NEVER
        rows: list[list[float]] = logits.tolist()
        return rows

    def _block(self, known: list[int], sampling: Sampling) -> tuple[list[int], int]:
        """The tokens that complete the block in which `known` ends (or the next one)."""
        rules, size = self.rules, self.rules.size
        number = len(known) // size
        start = number * size
        prompt_offsets = range(len(known) - start)
        work: list[int | None] = [*known[start:], *[None] * (start + size - len(known))]
        if rules.shifted and len(known) == start:
            row = self._logits(known)[-1]
            work[0] = first = self._draw(row, sampling, uniform(sampling.seed, 0, number << 16, 0))
            self.logprobs[start] = math.log(softmax(row)[first])
        num_passes = num_clean = 0
        self.whole_part = -1
        while None in work or rules.edit is not None:
            rows = self._rows_of(known[:start], work)
            masked = {index: row for index, row in rows.items() if work[index] is None}
            edits: dict[int, int | None] = {}
            if rules.edit is not None:
                others = rows.keys() - masked.keys() - set(prompt_offsets)
                output = {index: self._edit(rows[index], work[index], sampling) for index in others}
                edits = {index: token for index, token in output.items() if token != work[index]}
            began_clean = None not in work
            decided = {} if began_clean else self._decide(masked, sampling, number, num_passes)
            for index, chosen in decided.items():
                work[index] = chosen
            for index, token in (decided | edits).items():
                if token is not None:
                    self.logprobs[start + index] = math.log(softmax(rows[index])[token])
            work = [edits.get(index, token) for index, token in enumerate(work)]
            self.num_edits += len(edits)
            num_passes += 1
            num_clean += began_clean
            if began_clean and (not edits or num_clean == rules.edit_passes):
                break
        return [token for token in work[len(known) - start :] if token is not None], num_passes

    def _rows_of(self, before: list[int], work: list[int | None]) -> dict[int, list[float]]:
        """The row that predicts each position, as far as one does."""
        rules, start = self.rules, len(before)
        first, last = 0, rules.size
        if rules.reuses:
            assert rules.part is not None
            masked = work.index(None)
            part = masked // rules.part
            starts_masked = masked % rules.part == 0
            if part == self.whole_part and not (rules.shifted and starts_masked):
                first, last = part * rules.part, (part + 1) * rules.part
            self.whole_part = part
        ids = [rules.mask if token is None else token for token in work[first:last]]
        is_whole = len(ids) == rules.size
        self.num_rows += len(ids)
        logits = self._logits(before + ids)[start:] if is_whole else self._part_logits(ids, start + first)
        # The row before the first one is of no use: there, a shifted position is never masked.
        indices = range(first + 1, last) if rules.shifted else range(first, last)
        return dict(zip(indices, logits, strict=False))

    def _decide(
        self, rows: dict[int, list[float]], sampling: Sampling, number: int, num_passes: int
    ) -> dict[int, int]:
        """Of the masks that there are logits for, the tokens of those that the strategy takes."""
        step = (number << 16) + 1 + num_passes
        numbers = {index: uniform(sampling.seed, 0, step, index) for index in rows}
        scores, certain = {}, set()
        for index, row in rows.items():
            law, own = law_of(row, sampling), softmax(row)
            judge = own if sampling.temperature == 0 else law
            scores[index] = judge[invert(law, numbers[index])]
            if self.rules.strategy == "entropy_bounded":
                scores[index] = -sum(p * math.log(p) for p in own if p > 0)
            elif sampling.temperature > 0 and scores[index] == 1:
                certain.add(index)
            assert_clear_filters(row, sampling)

        def choose(scores: dict[int, float]) -> list[int]:
            return sorted(self._choose(scores, num_passes))

        chosen = choose(scores)
        if self.rules.strategy != "sequential":
            # A law of one token has probability 1 on every device: of such ties, the left position is first.
            clear_choice(choose, scores, exact=certain)
        return {index: self._draw(rows[index], sampling, numbers[index]) for index in chosen}

    def _draw(self, row: list[float], sampling: Sampling, number: float) -> int:
        """The token that a random number draws."""
        law = law_of(row, sampling)
        assert_clear_draw(row, law, sampling, number)
        return invert(law, number)

    def _edit(self, row: list[float], old: int | None, sampling: Sampling) -> int | None:
        """The token that takes the place of the decided one."""
        assert self.rules.edit is not None
        judge = softmax(row) if sampling.temperature == 0 else law_of(row, sampling)
        best = row.index(max(row))
        if best != old:
            assert_apart(judge[best], self.rules.edit)
        if judge[best] > self.rules.edit:
            assert_gap(row)
        return best if judge[best] > self.rules.edit else old

    def _choose(self, scores: dict[int, float], step: int) -> list[int]:
        """Positions by their scores: entropies where the strategy looks at these, confidences elsewhere."""
        rules = self.rules
        indices = sorted(scores)
        if rules.part is not None:
            indices = [index for index in indices if index // rules.part == indices[0] // rules.part]
        steps = rules.steps or rules.size
        quota = min(rules.size // steps + (step < rules.size % steps), len(indices))
        by_confidence = sorted(indices, key=lambda index: -scores[index])
        if rules.strategy == "sequential":
            return indices[:quota]
        if rules.strategy == "low_confidence_static":
            return by_confidence[:quota]
        if rules.strategy == "low_confidence_dynamic":
            sure = [index for index in indices if scores[index] > rules.threshold]
            return sure if len(sure) >= quota else by_confidence[:quota]
        assert rules.strategy == "entropy_bounded"
        chosen: list[int] = []
        total = 0.0
        for index in sorted(indices, key=lambda index: scores[index]):
            total += scores[index]
            if chosen and total >= rules.entropy_bound:
                break
            chosen.append(index)
        return chosen


def queries_keys_values(layer: Any, normed_LD: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Of a layer of transformers [L, heads, H]: projected, normed where it has norms, and rotated by the
    cosines and sines [L, 1, H]."""
    attention = layer.self_attn
    q_LNH, k_LKH, v_LKH = (
        projection(normed_LD).view(len(normed_LD), -1, attention.head_dim)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        q_LNH, k_LKH = attention.q_norm(q_LNH), attention.k_norm(k_LKH)
    q_LNH, k_LKH = (x * tables[0] + _turned(x) * tables[1] for x in (q_LNH, k_LKH))
    return q_LNH, k_LKH, v_LKH


def _turned(x: Tensor) -> Tensor:
    """The rotary embedding's other half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def assert_clear_filters(row: list[float], sampling: Sampling) -> None:
    """Rounding does not change which tokens top-k and top-p keep."""
    if sampling.temperature > 0:
        assert_gap(row, sampling.top_k)
    if sampling.temperature > 0 and sampling.top_p < 1:
        whole = law_of(row, dataclasses.replace(sampling, top_p=1.0))
        for mass in itertools.accumulate(sorted(whole, reverse=True)):
            assert_apart(mass, sampling.top_p, margin=DRAW_MARGIN)


def assert_clear_draw(row: list[float], law: list[float], sampling: Sampling, number: float) -> None:
    """Rounding does not change the token that a number draws."""
    if sampling.temperature == 0:
        assert_gap(row)
        return
    assert_clear_filters(row, sampling)
    token = invert(law, number)
    for border in (sum(law[:token]), sum(law[: token + 1])):
        if DRAW_MARGIN < border < 1 - DRAW_MARGIN:
            assert_apart(number, border, margin=DRAW_MARGIN)


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
