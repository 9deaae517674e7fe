"""Full diffusion in plain Python: one canvas at a time, all logits in every pass, lists and loops.

The random numbers are those of the engine (their order is part of the contract); everything else is written
from the papers and the published code of LLaDA and Dream. Near ties raise `NearTie`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.kernels.block_step import PASSES_BITS
from idlm.kernels.sampling import uniforms
from tests.margins import DRAW_MARGIN, assert_apart, assert_gap

Layers = list[tuple[Tensor, Tensor]]


class Logits(Protocol):
    """Logits [L, V] of a canvas, not shifted, of which only the positions `fed` are computed, with the keys
    and values of the others in `kv`; see `full_reference.logits`."""

    def __call__(self, token_ids: list[int], *, fed: list[int], kv: Layers) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowCanvas:
    """Options as those of decoder `full`."""

    logits: Logits
    mask_id: int
    shift: bool
    order: str
    block_length: int | None = None
    steps: int | None = None
    threshold: float | None = None
    order_temperature: float = 0.0
    defer_eos: bool = False
    forbid_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    factor: float | None = None
    cache: str | None = None
    cache_refresh: int | None = None
    guidance: float = 0.0

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> tuple[tuple[int, ...], int]:
        """The tokens of the whole answer, and the number of passes."""
        total, num_passes = params.max_tokens, 0
        size = self.block_length or total
        canvas: list[int | None] = [*prompt, *[None] * total]
        for start in range(len(prompt), len(canvas), size):
            steps = size if self.steps is None else self.steps * size // total
            step, recent, kv = 0, list[int](), Layers()
            while None in canvas[start : start + size]:
                fed = self._fed(canvas, start, size, step, recent)
                ids = [self.mask_id if token is None else token for token in canvas]
                logits_LV = self.logits(ids, fed=fed, kv=kv).double()
                if self.guidance:
                    hidden = [self.mask_id] * len(prompt) + ids[len(prompt) :]
                    other_LV = self.logits(hidden, fed=fed, kv=Layers()).double()
                    logits_LV = other_LV + (self.guidance + 1) * (logits_LV - other_LV)
                recent = self._pass(logits_LV, canvas, start, size, step, steps, params)
                step += 1
            num_passes += step
        return tuple(token for token in canvas[len(prompt) :] if token is not None), num_passes

    def _fed(
        self, canvas: list[int | None], start: int, size: int, step: int, recent: list[int]
    ) -> list[int]:
        """The positions that a pass computes; `recent` ones were decided by the pass before. Every block
        begins with all of them, so that nothing is left of the blocks before."""
        everything = list(range(len(canvas)))
        interval = (self.cache_refresh or 8) if self.cache == "delayed" else 1 << 30
        if self.cache is None or step % interval == 0:
            return everything
        masks = [index for index in everything if canvas[index] is None]
        fed = {
            "prefix": everything[start:],
            "dual": everything[start : start + size],
            "delayed": masks + recent,
        }[self.cache]
        before = [index - 1 for index in masks if self.shift and index < start + size]
        return sorted({*fed, *before})

    def _pass(
        self,
        logits_LV: Tensor,
        canvas: list[int | None],
        start: int,
        size: int,
        step: int,
        steps: int,
        params: SamplingParams,
    ) -> list[int]:
        """Decide some masks; returns their positions."""
        assert params.seed is not None
        stream = (torch.tensor([number]) for number in (params.seed, 0, (start << PASSES_BITS) + step))
        numbers = uniforms(*stream, 2 * size)[0].tolist()
        masks = [index for index in range(start, start + size) if canvas[index] is None]
        tokens, scores = {}, {}
        for index in masks:
            row_V = logits_LV[index - int(self.shift)].clone()
            for token in (self.mask_id, *(self.stop_ids if self.forbid_eos else ())):
                row_V[token] = -1e30
            token, law_V = _draw(row_V, params, numbers[2 * (index - start)])
            own_V = row_V.softmax(0)
            judged_V = own_V if params.temperature == 0 else law_V
            best, second = judged_V.sort(descending=True).values[:2].tolist()
            tokens[index] = token
            scores[index] = {
                "low_confidence": float(own_V[token]),
                "maskgit_plus": float(judged_V[token]),
                "topk_margin": best - second,
                "entropy": float((judged_V * judged_V.clamp(min=1e-300).log()).sum()),
                "random": numbers[2 * (index - start) + 1],
                "origin": numbers[2 * (index - start) + 1],
            }[self.order]
            if self.defer_eos and token in self.stop_ids:
                scores[index] = -1e30
        chosen = self._chosen(masks, scores, numbers[1::2], start, size, step, steps)
        for index in chosen:
            canvas[index] = tokens[index]
        return chosen

    def _chosen(
        self,
        masks: list[int],
        scores: dict[int, float],
        numbers: list[float],
        start: int,
        size: int,
        step: int,
        steps: int,
    ) -> list[int]:
        is_last = step == steps - 1
        now, then = (1 - (1 - 1e-3) * (step + late) / steps for late in (0, 1))
        chance = 1.0 if is_last else 1 - then / now
        if self.order == "origin":
            for index in masks:
                assert_apart(scores[index], chance, margin=1e-9)
            return [index for index in masks if scores[index] < chance]
        if self.threshold is not None:
            for index in masks:
                assert_apart(scores[index], self.threshold)
            above = [index for index in masks if scores[index] > self.threshold]
            if above:
                return above
            quota = 1
        elif self.factor is not None:
            quota = 1
            for number, score in enumerate(sorted((scores[index] for index in masks), reverse=True), start=1):
                assert_apart((number + 1) * (1 - score), self.factor)
                if (number + 1) * (1 - score) < self.factor:
                    quota = number
        elif self.order in ("low_confidence", "random"):
            quota = size // steps + (step < size % steps)
        else:
            quota = int(len(masks) * chance)
        if self.order_temperature > 0:
            scores = {
                index: scores[index] / self.order_temperature - math.log(-math.log(numbers[index - start]))
                for index in masks
            }
        assert_gap([scores[index] for index in masks], quota, margin=1e-9 if self.order == "random" else 1e-4)
        return sorted(masks, key=lambda index: -scores[index])[:quota]


def _draw(row_V: Tensor, params: SamplingParams, number: float) -> tuple[int, Tensor]:
    """A token and the request's distribution, after temperature, top-k, top-p and min-p."""
    if params.temperature == 0:
        assert_gap(row_V.tolist())
        return int(row_V.argmax()), torch.nn.functional.one_hot(row_V.argmax(), len(row_V)).double()
    scaled_V = row_V / params.temperature
    if params.top_k:
        scaled_V[scaled_V < scaled_V.sort(descending=True).values[params.top_k - 1]] = -torch.inf
    probs_V = scaled_V.softmax(0)
    if params.top_p < 1:
        order = probs_V.argsort(descending=True)
        before = probs_V[order].cumsum(0) - probs_V[order]
        for value in before.tolist():
            assert_apart(value, params.top_p)
        probs_V[order[before >= params.top_p]] = 0
        probs_V /= probs_V.sum()
    borders = probs_V.cumsum(0)
    for border in borders.tolist()[:-1]:
        assert_apart(number, border, margin=DRAW_MARGIN)
    return int((borders <= number).sum()), probs_V
