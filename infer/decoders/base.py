"""The decoder contract: plan the rows of a pass, then advance by its predictions; and what a decoder stores
(`KVWritePolicy`, numbers that scheduling and memory planning count with).

A new decoder is one file in this folder that registers a subclass of `Decoder`.
Shapes: B sequences of a pass, R rows packed over sequences, X wanted rows, Z lanes, J drafts."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from idlm.config import schema
from idlm.config.suggest import did_you_mean
from idlm.contracts import CHANGES, SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.selector import PathSelector
from idlm.infer.state.batch import Batch, StepOutcome, StepPlan, WantedRows
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.logit_changes import ChangedRows, KnownTokens
from idlm.kernels.sampling import Drafts
from idlm.registry import Registry
from idlm.semantics import Semantics

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StrideMode:
    """One way to lay out a pass: at most `stride` tokens for every sequence, by a strategy of the decoder.
    `narrow`: the layout of the half of the sequences that has accepted the fewest drafts of late, with fewer
    rows; None: all sequences have the same."""

    stride: int
    strategy: str
    narrow: StrideMode | None = None


class Decoder(ABC):
    """One decoding algorithm. `Config` is a frozen dataclass of its options, filled from `decoder.*`.

    A pass is laid out by one of `modes`. The choice among them may look at committed tokens and at times
    only, so that it cannot bias the answer. `baseline`: options with which the decoder is what others are
    compared with (one token per pass); None: it is not a baseline."""

    name: ClassVar[str]
    Config: ClassVar[type]
    baseline: ClassVar[Mapping[str, Any] | None] = None
    baseline_options: ClassVar[tuple[str, ...]] = ()
    """Options that its baseline takes over from the decoder that it is compared with."""
    default_max_tokens: ClassVar[int] = 512
    """`max_tokens` of a request that gives none."""
    takes_constraints: ClassVar[bool] = False
    """Whether each token is drawn after all tokens before it, from logits that `Batch.grammars` masks."""
    takes_changes: ClassVar[Collection[str]] = ()
    """Those of `contracts.CHANGES` that a request may have."""
    request_options: ClassVar[Sequence[str]] = ()
    """Options that a request may set."""
    max_canvases: int = 1
    """Canvases that a pass feeds for one request at most."""
    exactness: str = "exact"
    selector: PathSelector | None = None
    """Draws drafts; set before `allocate` if the decoder `takes_selector` and the checkpoint has one."""
    modes: tuple[StrideMode, ...] = (StrideMode(stride=1, strategy="cold"),)
    kv_policy: KVWritePolicy = TOKEN_BY_TOKEN

    @classmethod
    @abstractmethod
    def fits(cls, semantics: Semantics) -> int | None:
        """Priority of this decoder for such a checkpoint; None: the checkpoint was not made for it."""

    @abstractmethod
    def __init__(self, config: Any, semantics: Semantics) -> None:
        """Raise UserError for options, or a checkpoint, that the decoder cannot run."""
        self.config = config

    @abstractmethod
    def num_rows(self, mode: int, max_length: int) -> int:
        """Number of decoding rows of a sequence of at most `max_length` tokens: constant, or a canvas; their
        mean, rounded up, if halves of the sequences differ."""

    @property
    def takes_selector(self) -> bool:
        """Whether it draws drafts by the selector of a checkpoint."""
        return False

    def num_canvases(self, params: SamplingParams) -> int:
        """Copies of a request's tokens that a pass feeds, each of `num_rows` rows in slots of its own."""
        return 1

    def configure(self, options: Mapping[str, Any]) -> Any:
        """The Config of a request; UserError IDLM-0453 for `decoder_options` that it cannot set."""
        if not options:
            return self.config
        config = request_config(self.name, self.config, options, self.request_options)
        try:
            self.check_options(config, options)
        except UserError as error:
            raise UserError("IDLM-0453", error.message, fix=error.fix) from error
        return config

    def check_options(self, config: Any, options: Mapping[str, Any]) -> None:
        """Raise UserError for a Config that a request's `options` make."""
        return

    def allocate(
        self, num_lanes: int, max_length: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the decoder's own state of lanes; `dtype` is that of the logits."""
        return

    def check(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Raise UserError for a request that the decoder cannot answer: IDLM-0477 for a constraint, IDLM-0479
        for changes of logits."""
        if params.constraint is not None and not self.takes_constraints:
            raise UserError(
                "IDLM-0477",
                f"constraint: decoder {self.name} does not draw each token after all those before it, so it "
                "is not known what a grammar allows there",
                fix="leave constraint out, or use decoder=isd or decoder=ar with a token-causal checkpoint",
            )
        others = ((name, off) for name, off in CHANGES.items() if name not in self.takes_changes)
        if refused := [name for name, off in others if getattr(params, name) != off]:
            raise UserError(
                "IDLM-0479",
                f"{' and '.join(refused)}: decoder {self.name} does not support this",
                fix="leave it out, or use decoder=isd or decoder=ar with a token-causal checkpoint",
            )
        self.kv_policy.check(params)
        self.configure(params.decoder_options)

    def admit(self, lanes: list[int], params: Sequence[SamplingParams]) -> None:
        """Reset the state of lanes that get new sequences."""
        return

    def rewind(self, lanes: list[int]) -> None:
        """React to the loss of (some of) the KV of these lanes; their known tokens stay."""
        return

    @abstractmethod
    def plan(self, table: SequenceState, batch: Batch) -> StepPlan:
        """Return what the pass is fed; changes nothing."""

    def replace_drafts(self, chosen: Tensor) -> None:
        """Replace drafts, int64 [b, 3]: lane, position and token of each; for decoders that offer
        candidates."""
        raise AssertionError(f"decoder {self.name} has no drafts")

    @abstractmethod
    def advance(self, table: SequenceState, batch: Batch, plan: StepPlan, wanted: WantedRows) -> StepOutcome:
        """Commit tokens from the wanted rows into the table and the decoder's state."""

    def tokens_per_forward(self, acceptance_J: Sequence[float], mode: StrideMode) -> float:
        """Expected tokens of a pass of `mode`, if several. `acceptance_J`: chance of each draft once those
        before it were accepted."""
        return 1.0

    def drafts_again(self, mode: int) -> bool:
        """Whether a pass of `mode` that rejects drafts from masks draws the next ones from rows that
        verified."""
        return False


DECODERS: Registry[type[Decoder]] = Registry("decoder", "idlm.infer.decoders")


def answer_length(params: SamplingParams) -> int:
    """`max_tokens`, which the engine fills in before anything else reads it."""
    assert params.max_tokens is not None, f"{params=}"
    return params.max_tokens


def fitting_decoders(semantics: Semantics) -> list[str]:
    """Names of the decoders for such a checkpoint, the default first; UserError IDLM-0619 if there is
    none."""
    priorities = {name: DECODERS.get(name).fits(semantics) for name in DECODERS.names()}
    fitting = {name: priority for name, priority in priorities.items() if priority is not None}
    if fitting:
        return sorted(fitting, key=fitting.__getitem__, reverse=True)
    kind = "full-diffusion" if semantics.causality == "full" else f"{semantics.causality}-causal"
    raise UserError(
        "IDLM-0619",
        f"this is a {kind} checkpoint (causality={semantics.causality!r}), which this version does not "
        "support: no decoder runs it",
        fix="use a token-causal or block-causal checkpoint; correct causality if it is a mistake",
    )


def choose_decoder(name: str | None, semantics: Semantics) -> type[Decoder]:
    """The decoder called `name`, or the checkpoint's default; UserError IDLM-0619 if no decoder fits it."""
    return DECODERS.get(name or fitting_decoders(semantics)[0])


def rows_by_mode(decoder: Decoder, max_length: int) -> tuple[int, ...]:
    """Decoding rows of a sequence of at most `max_length` tokens, in each mode."""
    return tuple(decoder.num_rows(mode, max_length) for mode in range(len(decoder.modes)))


def max_rows(decoder: Decoder, max_length: int) -> int:
    """Decoding rows of such a sequence in the widest mode."""
    return max(rows_by_mode(decoder, max_length))


def request_config(decoder: str, config: Any, options: Mapping[str, Any], allowed: Sequence[str]) -> Any:
    """`config` with a request's options, of which it may set the `allowed` ones; UserError IDLM-0453."""
    problems = [
        f"decoder_options.{name} cannot be set by a request of decoder {decoder}{did_you_mean(name, allowed)}"
        for name in options
        if name not in allowed
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
    """UserError IDLM-0452 for a checkpoint whose rows see later ones, or predict their own token."""
    if semantics.causality != "causal" or not semantics.logit_shift:
        raise UserError(
            "IDLM-0452",
            f"decoder {decoder} is token-causal and a row predicts the next token; the checkpoint has "
            f"causality={semantics.causality!r}, logit_shift={semantics.logit_shift}",
            fix="leave the decoder out, which takes the one that fits, or correct idlm_config.json",
        )


def changed_logits(
    table: SequenceState,
    batch: Batch,
    plan: StepPlan,
    wanted: WantedRows,
    drafts_ZJ: Tensor | None = None,
    store: Drafts | None = None,
) -> Tensor:
    """The logits of token-causal rows that requests draw from and test drafts with: those of the model,
    changed by penalties, biases and bans, then by grammars, which also act on the tested drafts in `store`.
    All are of a row's own past: the known tokens, and the drafts that it sees. A copy where the model's own
    logits are still needed, for log-probabilities."""
    logits_XV = wanted.logits()
    if batch.num_top is not None and (batch.changes or batch.grammars is not None):
        logits_XV = logits_XV.clone()
    if batch.changes:
        lanes_X = plan.logit_lanes_X
        if lanes_X is None:
            lanes_X = plan.lanes_B[:, None].repeat(1, len(logits_XV) // len(plan.lanes_B)).flatten()
        rows_X = plan.logit_rows_X
        rows = ChangedRows(
            lanes_X=lanes_X,
            # A row sees known tokens and drafts up to its limit; a prompt's row sees not all known ones.
            num_drafts_X=plan.limits_R[rows_X] - table.num_known_Z[lanes_X],
            positions_X=plan.positions_R[rows_X] + 1,
        )
        known = KnownTokens(table.num_known_Z, table.tokens_ZL, drafts_ZJ)
        table.changes.apply(logits_XV, known, rows, plan.lanes_B)
    if batch.grammars is not None:
        batch.grammars.mask(logits_XV, len(plan.lanes_B), store)
    return logits_XV
