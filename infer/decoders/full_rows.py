"""The rows of a pass of decoder `full`: whole canvases, the part of them that a cache leaves to compute, and
second canvases for guidance.

KV caching: rows see the whole canvas, and of positions that are not fed what the last pass over them stored,
which may be stale. Lossy. `prefix` and `dual` are Fast-dLLM's (arXiv 2505.22618, KV cache for block-wise
decoding, DualCache); `delayed` is dKV-Cache's (arXiv 2505.15781, dKV-Cache-Decode). A refresh, which feeds
everything, begins every block.
Classifier-free guidance: a pass feeds a second, unconditional canvas of a sequence, whose prompt is masked,
and draws from logits that lead away from it: its own plus (1 + guidance) times what the prompt adds to them
(LLaDA, arXiv 2502.09992, and `cfg_scale` of its code; Dream has none published and gets the same).
Departures: with a cache and shifted logits (Dream) the row before a mask of the active block, which predicts
it, is fed as well. Fast-dLLM decides the first token of a shifted block in the refresh instead; dKV-Cache
moves the cached position. Guidance mixes logits in fp32, whatever the dtype of the model.
Shapes: B sequences, C canvases (one of each sequence, then the second ones), L slots of the longest canvas, R
rows, X wanted positions, Y positions of a slice, W positions of the active block, Z lanes, V vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from idlm.infer.decoders.base import CanvasReuse
from idlm.infer.state.batch import Batch, FedCanvases, StepPlan
from idlm.registry import Registry

REFRESH_INTERVAL = 8
"""Of `delayed`, in passes, unless `decoder.cache_refresh` is given."""
NUM_CANVASES = 2
MIXED_BYTES = 4
"""Bytes for each logit of both canvases that mixing allocates: two numbers in fp32 for a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveCanvases(FedCanvases):
    """The payload of plans: wanted row x, or group x of them, predicts `index_X[x]` of the active block
    of sequence `sequence_X[x]`. `is_maskable_BW` (bool): masks that this pass may decide; wanted rows of
    others mean nothing. `draw_steps_B`: each sequence's step of the random stream."""

    sequence_X: Tensor
    index_X: Tensor
    is_maskable_BW: Tensor
    draw_steps_B: Tensor


def active_canvases(plan: StepPlan) -> ActiveCanvases:
    """The payload of a plan of decoder `full`."""
    assert isinstance(plan.payload, ActiveCanvases), f"{type(plan.payload)=}"
    return plan.payload


def wanted_positions(is_maskable_BW: Tensor, *, is_exact: bool) -> tuple[Tensor, Tensor]:
    """Sequence and position of every wanted row: exactly the masks that may be decided, which the host waits
    for, or (a static shape) all positions. At least one row."""
    if is_exact:
        sequence_X, index_X = is_maskable_BW.nonzero(as_tuple=True)
        if len(index_X):
            return sequence_X, index_X
        is_maskable_BW = is_maskable_BW[:1, :1]
    num_sequences, width = is_maskable_BW.shape
    flat_X = torch.arange(num_sequences * width, device=is_maskable_BW.device)
    return flat_X // width, flat_X % width


@dataclass(frozen=True, slots=True, kw_only=True)
class FedRows:
    """Rows of a pass: row r feeds slot `slots_R[r]` of sequence `sequence_R[r]`; sequence b owns the rows
    from cu_rows_B1[b] on, and rows from cu_rows_B1[-1] on are padding (`is_fed_R`, bool). `ranks_BL`: the
    number of fed positions up to and including a slot."""

    cu_rows_B1: Tensor
    sequence_R: Tensor
    slots_R: Tensor
    is_fed_R: Tensor
    ranks_BL: Tensor

    def rows_of(self, sequence_X: Tensor, slots_X: Tensor) -> Tensor:
        """The rows of fed slots, int64 [X]; any row of the pass for slots that are not fed."""
        ranks_X = self.ranks_BL[sequence_X, slots_X.clamp(0, self.ranks_BL.shape[1] - 1)]
        return (self.cu_rows_B1[sequence_X] + ranks_X - 1).clamp(0, len(self.slots_R) - 1)


def fed_canvases(is_fed_BL: Tensor, *, num_rows: int | None) -> FedRows:
    """The rows of positions, in order. `num_rows`: rows to lay out, padding included; None: exactly those
    that are fed, which the host waits for."""
    ranks_BL = is_fed_BL.long().cumsum(-1)
    cu_rows_B1 = torch.nn.functional.pad(ranks_BL[:, -1].cumsum(0), (1, 0))
    # No pass is empty, even if all its sequences are complete.
    num_rows = max(1, int(cu_rows_B1[-1])) if num_rows is None else num_rows
    rows_R = torch.arange(num_rows, device=is_fed_BL.device)
    sequence_R = torch.searchsorted(cu_rows_B1[1:], rows_R, right=True).clamp(max=len(is_fed_BL) - 1)
    slot_L = torch.arange(is_fed_BL.shape[1], device=is_fed_BL.device)
    # Positions that are not fed write to a row of no pass.
    target_BL = torch.where(is_fed_BL, cu_rows_B1[:-1, None] + ranks_BL - 1, num_rows).clamp(max=num_rows)
    slots_R = rows_R.new_zeros(num_rows + 1)
    slots_R.scatter_(0, target_BL.flatten(), slot_L.expand_as(target_BL).flatten())
    return FedRows(
        cu_rows_B1=cu_rows_B1,
        sequence_R=sequence_R,
        slots_R=slots_R[:-1],
        is_fed_R=rows_R < cu_rows_B1[-1],
        ranks_BL=ranks_BL,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvases:
    """Canvases before a pass. The active block of sequence b lies in [known_B[b], block_ends_B[b]).
    Bool [B, L]: positions without a token (`is_mask_BL`), and with one that the last pass has decided."""

    slot_L: Tensor
    known_B: Tensor
    block_ends_B: Tensor
    ends_B: Tensor
    is_mask_BL: Tensor
    is_recent_BL: Tensor


class Cache(ABC):
    """What the passes between two refreshes feed."""

    has_interval: ClassVar[bool] = False
    """Whether `decoder.cache_refresh` sets the interval of refreshes."""
    stores_suffix: ClassVar[bool] = False
    """Whether nothing after the active block is fed."""

    def reuse(self, *, block_length: int | None, interval: int | None, shift: int) -> CanvasReuse:
        """The numbers that scheduling counts with."""
        return CanvasReuse(
            num_rows=block_length if self.stores_suffix else None,
            num_before=shift,
            interval=(interval or REFRESH_INTERVAL) if self.has_interval else None,
        )

    @abstractmethod
    def feeds(self, canvases: Canvases) -> Tensor:
        """The positions to feed, bool [B, L]; the caller adds those before wanted masks of shifted logits."""


CACHES: Registry[type[Cache]] = Registry("canvas_cache", None)


@CACHES.register("prefix")
class Prefix(Cache):
    """The prompt and clean blocks are cached; the active block and everything after it is fed."""

    def feeds(self, canvases: Canvases) -> Tensor:
        return canvases.slot_L >= canvases.known_B[:, None]


@CACHES.register("dual")
class Dual(Prefix):
    """Everything outside of the active block is cached, the masks after it included."""

    stores_suffix: ClassVar[bool] = True

    def feeds(self, canvases: Canvases) -> Tensor:
        return super().feeds(canvases) & (canvases.slot_L < canvases.block_ends_B[:, None])


@CACHES.register("delayed")
class Delayed(Cache):
    """Decided tokens are cached one pass after they were decided: the keys and values of a token change most
    when it takes the place of its mask."""

    has_interval: ClassVar[bool] = True

    def feeds(self, canvases: Canvases) -> Tensor:
        return canvases.is_mask_BL | canvases.is_recent_BL


def reused_positions(cache: Cache, canvases: Canvases, *, shift: int) -> Tensor:
    """What a pass between two refreshes feeds, bool [B, L]: the positions of `cache`, and with `shift` those
    before the masks of the active block."""
    is_fed_BL = cache.feeds(canvases)
    if shift:
        in_block_BL = canvases.slot_L < canvases.block_ends_B[:, None]
        is_wanted_BL = canvases.is_mask_BL & in_block_BL
        is_fed_BL = is_fed_BL | torch.nn.functional.pad(is_wanted_BL[:, shift:], (0, shift))
    return is_fed_BL


def canvases_of(batch: Batch, guidance_Z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every canvas the lane, the number of tokens to feed, and whether it is fed (bool); all [C]."""
    lanes_B, num_feed_B, samples_B = batch.lanes_B, batch.num_feed_B, batch.samples_B
    if batch.payload.num_canvases == 1:
        return lanes_B, num_feed_B, samples_B
    is_guided_B = samples_B & (guidance_Z[lanes_B] > 0)
    return lanes_B.repeat(NUM_CANVASES), num_feed_B.repeat(NUM_CANVASES), torch.cat((samples_B, is_guided_B))


def guided(
    plan: StepPlan, fed: FedRows, ends_C: Tensor, prompt_ends_C: Tensor, *, mask_token_id: int
) -> StepPlan:
    """The plan of `fed` rows with second canvases, which so far equal the first ones: their prompts, which
    end at `prompt_ends_C`, become masks, they get slots after the first canvas, which ends at `ends_C`, and
    every wanted position needs a pair of rows."""
    active = active_canvases(plan)
    assert plan.is_mask_R is not None
    num_sequences = len(ends_C) // NUM_CANVASES
    is_second_C = torch.arange(len(ends_C), device=ends_C.device) >= num_sequences
    hidden_R = (is_second_C * prompt_ends_C)[fed.sequence_R]
    is_hidden_R = fed.is_fed_R & (fed.slots_R < hidden_R)
    # A sequence without guidance has no second row: any row will do.
    other_X = fed.rows_of(active.sequence_X + num_sequences, fed.slots_R[plan.logit_rows_X])
    return replace(
        plan,
        token_ids_R=torch.where(is_hidden_R, mask_token_id, plan.token_ids_R),
        is_mask_R=plan.is_mask_R | is_hidden_R,
        logit_rows_X=torch.stack((plan.logit_rows_X, other_X), dim=1).flatten(),
        payload=replace(active, first_slots_B=is_second_C * ends_C, logit_group=NUM_CANVASES),
    )


def mixed_logits(logits_YV: Tensor, guidance_Y: Tensor) -> Tensor:
    """Logits [Y, V] (fp32) to draw from: those [2Y, V] of pairs of rows, mixed with a guidance (fp64) each.

    Without guidance (0) the first row of a pair counts alone, bit for bit, whatever the second one holds."""
    logits_YV, other_YV = logits_YV[0::NUM_CANVASES], logits_YV[1::NUM_CANVASES]
    other_YV = torch.where(guidance_Y[:, None] > 0, other_YV, logits_YV).float()
    return (logits_YV - other_YV).mul_(1 + guidance_Y.float()[:, None]).add_(other_YV)
