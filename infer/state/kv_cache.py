"""Keys and values: what a decoder stores (`KVWritePolicy`, numbers that scheduling and memory planning count
with), and where (`KVCache`). Shapes: S physical slots, B sequences, K KV heads, H head dim, R rows of a pass,
N query heads, C listed slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.kernels.paged_attention import BackendPlan, BeforeBlock, paged_attention

KVKind = Literal["append", "block", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasReuse:
    """How passes over a canvas read keys and values that earlier passes stored and that may be stale. The
    first pass after tokens were emitted or KV was lost is a refresh, which feeds the whole canvas; so is
    every `interval`-th one from there. Between them at most `num_rows` positions after the known tokens are
    fed (None: all of them), and `num_before` positions before those."""

    num_rows: int | None
    num_before: int
    interval: int | None

    def refreshes(self, num_passes: Any) -> Any:
        """Whether the pass after `num_passes` passes without a token is a refresh; numbers or tensors."""
        return num_passes == 0 if self.interval is None else num_passes % self.interval == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWritePolicy:
    """Which known tokens have their KV stored, and when.

    `kind`: "append" stores known tokens one by one. Every decoding pass feeds the last known token for its
    logits, emits at least one token, and stores what it emits but for the last. "block" stores whole groups
    of `block_size` tokens, counted from the first one, whose rows see one another; a decoding pass may emit
    nothing, and a later one stores what it emits. "none" stores nothing for later: every pass feeds the whole
    canvas and computes its keys and values anew; with `reuse` some passes feed a part of it.

    `fused_commit`: a block is stored in the pass that decodes the next one, in rows of its own; else in
    place of them. `feeds_parts`: a pass may feed some rows of a block and not the others. `has_drafts`:
    drafts are tested, which `tau` relaxes. `max_logprobs`: alternatives of a token that a decoder which does
    not append can report; None: no log-probabilities."""

    kind: KVKind = "append"
    block_size: int = 1
    fused_commit: bool = True
    feeds_parts: bool = False
    has_drafts: bool = False
    max_logprobs: int | None = None
    reuse: CanvasReuse | None = None

    @property
    def shares_layers(self) -> bool:
        """Whether all layers store into the same memory: passes read nothing that earlier ones stored."""
        return self.kind == "none" and self.reuse is None

    @property
    def num_lookahead_tokens(self) -> int:
        """Number of known tokens that a decoding pass feeds, and that the next pass stores finally."""
        return int(self.kind == "append")

    def num_computable(self, num_known: int) -> int:
        """Of `num_known` tokens, the number that is stored before a pass decodes, or by it."""
        return 0 if self.kind == "none" else num_known // self.block_size * self.block_size

    def num_reusable(self, num_known: int) -> int:
        """Known tokens whose KV may come from the prefix cache. The last group is fed for its logits."""
        return self.num_computable(num_known - 1)

    def num_slots(self, num_known: int, num_rows: int) -> int:
        """Slots of a sequence of `num_known` tokens in a pass with `num_rows` decoding rows."""
        return self.num_computable(num_known) - self.num_lookahead_tokens + num_rows

    def num_budgeted(self, num_feed: int, num_rows: int) -> int:
        """Rows that count against `max_num_batched_tokens`: known tokens after the first group, or
        canvases."""
        return num_rows if self.kind == "none" else max(0, num_feed - self.block_size)

    def num_decoding_rows(self, num_rows: int, *, num_known: int, num_passes: int | None) -> int:
        """Decoding rows at most of a sequence that has `num_rows` in any pass. `num_passes`: decoding passes
        since it last emitted a token; None: unknown."""
        if self.reuse is None or num_passes is None or self.reuse.refreshes(num_passes):
            return num_rows
        num_left, maximum = num_rows - num_known, self.reuse.num_rows
        return self.reuse.num_before + (num_left if maximum is None else min(num_left, maximum))

    def max_rows(self, num_sequences: int, num_rows: int, *, budget: int) -> int:
        """Decoding rows of a pass at most. A canvas is fed whole as soon as some of the `budget` is left."""
        maximum = num_sequences * num_rows
        return min(maximum, budget + num_rows) if self.kind == "none" else maximum

    def check(self, params: SamplingParams) -> None:
        """Raise UserError IDLM-0455 for `tau` without drafts, IDLM-0449 for logprobs that cannot be
        reported."""
        if params.tau > 0 and not self.has_drafts:
            raise UserError(
                "IDLM-0455",
                f"tau={params.tau} relaxes the acceptance of drafts, and this decoder has none",
                fix="leave tau out (0), or use decoder=isd",
            )
        if self.kind == "append":
            return
        if params.logprobs is not None and self.max_logprobs is None:
            raise UserError(
                "IDLM-0449",
                f"logprobs={params.logprobs}: this decoder cannot report log-probabilities, because a token "
                "is emitted some passes after it was drawn, when its distribution is gone",
                fix="leave logprobs out, or use decoder=ar or isd (token-causal checkpoints) or block (block-"
                "causal ones without edits)",
            )
        if params.logprobs is not None and params.logprobs > (self.max_logprobs or 0):
            raise UserError(
                "IDLM-0449",
                f"logprobs={params.logprobs}: this decoder stores {self.max_logprobs} alternatives at most",
                fix=f"give logprobs <= {self.max_logprobs}",
            )
        if params.prompt_logprobs is not None:
            raise UserError(
                "IDLM-0449",
                f"prompt_logprobs={params.prompt_logprobs}: the rows of this decoder's prompts see tokens "
                "after them, so they have no log-probabilities of the next one",
                fix="leave prompt_logprobs out, or use decoder=ar or isd on a token-causal checkpoint",
            )


TOKEN_BY_TOKEN = KVWritePolicy()
"""The policy of token-causal decoding without drafts."""


class KVCache:
    """Keys and values [S, K, H] of every layer, in physical slots page * page_size + offset.

    `shape`: layers, S, K, H. One layer's memory serves all if passes compute all KV anew: a layer stores
    those of all rows before any row attends, and nothing reads them after the layer. `scales` [2, layers, K]:
    stored keys and values are divided by them; None is 1."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        scales: Tensor | None = None,
    ) -> None:
        self.scales = scales
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, K, H] of a layer."""
        number = min(number, len(self.keys) - 1)
        return self.keys[number], self.values[number]

    def layer_scales(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Scales [K] of a layer's keys and values; None is 1."""
        return (None, None) if self.scales is None else (self.scales[0, number], self.scales[1, number])

    def attend(
        self,
        number: int,
        q_RNH: Tensor,
        plan: BackendPlan,
        *,
        scale: float,
        lists_BKC: Tensor | None = None,
        before: BeforeBlock | None = None,
    ) -> Tensor:
        """Attention output [R, N, H] of the rows of `plan` over the layer; see `paged_attention`."""
        keys, values = self.layer(number)
        k_scale_K, v_scale_K = self.layer_scales(number)
        return paged_attention(
            q_RNH,
            keys,
            values,
            plan,
            scale=scale,
            k_scale_K=k_scale_K,
            v_scale_K=v_scale_K,
            lists_BKC=lists_BKC,
            before=before,
        )
