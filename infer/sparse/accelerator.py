"""The contract of accelerators, which leave out part of the score matrix of blocks that are being decided,
and what they see of a pass.

The kv side (mage, quest, sparsed) leaves out columns: per KV head, the rows of a sequence's block see a list
of the slots before the block in place of all. The rows side (focus) leaves out rows of the block, in all
layers or from some layer on. An engine has at most one of each side, and neither depends on the other. A pass
calls, in this order: `begin` of both; `initial_rows`; in each layer, once keys and values of its rows are
stored, `commit_kv`, `select_rows`, `select_kv` and, with lists, `prefix_sums`; `finish`. Prompts and clean
blocks are always computed exactly, and a row always sees its own block. The state of a lane belongs to one
block (`BlockMemory`); it is cleared when the lane gets a new sequence or its sequence loses its KV. Slots are
logical (of their own sequence) unless a name has `physical`. B sequences, R rows, W positions of a block, N
query heads, K KV heads, H head dim, C listed slots, Z lanes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from idlm.infer.state.batch import ActiveBlocks, StepPlan, fill_lanes
from idlm.infer.state.page_pool import KVCache
from idlm.kernels.paged_attention import BeforeBlock, HeadShape
from idlm.registry import Registry
from idlm.semantics import Semantics

NOT_LISTED = -1


@dataclass(slots=True, kw_only=True)
class PassView:
    """One pass. `plan` is what the decoder laid out; `rows_BW` follows what is still computed: the number,
    among those rows, of the row at each position of the active block, -1 where there is none. `is_working_B`
    (bool): the plan has rows of the sequence's block; `is_mask_BW` (bool): positions where it has masks.
    `needs_all_rows_B` (bool): sequences of which the kv side lets no row be dropped. `waits_B` (bool):
    sequences beyond the capacity so far (`RowSelection`); they decide nothing in this pass, so no state may
    follow from it. `scale`: of scores."""

    NOT_FED: ClassVar[int] = -1
    plan: StepPlan
    active: ActiveBlocks
    cache: KVCache
    block_table_BP: Tensor
    page_size: int
    scale: float
    rows_BW: Tensor
    is_working_B: Tensor
    is_mask_BW: Tensor
    needs_all_rows_B: Tensor
    waits_B: Tensor = field(init=False)

    def __post_init__(self) -> None:
        demand = self.active.demand
        self.waits_B = torch.zeros_like(self.needs_all_rows_B) if demand is None else demand.waits_B

    @property
    def max_slots(self) -> int:
        """Upper bound, known to the host, of the slots of any sequence in this pass."""
        return min(self.plan.max_slots, self.block_table_BP.shape[1] * self.page_size)

    @property
    def sequences_B(self) -> Tensor:
        """All sequences, by number."""
        return torch.arange(len(self.is_working_B), device=self.is_working_B.device)


def ascending(slots_BKC: Tensor) -> Tensor:
    """Lists in the order that attention takes: int32, ascending, `NOT_LISTED` after the last slot."""
    beyond = torch.iinfo(torch.int32).max
    slots_BKC = torch.where(slots_BKC >= 0, slots_BKC, beyond).to(torch.int32).sort(dim=-1).values
    return torch.where(slots_BKC < beyond, slots_BKC, NOT_LISTED)


def block_rows(plan: StepPlan, active: ActiveBlocks) -> Tensor:
    """Which rows of a plan belong to active blocks, bool [R]; padding rows do not."""
    rows_R = torch.arange(len(plan.slots_R), device=plan.slots_R.device)
    return (plan.slots_R >= active.starts_B[plan.sequence_R]) & (rows_R < plan.cu_rows_B1[-1])


def scheduled_rows(plan: StepPlan, active: ActiveBlocks) -> Tensor:
    """Which rows store tokens that the host scheduled, bool [R]: prompts, and clean blocks among them."""
    rows_R = torch.arange(len(plan.slots_R), device=plan.slots_R.device)
    is_stored_R = (plan.slots_R < active.starts_B[plan.sequence_R]) & (rows_R < plan.cu_rows_B1[-1])
    if active.num_scheduled_B is None:
        return is_stored_R
    number_R = rows_R - plan.cu_rows_B1[plan.sequence_R]
    return is_stored_R & (number_R < active.num_scheduled_B[plan.sequence_R])


Side = Literal["kv", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The engine that an accelerator is built for. `block_size` is None if its decoder has no blocks. `heads`
    are those of one rank, `graphs` is the option of the user, `decoder_options` the decoder's whole Config,
    `max_rows` an upper bound of the rows of a pass. `routes_blocks`: the rows of a block choose experts
    together (`Routing.capacity`), so that each depends on all of them. `has_windows`: some layers see a
    window, which no accelerator supports. `num_slots` of the KV pool, if the user set its number of pages."""

    decoder: str
    decoder_options: Mapping[str, Any]
    block_size: int | None
    num_layers: int
    heads: HeadShape
    semantics: Semantics
    num_lanes: int
    max_slots: int
    max_rows: int
    page_size: int
    device: torch.device
    tensor_parallel: int
    deterministic: bool
    graphs: str
    routes_blocks: bool = False
    has_windows: bool = False
    num_slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSelection:
    """Rows that later layers compute, of those still computed: `keep_R` (bool). `limits_R` int64: these rows
    then see their own block below these slots only (what lies after has no keys and values yet); None: all of
    it. Rows of prompts, of clean blocks and of sequences that need all their rows are retained as they are.
    `drops_stored`: but of the last block before the active one, rows go by `keep_R`, and what earlier
    passes stored of them stays.

    The host has chosen before the pass how many rows are reserved (`PassRows`). A sequence whose rows
    exceed it waits: it decides nothing in this pass, and its random stream and answer stay those it would
    have had. Its pass must leave no trace in an accelerator's state: `finish` skips `PassView.waits_B`."""

    keep_R: Tensor
    limits_R: Tensor | None = None
    drops_stored: bool = False


class KVPass:
    """One pass of a kv-side accelerator. `is_sparse_B` (bool): sequences whose block rows see lists of slots
    in layers where `select_kv` returns some. `needs_all_rows_B` (bool): sequences of which no row may be
    dropped in this pass."""

    lists_ascend: ClassVar[bool] = False
    """Whether its lists are int32, contiguous and ascending, -1 after the last; else they are sorted, which
    costs a few launches a layer."""

    def __init__(
        self, view: PassView, *, is_sparse_B: Tensor, needs_all_rows_B: Tensor | None = None
    ) -> None:
        self.view, self.is_sparse_B, self.needs_all_rows_B = view, is_sparse_B, needs_all_rows_B

    def commit_kv(self, layer: int) -> None:
        """Called once the layer's keys are stored; those of prompts and clean blocks are final."""

    def select_kv(self, layer: int, q_RNH: Tensor) -> Tensor | None:
        """Return logical slots [B, K, C] before the block, in any order, -1 in unused positions; or None if
        the layer is exact for all sequences. C does not depend on what tensors hold.

        `q_RNH` has the rotated queries of the rows still computed. Only lists of `is_sparse_B` are used."""
        return None

    def prefix_sums(self, layer: int, q_RNH: Tensor) -> BeforeBlock | None:
        """Return where attention leaves each row's softmax sums over the slots before its block; or None.
        Called in layers with lists, after `select_kv`; sequences that see a list get none."""
        return None

    def finish(self) -> None:
        """Called after the last layer."""


class RowsPass:
    """One pass of a rows-side accelerator. `view.rows_BW`: which rows are still computed."""

    def __init__(self, view: PassView) -> None:
        self.view = view

    def initial_rows(self) -> RowSelection | None:
        """Return which of the decoder's rows are computed at all; None: all. Other rows see those left out
        with the keys and values that an earlier pass stored."""
        return None

    def select_rows(self, layer: int, q_RNH: Tensor) -> RowSelection | None:
        """Return the rows that are computed from this layer's attention on; None: all. Keys and values of the
        layer are stored, and `q_RNH` is rotated, for all rows still computed."""
        return None

    def finish(self) -> None:
        """Called after the last layer."""


class Accelerator:
    """Base class: each accelerator is one file and registers itself in `ACCELERATORS`.

    `Config` is a frozen dataclass of its options, filled from `accelerators.NAME.*`. Subclass `KVAccelerator`
    or `RowsAccelerator`."""

    name: ClassVar[str]
    Config: ClassVar[type]
    side: ClassVar[Side]
    exactness: ClassVar[Literal["exact", "lossy"]] = "lossy"
    exact_options: ClassVar[Mapping[str, Any]] = {}
    """Options with which it leaves nothing out; contract tests compare it with exact attention."""
    is_static: ClassVar[bool] = False
    """Whether its own code has static shapes and never waits for the device, so that a CUDA graph can hold
    its passes: no nonzero, no index by booleans, no number read back. The passes themselves are static."""
    needs_blocks: ClassVar[bool] = True
    shards: ClassVar[bool] = False
    """Whether it works on the heads of one rank alone, so that tensor parallelism is possible."""

    def __init__(self, config: Any, spec: EngineSpec) -> None:
        self.config, self.spec = config, spec

    @property
    def decodes_again(self) -> bool:
        """Whether the keys and values of an answer follow from how it was decoded, not from its tokens alone.
        Then the prefix cache shares prompts only, and a sequence that lost its KV decodes its answer once
        more, to the same tokens."""
        return False

    def problems(self) -> list[str]:
        """Return every reason why it cannot work with the engine or with its options; allocates nothing."""
        spec, found = self.spec, []
        if self.needs_blocks and spec.block_size is None:
            found.append(f"decoder={spec.decoder} has no blocks (allowed: block)")
        if not self.is_static and spec.graphs == "on":
            found.append(
                "graphs=on captures passes of static shape, and its passes are not (allowed: auto, off)"
            )
        if self.exactness != "exact" and spec.deterministic:
            found.append(
                "deterministic=true, but its sums depend on the batch in their last bits (allowed: false)"
            )
        if not self.shards and spec.tensor_parallel > 1:
            found.append(f"tensor_parallel={spec.tensor_parallel} divides the heads it adds up (allowed: 1)")
        return found

    def page_bytes(self) -> int:
        """Return the bytes that it stores per KV page in addition to keys and values."""
        return 0

    def pass_bytes(self) -> int:
        """Return the bytes that it takes during a pass at most."""
        return 0

    def allocate(self) -> None:
        """Allocate the state of `spec.num_lanes` lanes on `spec.device`."""

    def allocate_pages(self, num_pages: int) -> None:
        """Allocate the state of all KV pages, `page_bytes` each."""

    def reset(self, lanes: list[int]) -> None:
        """Clear the state of lanes that get new sequences, or whose sequences lost their KV."""


class KVAccelerator(Accelerator, ABC):
    """Leaves out slots that rows see."""

    side: ClassVar[Side] = "kv"

    @abstractmethod
    def begin(self, view: PassView) -> KVPass | None:
        """Start a pass; None if the pass is exact and changes no state."""


class RowsAccelerator(Accelerator, ABC):
    """Leaves out rows."""

    side: ClassVar[Side] = "rows"

    def problems(self) -> list[str]:
        """Also names a model that needs all rows of a block, for its routing or its edits."""
        allowed = "so none can be dropped (allowed: accelerators of the kv side)"
        found = super().problems()
        if self.spec.routes_blocks:
            found.append(f"the rows of a block choose experts together, {allowed}")
        if self.spec.semantics.edit_token_ids:
            found.append(f"edits move the positions of a block, whose rows are stored by position, {allowed}")
        return found

    @abstractmethod
    def begin(self, view: PassView) -> RowsPass | None:
        """Start a pass; None if all rows are computed and no state changes."""


class BlockMemory:
    """Which block the state of each lane belongs to: the one that begins at slot `starts_Z`; -1: none.
    State that belongs to another block than the active one is not used, so state ends with its block."""

    def __init__(self, num_lanes: int, device: torch.device) -> None:
        self.starts_Z = torch.full((num_lanes,), -1, dtype=torch.int64, device=device)

    def is_current(self, view: PassView) -> Tensor:
        """Return which sequences have state of their active block, bool [B]."""
        return self.starts_Z[view.plan.lanes_B] == view.active.starts_B

    def claim(self, view: PassView, is_claimed_B: Tensor) -> None:
        """Mark the state of sequences `is_claimed_B` (bool [B]) as that of their active blocks."""
        lanes_B = view.plan.lanes_B
        self.starts_Z[lanes_B] = torch.where(is_claimed_B, view.active.starts_B, self.starts_Z[lanes_B])

    def reset(self, lanes: list[int]) -> None:
        fill_lanes(lanes, -1, self.starts_Z)


ACCELERATORS: Registry[type[Accelerator]] = Registry("accelerator", "idlm.infer.accelerators")
