"""The decoder contract: plan what one pass is fed, then advance by its logits. Plus the packing that all
decoders share.

Shapes: B sequences of this pass, R rows packed over sequences, X wanted rows, W rows of a layout, Z lanes,
J masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from idlm.config import schema
from idlm.config.suggest import did_you_mean
from idlm.contracts import SamplingParams, StepOutcome, StepPlan
from idlm.errors import UserError
from idlm.infer.decoders.layout import DraftLayout
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.step_rows import pack_rows
from idlm.registry import Registry
from idlm.semantics import Semantics


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWritePolicy:
    """Which known tokens get their KV stored, in the numbers that scheduling counts with.

    `block_size`: they are stored in whole groups of so many, counted from the first token: of block diffusion a
    block, whose rows see one another. What is left over rides among the decoding rows. `num_lookahead_tokens` 1: so
    does the last known token, for its logits, hence every decoding pass emits, and stores what it emits but
    for the last. 0: a decoding pass may emit nothing, and what it emits is stored by a later one; where that
    `fused_commit` beside decoding rows it needs rows of its own, else a group takes the place of a sequence's
    decoding rows. `has_drafts`: tokens are tested, which `tau` relaxes.
    """

    block_size: int = 1
    num_lookahead_tokens: int = 1
    fused_commit: bool = True
    has_drafts: bool = False

    def num_computable(self, num_known: int) -> int:
        """Known tokens that are stored before a pass decodes, or by it."""
        return num_known // self.block_size * self.block_size

    def num_reusable(self, num_known: int) -> int:
        """Known tokens whose KV may come from elsewhere: the last one's group is fed, for its logits."""
        return self.num_computable(num_known - 1)

    def num_slots(self, num_known: int, width: int) -> int:
        """Slots of a sequence in a pass with `width` decoding rows."""
        return self.num_computable(num_known) - self.num_lookahead_tokens + width

    def num_stored(self, num_computed: int, *, num_before: int, num_known: int) -> int:
        """Tokens stored for certain after a decoding pass made `num_before` known tokens `num_known`, if
        `num_computed` were.
        """
        assert num_known >= num_before + self.num_lookahead_tokens, f"a pass decoded nothing: {num_known=}"
        return (
            num_known - 1 if self.num_lookahead_tokens else max(num_computed, self.num_computable(num_before))
        )

    def check(self, params: SamplingParams) -> None:
        """UserError IDLM-0449 where the log-probability of a token is asked for whose law is gone when it is
        emitted, and IDLM-0455 where nothing is tested that could be relaxed.
        """
        if params.tau > 0 and not self.has_drafts:
            raise UserError(
                "IDLM-0455",
                f"tau={params.tau} relaxes the acceptance of drafts, and this decoder has none",
                fix="leave tau out (0), or use decoder=isd",
            )
        if params.logprobs is not None and not self.num_lookahead_tokens:
            raise UserError(
                "IDLM-0449",
                f"logprobs={params.logprobs}: block diffusion emits a block after several passes, each of "
                "which has decided some of its tokens by a law of its own",
                fix="leave logprobs out, or use decoder=ar or isd on a token-causal checkpoint",
            )


TOKEN_BY_TOKEN = KVWritePolicy()
"""Token-causal decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Which sequences run in this pass and how much of each; made by the scheduler.

    Sequence b sits on `lanes_B[b]` and stores the next `num_feed_B[b]` known tokens behind its computed
    ones. `samples_B[b]`: those are all that are due, so the pass also decodes for it. Without a pending token
    the host may then be late: the device knows what is due. The rest is what the host knows: upper bounds of
    `num_feed_B` and of the slots in use behind this pass's known tokens; which of the decoder's pictures is
    used; `num_rows`, the rows to lay out, padding included (None: just those that are fed, which the host
    then waits to read); whether anybody's law has tokens cut off; how many likeliest tokens are reported for
    every token, None for no logprobs.
    """

    lanes_B: Tensor
    num_feed_B: Tensor
    samples_B: Tensor
    max_feed: int
    max_known: int
    num_rows: int | None
    filters: bool
    mode: int = 0
    num_top: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StrideMode:
    """What a pass tries for every sequence: so many tokens at most, and what happens after a rejection."""

    stride: int
    strategy: str


class Decoder(Protocol):
    """One decoding algorithm. `Config` is a frozen dataclass of its options, filled from `decoder.*`.

    A pass is laid out by one of its `modes`, which feeds up to `widths[number]` rows per sequence beside
    prompts; who chooses may look at committed tokens and at times only (pace.py).
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    modes: tuple[StrideMode, ...]
    widths: tuple[int, ...]
    exactness: str
    kv_policy: KVWritePolicy

    def __init__(self, config: Any, semantics: Semantics) -> None: ...

    def configure(self, options: Mapping[str, Any]) -> Any:
        """The decoder's Config for a request with `decoder_options`; UserError IDLM-0453 for options that a
        request cannot set, or not to this.
        """
        ...

    def allocate(self, num_lanes: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Make the decoder's own per-lane state; `dtype` is that of the logits."""
        ...

    def admit(self, lanes: list[int], options: Sequence[Mapping[str, Any]]) -> None:
        """Reset the decoder's state of lanes on which new sequences sit down, with `decoder_options`."""
        ...

    def rewind(self, lanes: list[int]) -> None:
        """Of these lanes the cache holds nothing any more, or just known tokens that are computed."""
        ...

    def plan(self, table: SequenceState, batch: Batch) -> StepPlan:
        """Say what the pass is fed; changes nothing."""
        ...

    def advance(self, table: SequenceState, batch: Batch, plan: StepPlan, logits_XV: Tensor) -> StepOutcome:
        """Commit tokens from the pass's logits into the table and the decoder's state."""
        ...


DECODERS: Registry[type[Decoder]] = Registry("decoder", "idlm.infer.decoders")


def request_config(decoder: str, config: Any, options: Mapping[str, Any], allowed: Sequence[str] = ()) -> Any:
    """`config` with a request's options, each of the type that it must be; see `Decoder.configure`."""
    unknown = [name for name in options if name not in allowed]
    problems = [
        f"decoder_options.{name} is nothing that a request can set of decoder {decoder}"
        f"{did_you_mean(name, allowed)}"
        for name in unknown
    ]
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if not problems:
        config = schema.build(type(config), {**values, **options}, problems, "decoder_options.")
    if problems:
        raise UserError(
            "IDLM-0453",
            "; ".join(problems),
            fix=f"use {', '.join(allowed)}" if allowed else "leave decoder_options out",
        )
    return config


def check_causal(semantics: Semantics, decoder: str) -> None:
    """UserError IDLM-0452 where rows see what is behind them, or predict their own token: nothing else would
    show that.
    """
    if semantics.causality != "causal" or not semantics.logit_shift:
        raise UserError(
            "IDLM-0452",
            f"decoder {decoder} is token-causal and a row predicts the next token; the checkpoint says "
            f"causality={semantics.causality!r}, logit_shift={semantics.logit_shift}",
            fix="use decoder=block for a block-causal checkpoint, or correct idlm_config.json",
        )


def default_decoder(semantics: Semantics) -> str:
    """The decoder that a checkpoint was made for."""
    if semantics.causality == "block":
        return "block"
    return "isd" if semantics.stride > 1 else "ar"


def plan_rows(
    table: SequenceState,
    batch: Batch,
    *,
    layout: DraftLayout,
    mask_token_id: int,
    draft_buffer_Z: Tensor | None = None,
    drafts_ZJ: Tensor | None = None,
) -> StepPlan:
    """Lay the batch's rows out: known tokens up to the pending one, then drafts and masks by the picture.

    There is no prefill branch: a prompt is a sequence with many known tokens that are not computed yet,
    and whether its masks ride along depends only on `samples_B`, never on a row count. A sequence that is
    as long as it may get feeds its pending token again and decodes nothing.
    """
    lanes_B, width = batch.lanes_B, layout.max_width
    packed = pack_rows(
        table.lanes(draft_buffer_Z, drafts_ZJ),
        layout.rows,
        lanes_B=lanes_B,
        num_feed_B=batch.num_feed_B,
        wants_B=batch.samples_B,
        num_rows=batch.num_rows,
        mask_token_id=mask_token_id,
    )
    return StepPlan(
        lanes_B=lanes_B,
        cu_rows_B1=packed.cu_rows_B1,
        sequence_R=packed.sequence_R,
        token_ids_R=packed.token_ids_R,
        positions_R=packed.positions_R,
        slots_R=packed.slots_R,
        limits_R=packed.limits_R,
        branch_starts_R=packed.branch_starts_R,
        is_mask_R=None if width == 1 else packed.is_mask_R,
        logit_rows_X=packed.logit_rows_X,
        first_logit_B=torch.arange(len(lanes_B), device=table.device) * width,
        num_feed_B=batch.num_feed_B,
        samples_B=packed.samples_B,
        advances_B=packed.advances_B,
        max_rows=batch.max_feed - 1 + width,
        # A pass before may have gone beyond the end of a sequence, with a wider picture than this one's.
        max_slots=batch.max_known - 1 + max(width, layout.max_stride),
    )
