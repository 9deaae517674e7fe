"""The decoder contract: plan the rows of a pass, then advance by its predictions. Plus the row layout that
token-causal decoders share.

A new decoder is one file in this folder that registers a subclass of `Decoder`.
Shapes: B sequences of a pass, R rows packed over sequences, X wanted rows, Z lanes, J drafts."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from idlm.config import schema
from idlm.config.suggest import did_you_mean
from idlm.contracts import CHANGES, SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.rejection import DraftLayout
from idlm.infer.decoders.selector import PathSelector
from idlm.infer.state.batch import Batch, StepOutcome, StepPlan, WantedRows, row_columns
from idlm.infer.state.kv_cache import TOKEN_BY_TOKEN, KVWritePolicy
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.logit_changes import ChangedRows, KnownTokens
from idlm.kernels.sampling import Drafts
from idlm.kernels.step_rows import Noise, pack_rows
from idlm.registry import Registry
from idlm.semantics import Semantics


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


def plan_rows(
    table: SequenceState,
    batch: Batch,
    *,
    layout: DraftLayout,
    mask_token_id: int | Noise,
    draft_buffer_Z: Tensor | None = None,
    drafts_ZJ: Tensor | None = None,
    is_packed: bool = False,
) -> StepPlan:
    """Lay out known tokens up to the pending one, then drafts and masks of the layout. If `is_packed` and no
    sequence feeds a prompt, logits are computed of the rows alone: sequences have different numbers of them.

    There is no prefill branch: masks follow a prompt if `samples_B`, never because of a row count. A
    sequence of full length feeds its pending token again and decodes nothing."""
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
    columns, logit_rows_X = row_columns(packed), packed.logit_rows_X
    first_logit_B, logit_lanes_X = torch.arange(len(lanes_B), device=table.device) * width, None
    if is_packed and batch.max_feed == 1 and batch.decides:
        logit_rows_X = torch.arange(len(packed.token_ids_R), device=table.device)
        first_logit_B, logit_lanes_X = packed.cu_rows_B1[:-1], lanes_B[packed.sequence_R]
    if width == 1:
        columns["is_mask_R"] = None
    return StepPlan(
        lanes_B=lanes_B,
        **columns,
        logit_rows_X=logit_rows_X,
        first_logit_B=first_logit_B,
        logit_lanes_X=logit_lanes_X,
        num_feed_B=batch.num_feed_B,
        samples_B=packed.samples_B,
        advances_B=packed.advances_B,
        max_rows=batch.max_feed - 1 + width,
        decoding_rows=width,
        # An earlier pass, in a wider mode, may have gone past the end of a sequence.
        max_slots=batch.max_known - 1 + max(width, layout.max_stride),
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
