"""One forward pass as plain data: the host's schedule, the decoders' batch, the rows that are fed, and the
outcome; and how lists of the host become tensors.

Shapes: B sequences of the pass, R rows (tokens fed, packed over sequences), X rows whose logits are wanted,
J tokens that a pass can emit for one sequence, W positions of a block, Z lanes; Y rows of a slice, D width,
V vocabulary, S forbidden ids, H rows that the head computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from idlm.infer.request import Request
from idlm.kernels.masked_logits import Proposals, masked_logits

if TYPE_CHECKING:
    from idlm.infer.structured.grammar import Grammar

Propose = Callable[[Tensor, slice], tuple[Tensor, ...]]
"""(logits_YV, slice of the wanted rows) -> tensors [Y, ...]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDemand:
    """Rows that each sequence needs in a pass of blocks, int64; 0: it waited before. `num_wanted_B`: of the
    head; once rows were dropped also `num_fed_B` and `num_retained_B`. `waits_B` (bool): sequences beyond the
    capacity, of which nothing is decided and remembered in this pass."""

    num_wanted_B: Tensor
    waits_B: Tensor
    num_fed_B: Tensor | None = None
    num_retained_B: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRows:
    """What the decoder needs of a pass that dropped rows. Row h of the head is wanted row `origin_H[h]` of
    the plan (None: row h); `numbers_X` is the inverse, -1: the row was dropped.
    `num_fed`: rows embedded, with padding."""

    origin_H: Tensor | None
    numbers_X: Tensor
    demand: BlockDemand
    num_fed: int

    def apply(self, plan: StepPlan) -> StepPlan:
        """The plan to advance by: sequences that wait do not sample, and store only what the host
        scheduled."""
        active, num_feed_B, waits_B = plan.active, plan.num_feed_B, self.demand.waits_B
        assert active is not None
        if active.num_scheduled_B is not None:
            num_scheduled_B = torch.minimum(num_feed_B, active.num_scheduled_B)
            num_feed_B = torch.where(waits_B, num_scheduled_B, num_feed_B)
        is_maskable_BW = active.is_maskable_BW & ~waits_B[:, None]
        return replace(
            plan,
            num_feed_B=num_feed_B,
            samples_B=plan.samples_B & ~waits_B,
            payload=replace(active, is_maskable_BW=is_maskable_BW, demand=self.demand),
        )


class WantedRows:
    """The rows of a pass whose predictions a decoder needs; row x is row `rows_X[x]` of `hidden_RD` (after
    the final norm). A decoder takes the best tokens alone, for which no logits are stored where a kernel can;
    or what it makes of logits slice by slice, so that those of many rows never exist together; or all logits
    at once.

    `dropped`: what accelerators dropped; None: no row. `head` maps hidden states [Y, D] to logits [Y, V] in
    the model's dtype; `weight_VD` and `workspace`: as of `masked_logits`. `num_chunks(X, b)`: slices that the
    memory plan allows X rows, of which the decoder takes b bytes each in addition to the logits; None: one.
    No slice divides a `group` of rows."""

    def __init__(
        self,
        hidden_RD: Tensor,
        rows_X: Tensor,
        head: Callable[[Tensor], Tensor],
        *,
        dropped: DroppedRows | None = None,
        num_chunks: Callable[[int, int], int] | None = None,
        weight_VD: Tensor | None = None,
        workspace: Tensor | None = None,
        group: int = 1,
    ) -> None:
        self.hidden_RD, self.rows_X, self.head, self.dropped = hidden_RD, rows_X, head, dropped
        self._num_chunks, self._weight_VD, self._workspace = num_chunks, weight_VD, workspace
        self.group = group
        self._logits_XV: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows_X)

    def logits(self) -> Tensor:
        """Logits [X, V] of all wanted rows; computed once."""
        if self._logits_XV is None:
            self._logits_XV = self.logits_of(self.rows_X)
        return self._logits_XV

    def best(self, forbidden_S: Tensor, is_wanted_X: Tensor, *, entropy: bool = False) -> Proposals | None:
        """The likeliest token of every row of `is_wanted_X` (bool), ties to the lower id, without the ids
        `forbidden_S` (int64); None where it depends on logits. `entropy`: also return it. For other rows
        everything is 0."""
        if self._weight_VD is None:
            return None
        return masked_logits(
            self.hidden_RD,
            torch.where(is_wanted_X, self.rows_X, -1),
            self._weight_VD,
            forbidden_S=forbidden_S,
            entropy=entropy,
            workspace=self._workspace,
        )

    def proposals(self, propose: Propose, *, row_bytes: int = 0) -> tuple[Tensor, ...]:
        """Apply `propose` to the logits of consecutive slices; returns its tensors joined to [X, ...]. It
        must not hold the logits, which are freed before those of the next slice are computed. `row_bytes`:
        what it allocates for a row, by which the memory plan decides the number of slices."""
        num_groups = len(self) // self.group
        num_chunks = 1 if self._num_chunks is None else self._num_chunks(len(self), row_bytes)
        num_chunks = min(num_chunks, num_groups)
        # Of nearly equal size: products of very few rows are slow, and may sum in another order.
        ends = [self.group * (number * num_groups // num_chunks) for number in range(num_chunks + 1)]
        parts = []
        for start, stop in pairwise(ends):
            rows = slice(start, stop)
            parts.append(propose(self.logits_of(self.rows_X[rows]), rows))
        return parts[0] if len(parts) == 1 else tuple(torch.cat(each) for each in zip(*parts, strict=True))

    @torch.inference_mode()
    def logits_of(self, rows_Y: Tensor) -> Tensor:
        """Logits [Y, V] of rows of `hidden_RD`: of any rows of a plan with `every_row`."""
        return self.head(self.hidden_RD[rows_Y])


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """Rows of a pass that may drop some: `fed` are embedded, `retained` are left after the layers that drop
    rows, and of these the head computes `head`. The first two include rows of prompts and of clean blocks."""

    fed: int
    retained: int
    head: int

    def __ge__(self, other: PassRows) -> bool:
        return self.fed >= other.fed and self.retained >= other.retained and self.head >= other.head


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLimits:
    """Rows that a pass of blocks reserves, beyond which sequences wait; None: as many as there are.
    `num_wanted`: rows of the head. `capacity`: rows of a pass that may drop some."""

    num_wanted: int | None = None
    capacity: PassRows | None = None

    def __ge__(self, other: BlockLimits) -> bool:
        pairs: list[tuple[Any, Any]] = [(self.num_wanted, other.num_wanted), (self.capacity, other.capacity)]
        return all(mine is None or (needed is not None and mine >= needed) for mine, needed in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasLimits:
    """A pass over whole canvases: `max_length` tokens of a sequence at most, prompt and answer together, and
    `num_canvases` of it at most (`Decoder.num_canvases`). `is_greedy`: no sequence draws."""

    max_length: int
    is_greedy: bool = False
    num_canvases: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Rows of a pass whose log-probabilities of the prompt's next token are requested: `counts[b]` rows of
    request b, from its first one on, which is known token `starts[b]`. `num_top`: as in `Batch`."""

    starts: list[int]
    counts: list[int]
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """What does not change while passes have the same requests. `max_length`: of the longest one, prompt and
    answer together; `filters`, `changes` and `num_top`: as in `Batch`. `is_plain`: none has a grammar or
    needs log-probabilities of its prompt. `takes_drafts`: not all take one token per pass."""

    lanes: list[int]
    max_length: int
    filters: bool
    changes: bool
    num_top: int | None
    is_plain: bool
    takes_drafts: bool

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Members:
        wanted = [request.params.logprobs for request in requests]
        return cls(
            lanes=[lane_of(request) for request in requests],
            max_length=max(request.max_length for request in requests),
            filters=any(request.params.has_filters for request in requests),
            changes=any(request.params.changes for request in requests),
            num_top=max((number for number in wanted if number is not None), default=None),
            is_plain=all(one.grammar is None and one.params.prompt_logprobs is None for one in requests),
            takes_drafts=not all(request.params.is_single for request in requests),
        )


@dataclass(slots=True, kw_only=True)
class Schedule:
    """One pass as the scheduler decides it: its requests, oldest first, and what happens before it.

    `num_feed[b]` known tokens are fed; at most `num_known[b]` are computed afterwards; `samples[b]`: these
    are all that are due, so the pass also decodes, in at most `num_rows[b]` rows whatever its mode
    (`num_decoding_rows` of token-causal sequences). A later pass computes the last `num_lookahead_tokens` of
    them. `scheduled_new_requests` get a lane, `preempted` ones lose their KV, and `resumed` ones get (part
    of) it back. `mode`: number of the decoder's mode. `limits`: rows that the pass is likely to need
    (`RowReservation`). `derive` sets `prompt_rows`, None if no request of the pass has log-probabilities of
    its prompt, and `grammars` of requests that decode, by index."""

    requests: list[Request] = field(default_factory=list)
    num_feed: list[int] = field(default_factory=list)
    num_known: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)
    scheduled_new_requests: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    mode: int = 0
    num_lookahead_tokens: int = 1
    num_decoding_rows: int = 1
    limits: BlockLimits = BlockLimits()
    prompt_rows: PromptRows | None = None
    grammars: dict[int, Grammar] = field(default_factory=dict)
    _members: Members | None = None

    def add(self, request: Request, num_feed: int, num_rows: int, num_known: int, *, samples: bool) -> None:
        self.complete()
        self.requests.append(request)
        self.num_known.append(num_known)
        self.num_feed.append(num_feed)
        self.samples.append(samples)
        self.num_rows.append(num_rows)

    def complete(self) -> None:
        """Fill in what the last requests do that have only `num_known` yet: they decode from one token."""
        missing = len(self.requests) - len(self.num_feed)
        self.num_feed += [1] * missing
        self.samples += [True] * missing
        self.num_rows += [self.num_decoding_rows] * missing

    @property
    def members(self) -> Members:
        if self._members is None:
            self._members = Members.of(self.requests)
        return self._members

    def follow(self, earlier: Schedule | None) -> None:
        """Take over the members of an earlier pass if its requests are the same."""
        if earlier is not None and earlier.requests == self.requests:
            self._members = earlier._members

    @property
    def is_eager(self) -> bool:
        """Whether the pass cannot be one graph: it stores hidden states of prompts or waits for grammars."""
        return self.prompt_rows is not None or bool(self.grammars)

    @property
    def canvases(self) -> CanvasLimits:
        return CanvasLimits(
            max_length=self.members.max_length,
            is_greedy=all(request.params.temperature == 0 for request in self.requests),
            num_canvases=max(request.num_canvases for request in self.requests),
        )

    def batch(self, device: torch.device, num_rows: Callable[[int, int], int], *, is_canvas: bool) -> Batch:
        """The decoders' view of exactly these requests. `num_rows`: `Decoder.num_rows`."""
        members = self.members
        return Batch(
            lanes_B=to_device(members.lanes, device),
            num_feed_B=to_device(self.num_feed, device),
            samples_B=to_device(self.samples, device, dtype=torch.bool),
            max_feed=max(self.num_feed),
            max_known=max(self.num_known),
            max_rows=num_rows(self.mode, members.max_length),
            num_rows=None,
            filters=members.filters,
            changes=members.changes,
            mode=self.mode,
            num_top=members.num_top,
            decides=not self.grammars,
            payload=self.canvases if is_canvas else None,
        )

    def derive(self) -> None:
        """Set `prompt_rows` and `grammars`, before the pass is launched."""
        counts, num_top = dict[int, int](), 0
        for request in self.scheduled_new_requests:
            if request.grammar is not None:
                # The lane gets the tokens that are on the host, and its grammar begins after them.
                request.grammar.follower = None
        if self.members.is_plain:
            return
        for index, request in enumerate(self.requests):
            if request.grammar is not None and self.samples[index]:
                self.grammars[index] = request.grammar
            if request.num_unscored:
                num_left = len(request.prompt_ids) - 1 - request.num_computed
                counts[index] = max(0, min(self.num_feed[index], num_left))
                num_top = max(num_top, request.params.prompt_logprobs or 0)
        if any(counts.values()):
            self.prompt_rows = PromptRows(
                starts=[request.num_computed for request in self.requests],
                counts=[counts.get(index, 0) for index in range(len(self.requests))],
                num_top=num_top,
            )

    def certain_rows(self) -> list[int]:
        """Of what is fed, for each request, the rows that the device has not stored yet for sure."""
        pairs = zip(self.requests, self.num_feed, strict=True)
        return [0 if request.num_inflight else num_feed for request, num_feed in pairs]

    def launched(self) -> None:
        """Note in the requests that the pass has been launched."""
        num_lookahead_tokens = self.num_lookahead_tokens
        for request, num_feed, samples in zip(self.requests, self.num_feed, self.samples, strict=True):
            request.num_inflight += samples
            num_stored = num_feed - samples * num_lookahead_tokens
            if num_stored:
                request.num_computed += num_stored


def lane_of(request: Request) -> int:
    assert request.lane is not None, f"{request.request_id=} has no lane"
    return request.lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Which sequences run in this pass, and how much of each.

    Sequence b is on lane `lanes_B[b]`; the next `num_feed_B[b]` of its known tokens are computed.
    `samples_B[b]` (bool): these are all that are due, so the pass also decodes. Under a KV policy without
    lookahead tokens the host may be late: what is due is decided on the device.

    Upper bounds: `max_feed` of `num_feed_B`; `max_known` of the known tokens that are computed after the
    pass; `max_rows` of the decoding rows of one sequence. `num_rows`: rows to lay out in all, padding
    included; None: exactly those that are fed, which the host has to wait for. `filters`: whether top-k,
    top-p or min-p is used. `changes`: whether a request has `contracts.CHANGES`. `num_top`: most likely
    tokens to report for every token; None: no log-probabilities. `grammars`: `masks.PassGrammars`, or None;
    `decides`: none masks the logits of the pass, nor will. `payload`: `BlockLimits`, `CanvasLimits`, or
    None."""

    lanes_B: Tensor
    num_feed_B: Tensor
    samples_B: Tensor
    max_feed: int
    max_known: int
    max_rows: int
    num_rows: int | None
    filters: bool
    changes: bool = False
    mode: int = 0
    num_top: int | None = None
    grammars: Any = None
    decides: bool = True
    payload: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveBlocks:
    """The block of `size` positions that each sequence is decoding, from slot `starts_B` on; all tokens
    before it are final, or become final in this pass, which feeds none, some or all of the block's rows.

    `is_maskable_BW` (bool): masks that this pass may decide if their wanted rows have logits. `num_passes_B`
    passes have decided something in the block so far, of the `num_steps_B` that its quota allows.
    `num_scheduled_B`: tokens that the host scheduled to be stored (on the device there may be one more clean
    block); None: all that are fed. `capacity`: as in `BlockLimits`; sequences take it in the order of
    `num_waits_B`, the number of passes in a row in which they waited, then those with few rows first.
    `is_exact`: the host waits for the device to count rows. `demand`: what sequences need; None: all fit."""

    starts_B: Tensor
    is_maskable_BW: Tensor
    num_passes_B: Tensor
    num_steps_B: Tensor
    size: int
    num_scheduled_B: Tensor | None = None
    capacity: PassRows | None = None
    num_waits_B: Tensor | None = None
    is_exact: bool = False
    demand: BlockDemand | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FedCanvases:
    """What a plan with whole canvases adds. `takes_best`: the decoder first reads `WantedRows.best`.
    `logit_group`: so many wanted rows, one after the other, make one prediction.

    The further canvases of sequences follow those of the batch. Sequence b begins at slot `first_slots_B[b]`
    of its lane, rounded up to a whole page, and its other slots count from there; None: at 0."""

    takes_best: bool = False
    first_slots_B: Tensor | None = None
    logit_group: int = 1


PLAIN_ROWS = FedCanvases()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The rows that one forward pass is fed, over all sequences of a batch.

    Sequence b owns rows cu_rows_B1[b] : cu_rows_B1[b+1]; rows from cu_rows_B1[-1] on are padding, whose KV is
    not stored. Row r is token `token_ids_R[r]` at rotary position `positions_R[r]`. Its key and value go to
    logical KV slot `slots_R[r]` of its sequence, and it sees the slots [0, limits_R[r]) and
    [branch_starts_R[r], slots_R[r]]: two ranges serve causal, block, tree, branch and full attention alike.
    `is_mask_R` (bool) marks MASK rows, which a gated adapter applies to (text may contain the mask's id);
    None: there are none.

    Logits are wanted for `logit_rows_X` only. The wanted rows of a sequence follow one another from
    `first_logit_B[b]` on; a sequence that feeds fewer rows repeats its last one, unless `logit_lanes_X` has
    the lane of each wanted row: then sequences have different numbers of them. `every_row`:
    `WantedRows.logits_of` takes the number of any row. `samples_B` (bool): the sequence decodes; the wanted
    rows of the others are ignored. `advances_B` (bool): its fed tokens become computed ones. All other
    tensors are int64. `max_rows` (of one sequence) and `max_slots` are upper bounds known to the host; most
    sequences have no more than `usual_rows`, and one that feeds no prompt no more than `decoding_rows`, if
    that is known."""

    lanes_B: Tensor
    cu_rows_B1: Tensor
    sequence_R: Tensor
    token_ids_R: Tensor
    positions_R: Tensor
    slots_R: Tensor
    limits_R: Tensor
    branch_starts_R: Tensor
    is_mask_R: Tensor | None
    logit_rows_X: Tensor
    first_logit_B: Tensor
    num_feed_B: Tensor
    samples_B: Tensor
    advances_B: Tensor
    max_rows: int
    max_slots: int
    usual_rows: int | None = None
    decoding_rows: int | None = None
    logit_lanes_X: Tensor | None = None
    every_row: bool = False
    payload: ActiveBlocks | FedCanvases | None = None

    @property
    def active(self) -> ActiveBlocks | None:
        """The payload of a plan with blocks."""
        return self.payload if isinstance(self.payload, ActiveBlocks) else None

    @property
    def canvases(self) -> FedCanvases:
        """The payload of a plan with whole canvases; of other plans one that changes nothing."""
        return self.payload if isinstance(self.payload, FedCanvases) else PLAIN_ROWS


ROW_COLUMNS = (
    *("cu_rows_B1", "sequence_R", "token_ids_R", "positions_R"),
    *("slots_R", "limits_R", "branch_starts_R", "is_mask_R"),
)
"""Columns of a plan that describe its rows; results of kernels have them by the same names."""


def row_columns(rows: Any) -> dict[str, Any]:
    """The `ROW_COLUMNS` of a plan, or of what a kernel has packed."""
    return {name: getattr(rows, name) for name in ROW_COLUMNS}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of one pass. Sequence b emitted `token_ids_BJ[b, :num_emitted_B[b]]`.

    Of its drafts `num_tested_B` were tested, until the first rejection, and `num_accepted_B` accepted.
    `logprobs` of the tokens, if requested: chosen [B, J], ids and numbers of the likeliest [B, J,
    K]; None: token j has those of the logits of wanted row first_logit_B[b] + j. `nonfinite_B`: 1 where
    tokens were drawn from logits that are not finite; more where only the next drafts were. All int64."""

    token_ids_BJ: Tensor
    num_emitted_B: Tensor
    nonfinite_B: Tensor
    num_accepted_B: Tensor | None = None
    num_tested_B: Tensor | None = None
    logprobs: tuple[Tensor, Tensor, Tensor] | None = None


def to_device(values: Sequence[Any], device: torch.device, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """`values` (numbers, or rows of equal length) as a tensor on `device`, in the order of its stream."""
    # torch reads lists several times as slowly as numpy.
    on_host = torch.as_tensor(np.asarray(values), dtype=dtype)
    if device.type != "cuda":
        return on_host.to(device)
    return on_host.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """A copy on the host, which must not be read before the stream of a GPU's tensor reaches it."""
    if not values.is_cuda:
        return values
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return on_host.copy_(values, non_blocking=True)


def set_lanes(lanes_B: Tensor, *columns: tuple[Tensor, Sequence[Any]]) -> None:
    """Write the values of these lanes into columns [Z] on one device."""
    for column_Z, values in columns:
        column_Z[lanes_B] = to_device(values, column_Z.device, dtype=column_Z.dtype)


def fill_lanes(lanes: Sequence[int], value: int, *columns_Z: Tensor) -> None:
    """Set these lanes of columns on one device. An assignment, column_Z[lanes] = value, would copy the number
    to the device and wait for it."""
    lanes_B = to_device(lanes, columns_Z[0].device)
    for column_Z in columns_Z:
        column_Z.index_fill_(0, lanes_B, value)
