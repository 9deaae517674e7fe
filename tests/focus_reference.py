"""FOCUS as slow as can be, from the paper (section 4, Algorithm 1, appendix E) and the choices that
`infer/accelerators/focus.py` states: one block, one pass, plain Python; then whole generations of one request
over a transformer whose keys and values lie in a dictionary by layer and position.

Nothing of the engine is imported. I queries and J keys of a block, N query heads, K KV heads, H head dim."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.block_reference import NEVER, Rules, Sampling, SlowBlocks, queries_keys_values, uniform
from tests.margins import MARGIN, clear_choice

Rows = dict[int, Tensor]
"""By position in the block, the queries [N, H] or keys [K, H] of one layer."""


@dataclass(frozen=True, kw_only=True)
class FocusRules:
    """`over`: the importance of a token is summed over "masked" tokens or the whole "block" (equation 2).
    `mean`: of decoded tokens, over the passes of the "block" or of the whole "request". `begins_full`: in the
    first pass over a block the kv side needs all rows, as MAGE does. `published`: as the published code, not
    the paper: rows see nothing behind the last one that is retained, and a request's first pass keeps all
    rows and is left out of the mean. `stability`: which tokens are frozen; `commit`: whether a finished
    block's frozen tokens are computed again ("clean") or not ("unfrozen"). `margin`: choices closer than this
    raise."""

    size: int
    alpha: float = 1.5
    over: str = "masked"
    mean: str = "block"
    stability: str = "neighbour"
    commit: str = "clean"
    margin: float = MARGIN
    begins_full: bool = False
    published: bool = False


@dataclass(kw_only=True)
class BlockState:
    """What is remembered from pass to pass of a block; `earlier` of blocks before: decoded tokens, passes.
    `is_new`: nothing of the request is computed yet."""

    frozen: set[int] = field(default_factory=set)
    processed: set[int] = field(default_factory=set)
    num_passes: int = 0
    num_decoded: int = 0
    earlier: tuple[int, int] = (0, 0)
    is_new: bool = False


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Of one pass: which positions of the block go on after layer 1, the budget K, and the first position
    that no row may see from the attention of layer 1 on."""

    retained: tuple[int, ...]
    budget: int
    limit: int


def fed_positions(state: BlockState, rules: FocusRules) -> list[int]:
    """Section 4.3: frozen tokens are not computed again."""
    return [offset for offset in range(rules.size) if offset not in state.frozen]


def importance(queries: Rows, keys: Rows, scale: float) -> dict[int, float]:
    """Equations 2 and 15: scores, the largest of three neighbouring keys, softmax over keys; then summed over
    queries and heads."""
    columns = sorted(keys)
    q_INH = torch.stack([queries[offset] for offset in sorted(queries)]).double()
    k_JKH = torch.stack([keys[offset] for offset in columns]).double()
    k_JNH = k_JKH.repeat_interleave(q_INH.shape[1] // k_JKH.shape[1], dim=1)
    scores_INJ = torch.einsum("inh,jnh->inj", q_INH, k_JNH) * scale
    pooled = [scores_INJ[..., max(0, n - 1) : n + 2].amax(-1) for n in range(len(columns))]
    weights_INJ = torch.stack(pooled, dim=-1).softmax(dim=-1)
    return dict(zip(columns, weights_INJ.sum(dim=(0, 1)).tolist(), strict=True))


def budget(
    state: BlockState, deltas: dict[int, float], masked: list[int], rules: FocusRules
) -> tuple[int, float]:
    """Equations 4 and 5, the threshold being mean + std (appendix E.2.2): K, and the threshold."""
    sum_decoded, num_passes = state.num_decoded, state.num_passes
    if rules.mean == "request":
        sum_decoded, num_passes = sum_decoded + state.earlier[0], num_passes + state.earlier[1]
    average = max(1.0, sum_decoded / num_passes) if num_passes else 1.0
    centre = sum(deltas[offset] for offset in masked) / len(masked)
    spread = math.sqrt(sum((deltas[offset] - centre) ** 2 for offset in masked) / len(masked))
    num_strong = sum(deltas[offset] >= centre + spread for offset in masked)
    return min(rules.size, max(math.ceil(rules.alpha * average), num_strong)), centre + spread


def select(
    state: BlockState,
    masked: list[int],
    may_be_decided: list[int],
    layers: tuple[tuple[Rows, Rows], tuple[Rows, Rows]],
    scale: float,
    rules: FocusRules,
) -> Selection:
    """Equation 3 and section 4.2. `layers`: queries and keys of layers 0 and 1, of all that is fed (and, of
    keys, of what is frozen); only masks that `may_be_decided` in this pass are candidates."""
    fed = fed_positions(state, rules)
    assert set(may_be_decided) <= set(masked) <= set(fed)
    found = []
    for queries, keys in layers:
        chosen = masked if rules.over == "masked" else list(range(rules.size))
        found.append(
            importance(
                {offset: queries[offset] for offset in chosen if offset in fed},
                {offset: keys[offset] for offset in chosen},
                scale,
            )
        )
    deltas = {offset: found[1][offset] - found[0][offset] for offset in masked}
    return select_by(state, masked, may_be_decided, deltas, rules)


def select_by(
    state: BlockState,
    masked: list[int],
    may_be_decided: list[int],
    deltas: dict[int, float],
    rules: FocusRules,
) -> Selection:
    """Section 4.2 with these deltas of the masks."""
    fed = fed_positions(state, rules)

    def choose(deltas: dict[int, float]) -> tuple[int, set[int] | None]:
        """The budget, and the best masks where not all go on."""
        number, _ = budget(state, deltas, masked, rules)
        is_needed = rules.begins_full and state.num_passes == 0
        is_needed = is_needed or (rules.published and state.is_new)
        if is_needed or len(masked) <= number:
            return number, None
        return number, set(sorted(may_be_decided, key=lambda offset: (-deltas[offset], offset))[:number])

    number, best = clear_choice(choose, deltas, margin=rules.margin) if rules.margin else choose(deltas)
    if best is None:
        return Selection(retained=tuple(fed), budget=number, limit=rules.size)
    retained = {offset for offset in fed if offset not in masked} | set(best)
    retained |= {offset - 1 for offset in best if offset - 1 in masked}
    retained |= {offset for offset in masked if offset < max(retained) and offset not in state.processed}
    limit = max(retained if rules.published else retained | state.processed) + 1
    return Selection(retained=tuple(sorted(retained)), budget=number, limit=limit)


def note(
    state: BlockState, masked: list[int], selection: Selection, num_decoded: int, rules: FocusRules
) -> None:
    """After a pass with these masks: a token that was decoded by then, as was its right neighbour, has now
    been computed once more. The last token of a block has no neighbour to wait for."""
    for offset in fed_positions(state, rules):
        is_ready = offset == rules.size - 1 or offset + 1 not in masked or rules.stability == "plain"
        if rules.stability != "off" and offset not in masked and is_ready:
            assert offset in selection.retained
            state.frozen.add(offset)
    state.processed |= set(selection.retained)
    if not (rules.published and state.is_new):
        state.num_passes += 1
        state.num_decoded += num_decoded
    state.is_new = False


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One denoising pass. `keys`: by layer and place of the block what the cache holds behind it."""

    number: int
    selection: Selection
    keys: dict[tuple[int, int], Tensor]
    values: dict[tuple[int, int], Tensor]


class SlowFocus(SlowBlocks):
    """A model, the rules of its blocks, and FOCUS."""

    def __init__(self, directory: Path, rules: Rules, focus: FocusRules) -> None:
        super().__init__(directory, rules)
        self.focus = focus
        config = self.model.config
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.keys: dict[tuple[int, int], Tensor] = {}
        self.values: dict[tuple[int, int], Tensor] = {}
        self.passes: list[Pass] = []
        self.losses: Collection[int] = ()

    @torch.no_grad()
    def answer(
        self, prompt: list[int], sampling: Sampling, *, losses: Collection[int] = ()
    ) -> tuple[list[int], int]:
        """As the base class; `passes` are its denoising passes, `keys` and `values` all that is stored.
        Before the passes numbered in `losses` the sequence lost its KV, and its block begins anew."""
        size, known = self.rules.size, list(prompt)
        self.keys, self.values, self.passes, self.losses = {}, {}, [], losses
        earlier, is_new = (0, 0), True
        last_row = None
        for start in range(0, len(known) // size * size, size):
            last_row = self._clean(known[start : start + size], start)
        while True:
            state = BlockState(earlier=earlier, is_new=is_new)
            work, state = self._denoise(known, sampling, state, last_row)
            is_new = False
            earlier = state.earlier[0] + state.num_decoded, state.earlier[1] + state.num_passes
            start = len(known) // size * size
            for token in work[len(known) - start :]:
                known.append(token)
                if token in sampling.stops or len(known) - len(prompt) >= sampling.max_tokens:
                    return known[len(prompt) :], len(self.passes)
            stays = state.frozen if self.focus.commit == "unfrozen" else set()
            if self.rules.shifted:
                # The last row predicts the next block's first token.
                stays = stays - {self.rules.size - 1}
            last_row = self._clean(work, start, stays)

    def _clean(self, tokens: list[int], start: int, stays: Collection[int] = ()) -> list[float]:
        """Store a block without masks, but for positions whose keys and values stay; returns the last row's
        logits."""
        offsets = [offset for offset in range(self.rules.size) if offset not in stays]
        hidden = self._embed([tokens[offset] for offset in offsets])
        for layer in range(len(self.model.model.layers)):
            hidden = self._layer(layer, hidden, offsets, start, limit=self.rules.size)
        return self._head(hidden)[-1]

    def _denoise(
        self, known: list[int], sampling: Sampling, state: BlockState, last_row: list[float] | None
    ) -> tuple[list[int], BlockState]:
        """The block in which `known` ends, complete, and what is remembered of it."""
        rules, size = self.rules, self.rules.size
        first, number = len(self.passes), len(known) // size
        start = number * size
        work: list[int | None] = [*known[start:], *[None] * (start + size - len(known))]
        if rules.shifted and len(known) == start:
            assert last_row is not None
            work[0] = self._draw(last_row, sampling, uniform(sampling.seed, 0, number << 16, 0))
        empty = list(work)
        while None in work:
            if len(self.passes) in self.losses:
                # Keys and values of blocks before are computed again, the same.
                first, state, work = len(self.passes), BlockState(is_new=True), list(empty)
                for layer, offset in itertools.product(range(len(self.model.model.layers)), range(size)):
                    self.keys.pop((layer, start + offset), None)
                    self.values.pop((layer, start + offset), None)
            masked = [offset for offset in range(size) if work[offset] is None]
            part = rules.part or size
            decidable = [offset for offset in masked if offset // part == masked[0] // part]
            fed = fed_positions(state, self.focus)
            logits, selection = self._thinned(work, fed, masked, decidable, start, state)
            rows = {offset + rules.shifted: row for offset, row in logits.items()}
            decided = self._decide(
                {p: rows[p] for p in decidable if p in rows}, sampling, number, len(self.passes) - first
            )
            for offset, token in decided.items():
                work[offset] = token
            note(state, masked, selection, len(decided), self.focus)
            layers, offsets = range(len(self.model.model.layers)), range(size)
            inside = [(n, p) for n in layers for p in offsets if (n, start + p) in self.keys]
            keys, values = (
                {(n, p): stored[n, start + p] for n, p in inside} for stored in (self.keys, self.values)
            )
            self.passes.append(Pass(number=number, selection=selection, keys=keys, values=values))
        return [token for token in work if token is not None], state

    def _thinned(
        self,
        work: list[int | None],
        fed: list[int],
        masked: list[int],
        decidable: list[int],
        start: int,
        state: BlockState,
    ) -> tuple[dict[int, list[float]], Selection]:
        """Algorithm 1: logits by place of the rows that are left, and which those are."""
        tokens = [self.rules.mask if work[offset] is None else work[offset] for offset in fed]
        hidden = self._embed(tokens)
        queries0 = self._store(0, hidden, fed, start)
        hidden = self._rest(0, hidden, queries0, start, limit=self.rules.size)
        queries1 = self._store(1, hidden, fed, start)
        layers = tuple(
            (
                dict(zip(fed, queries, strict=True)),
                {offset: self.keys[number, start + offset] for offset in range(self.rules.size)},
            )
            for number, queries in enumerate((queries0, queries1))
        )
        scale = self.head_dim**-0.5
        selection = select(state, masked, decidable, layers, scale, self.focus)  # type: ignore[arg-type]
        left = [fed.index(offset) for offset in selection.retained]
        hidden = self._rest(1, hidden[left], queries1[left], start, limit=selection.limit)
        for number in range(2, len(self.model.model.layers)):
            hidden = self._layer(number, hidden, list(selection.retained), start, limit=selection.limit)
        return dict(zip(selection.retained, self._head(hidden), strict=True)), selection

    def _embed(self, tokens: list[Any]) -> Tensor:
        hidden: Tensor = self.model.model.embed_tokens(torch.tensor(tokens))
        return hidden

    def _head(self, hidden: Tensor) -> list[list[float]]:
        logits = self.model.lm_head(self.model.model.norm(hidden))
        logits[:, self.rules.mask] = NEVER
        rows: list[list[float]] = logits.tolist()
        return rows

    def _layer(self, number: int, hidden: Tensor, offsets: list[int], start: int, *, limit: int) -> Tensor:
        queries = self._store(number, hidden, offsets, start)
        return self._rest(number, hidden, queries, start, limit=limit)

    def _store(self, number: int, hidden: Tensor, offsets: list[int], start: int) -> Tensor:
        """Queries [rows, N, H] of a layer; its keys and values are stored."""
        layer = self.model.model.layers[number]
        positions = torch.tensor([[start + offset for offset in offsets]])
        cos, sin = (table[0][:, None] for table in self.model.model.rotary_emb(hidden[None], positions))
        queries, k, v = queries_keys_values(layer, layer.input_layernorm(hidden), (cos, sin))
        for row, offset in enumerate(offsets):
            self.keys[number, start + offset] = k[row].clone()
            self.values[number, start + offset] = v[row].clone()
        return queries

    def _rest(self, number: int, hidden: Tensor, queries: Tensor, start: int, *, limit: int) -> Tensor:
        """Attention to all positions before `start + limit`, then the feed-forward part."""
        layer = self.model.model.layers[number]
        keys = torch.stack([self.keys[number, position] for position in range(start + limit)])
        values = torch.stack([self.values[number, position] for position in range(start + limit)])
        group = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("rnh,lnh->nrl", queries, keys) * self.head_dim**-0.5
        mixed = torch.einsum("nrl,lnh->rnh", scores.softmax(dim=-1), values).flatten(1)
        hidden = hidden + layer.self_attn.o_proj(mixed)
        out: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return out
