"""kv-side accelerators as slow as can be, straight from the papers' equations, in whole generations.

The whole sequence is computed anew in every pass, through the weights of transformers' modules but layer by
layer, with a dense mask per query head: block-causal, but for the rows of a block in work, which see of the
slots before it only those that a rule lists for their KV head. Nothing of the engine is imported.
W positions of a block, P slots before it, L positions, N query heads, K KV heads, G = N / K, H head dim, Q =
G
* W queries of a KV head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tests.block_reference import Rules, Sampling, SlowBlocks, queries_keys_values
from tests.margins import assert_gap

Lists = list[list[int]]
"""Slots before the block, by KV head."""
SLOT_MARGINS = {torch.float32: 1e-6, torch.float64: 1e-12}
"""The smallest difference of slots' scores (shares of attention, bounds of products), by the keys' dtype."""


class Rule(Protocol):
    """What the rows of one sequence's block see."""

    def begin(self, block: int, step: int, num_steps: int) -> None:
        """Pass `step` (from 0) over a block, whose quota allots it `num_steps`."""
        ...

    def lists(self, layer: int, q_WNH: Tensor, k_PKH: Tensor) -> Lists | None:
        """None: all."""
        ...


def share_of(q_WNH: Tensor, k_PKH: Tensor, head: int) -> list[float]:
    """Equation 3 of MAGE before Top-k: 1 / (G B) * sum over g and q of softmax(Q K^T / sqrt(d))."""
    scores_QP = queries_of(q_WNH, k_PKH, head) @ k_PKH[:, head].T / math.sqrt(q_WNH.shape[2])
    found: list[float] = scores_QP.softmax(dim=1).mean(dim=0).tolist()
    return found


def queries_of(q_WNH: Tensor, k_PKH: Tensor, head: int) -> Tensor:
    """The G * W queries [Q, H] of a KV head."""
    group = q_WNH.shape[1] // k_PKH.shape[1]
    return q_WNH[:, head * group : (head + 1) * group].flatten(0, 1)


def bound_of(q_QH: Tensor, page_FH: Tensor) -> float:
    """Quest's upper bound of a query's product with any key of a page, on average."""
    min_H, largest_H = page_FH.min(dim=0).values, page_FH.max(dim=0).values
    return float(torch.maximum(q_QH * min_H, q_QH * largest_H).sum(dim=1).mean())


def top(scores: list[float], num: int, dtype: torch.dtype = torch.float32) -> list[int]:
    """Positions of the largest."""
    assert_gap(scores, num, margin=SLOT_MARGINS[dtype])
    return sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:num])


@dataclass(kw_only=True)
class SlowMage:
    """Ranks in a block's first pass, by MAGE; with `exact_share`, in the last of the block's exact steps, by
    SparseD."""

    k: int
    exact_layers: int = 2
    exact_share: float | None = None

    def begin(self, block: int, step: int, num_steps: int) -> None:
        """A new block knows nothing."""
        self.last = 0 if self.exact_share is None else math.ceil(round(self.exact_share * num_steps, 6)) - 1
        self.step = step
        if step == 0:
            self.sets: dict[int, Lists] = {}

    def lists(self, layer: int, q_WNH: Tensor, k_PKH: Tensor) -> Lists | None:
        """Those of the pass that ranked."""
        if layer < self.exact_layers or self.step < self.last:
            return None
        if self.step > self.last:
            return self.sets[layer]
        dtype, q_WNH, k_PKH = k_PKH.dtype, q_WNH.double(), k_PKH.double()
        shares = [share_of(q_WNH, k_PKH, head) for head in range(k_PKH.shape[1])]
        self.sets[layer] = [top(scores, self.k, dtype) for scores in shares]
        return None


@dataclass(kw_only=True)
class SlowQuest:
    """Scores pages in every pass."""

    k: int
    page: int = 16
    exact_layers: int = 2

    def begin(self, block: int, step: int, num_steps: int) -> None:
        """Keeps nothing."""

    def lists(self, layer: int, q_WNH: Tensor, k_PKH: Tensor) -> Lists | None:
        """All slots of the best pages."""
        if layer < self.exact_layers:
            return None
        dtype, q_WNH, k_PKH = k_PKH.dtype, q_WNH.double(), k_PKH.double()
        num_slots, num_kv_heads = k_PKH.shape[:2]
        found = []
        for head in range(num_kv_heads):
            pages = [k_PKH[start : start + self.page, head] for start in range(0, num_slots, self.page)]
            scores = [bound_of(queries_of(q_WNH, k_PKH, head), page) for page in pages]
            best = top(scores, math.ceil(self.k / self.page), dtype)
            found.append([slot for slot in range(num_slots) if slot // self.page in best])
        return found


class SlowLists(SlowBlocks):
    """A model, decoding rules and a rule for its blocks. Of the last answer, `trace` holds what each layer of
    each pass saw, by block, step and layer; `kv` keys and values [L, K, H] of its last pass, by layer."""

    def __init__(self, directory: Path, rules: Rules, rule: Rule) -> None:
        super().__init__(directory, rules)
        self.rule = rule

    def answer(self, prompt: list[int], sampling: Sampling) -> tuple[list[int], int]:
        """See `SlowBlocks`."""
        self.trace: dict[tuple[int, int, int], Lists | None] = {}
        self.block = self.step = -1
        return super().answer(prompt, sampling)

    @torch.no_grad()
    def _logits(self, ids: list[int]) -> list[list[float]]:
        size = self.rules.size
        block = len(ids) // size - 1
        start = block * size
        # A pass over known blocks, for the first token of the next one, is exact.
        is_working = self.rules.mask in ids[start:]
        if is_working:
            self.step = self.step + 1 if block == self.block else 0
            self.block = block
            self.rule.begin(block, self.step, self.rules.steps or size)
        core = self.model.model
        hidden_LD = core.embed_tokens(torch.tensor(ids))
        cos, sin = core.rotary_emb(hidden_LD[None], torch.arange(len(ids))[None])
        tables = (cos[0][:, None], sin[0][:, None])
        self.kv: list[tuple[Tensor, Tensor]] = []
        for number, layer in enumerate(core.layers):
            hidden_LD = self._layer(number, layer, hidden_LD, tables, start if is_working else None)
        return self._as_rows(self.model.lm_head(core.norm(hidden_LD)))

    def _layer(
        self, number: int, layer: Any, hidden_LD: Tensor, tables: tuple[Tensor, Tensor], start: int | None
    ) -> Tensor:
        attention, length = layer.self_attn, len(hidden_LD)
        q_LNH, k_LKH, v_LKH = queries_keys_values(layer, layer.input_layernorm(hidden_LD), tables)
        self.kv.append((k_LKH, v_LKH))
        block_L = torch.arange(length) // self.rules.size
        sees_NLL = (block_L[None] <= block_L[:, None]).repeat(q_LNH.shape[1], 1, 1)
        if start is not None:
            lists = self.rule.lists(number, q_LNH[start:], k_LKH[:start])
            self.trace[self.block, self.step, number] = lists
            for head, slots in enumerate(lists or ()):
                group = q_LNH.shape[1] // k_LKH.shape[1]
                is_listed_P = torch.zeros(start, dtype=torch.bool)
                is_listed_P[slots] = True
                sees_NLL[head * group : (head + 1) * group, start:, :start] = is_listed_P
        keys, values = (x.repeat_interleave(q_LNH.shape[1] // x.shape[1], dim=1) for x in (k_LKH, v_LKH))
        scores_NLL = torch.einsum("inh,jnh->nij", q_LNH, keys) * attention.head_dim**-0.5
        weights_NLL = scores_NLL.masked_fill(~sees_NLL, float("-inf")).softmax(dim=-1)
        mixed_LE = torch.einsum("nij,jnh->inh", weights_NLL, values).flatten(1)
        hidden_LD = hidden_LD + attention.o_proj(mixed_LE)
        out_LD: Tensor = hidden_LD + layer.mlp(layer.post_attention_layernorm(hidden_LD))
        return out_LD
